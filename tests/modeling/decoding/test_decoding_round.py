"""What a round of block decoding does beside the two forwards, counted rather than timed."""

import pytest
import torch
from decoding_models import build_draft, build_dspark_draft, build_target, prompts
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from blockdraft.modeling.decoding.block_decoding import block_decode

PAIRS = {"k3": build_draft, "v41": build_dspark_draft}
# Each of these waits for the device.
READS = {"tolist", "item", "numpy", "cpu", "nonzero", "unique", "__bool__", "__int__", "__index__", "__float__"}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 8}


class OutsideForwards:
    """Counts operators and reads of tensors by the host while no forward of the given modules runs."""

    def __init__(self, *modules: torch.nn.Module):
        self.operators = self.reads = self._depth = 0
        self._handles = []
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(lambda *_: self._enter(1)))
            self._handles.append(module.register_forward_hook(lambda *_: self._enter(-1)))

    def _enter(self, step: int) -> None:
        self._depth += step

    def __enter__(self):
        outer = self

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                outer.operators += outer._depth == 0
                return function(*args, **(kwargs or {}))

        class Reads(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                outer.reads += outer._depth == 0 and function.__name__ in READS
                return function(*args, **(kwargs or {}))

        self._modes = Operators(), Reads()
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        for handle in self._handles:
            handle.remove()


def counted(target, draft, new_tokens: int, **settings) -> tuple[int, int, int]:
    """Rounds, reads and operators outside the forwards of one answer."""
    heads = [head for head in (draft.markov_head, draft.confidence_head) if head is not None]
    embeddings = (target.get_input_embeddings(), target.get_output_embeddings())
    torch.manual_seed(0)
    with OutsideForwards(target, draft, *heads, *embeddings) as outside:
        output = target.generate(
            prompts(1)[0],
            custom_generate=block_decode,
            draft=draft,
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            **settings,
        )
    return len(output.accepted_lengths), outside.reads, outside.operators


@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_round_reads_once_and_does_little_beside_its_forwards(name, settings):
    target = build_target(name)
    draft = PAIRS[name](target)
    # The first answer checks the pair as well.
    _, short, long = (counted(target, draft, length, **settings) for length in (4, 4, 14))
    rounds, reads, operators = (b - a for a, b in zip(short, long, strict=True))
    assert rounds > 4
    assert reads == rounds
    # Sampling processes, weighs and searches; with a Markov head slot by slot.
    limits = {("k3", False): 150, ("k3", True): 200, ("v41", False): 150, ("v41", True): 320}
    assert operators / rounds <= limits[name, settings["do_sample"]]


def test_processors_that_take_any_prefix_wait_for_nothing():
    target = build_target("k3")
    draft = build_dspark_draft(target)
    _, short, long = (counted(target, draft, n, do_sample=False, repetition_penalty=1.3) for n in (4, 4, 14))
    assert long[1] - short[1] == long[0] - short[0] > 4


@pytest.mark.parametrize("name", PAIRS)
def test_the_draft_computes_every_context_row_once(name):
    target = build_target(name)
    draft, rows = PAIRS[name](target), []
    projection = draft.mtp[0].main_proj if name == "v41" else draft.fc
    projection.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[1]))
    output = block_decode(
        target, prompts(1)[0], draft=draft, do_sample=False, max_new_tokens=12, return_dict_in_generate=True
    )
    drafted = sum(length > 1 for length in output.verified_lengths)
    # The prompt (DSpark: as far as its window reaches), then what each round committed.
    assert rows[0] == (draft.config.sliding_window if name == "v41" else prompts(1)[0].shape[1])
    assert drafted > 4 and rows[1:] == output.accepted_lengths[: drafted - 1]
