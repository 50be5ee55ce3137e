"""Chat templates that several tests use."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# The way of thinking models: earlier answers lose their thoughts, the last one always has the scaffolding.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The way of Kimi K3: tags of special tokens, thoughts opened in the generation prompt, calls after the response.
KIMI_K3 = (
    "{% macro open(tag) %}{{ '<|open|>' + tag + '<|sep|>' }}{% endmacro %}"
    "{% macro close(tag) %}{{ '<|close|>' + tag + '<|sep|>' }}{% endmacro %}"
    "{% if tools %}{{ open('message role=\"system\" type=\"tool-declare\"') + (tools | tojson) + close('message') }}"
    "<|end_of_msg|>{% endif %}"
    "{% for m in messages %}{{ open('message role=\"' + m.role + '\"') }}"
    "{% if m.role == 'assistant' %}{{ open('think') + (m.reasoning_content or m.reasoning or '') + close('think') }}"
    "{{ open('response') + (m.content or '') + close('response') }}"
    "{% if m.tool_calls %}{{ open('tools') }}{% for call in m.tool_calls %}"
    "{{ open('call tool=\"' + call.function.name + '\"') }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ open('argument key=\"' + key + '\"') + (value if value is string else value | tojson) + close('argument') }}"
    "{% endfor %}{{ close('call') }}{% endfor %}{{ close('tools') }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{{ close('message') }}<|end_of_msg|>{% endfor %}"
    "{% if add_generation_prompt %}{{ open('message role=\"assistant\"') + open('think') }}{% endif %}"
)
