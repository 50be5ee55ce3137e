"""Prompts of chat rows, as serving sends them: what is decoded to evaluate or to calibrate a draft."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from .rendering import served_prompt
from .rows import Source, errors_of, later_turns, open_rows, read_row, row_id


@dataclass
class PromptReport:
    """What became of the rows among which prompts were chosen."""

    rows: int = 0  # of all files
    prompts: int = 0  # that were taken
    too_long: int = 0  # of the chosen rows, those left out with more than `max_length` tokens
    empty: int = 0  # of the chosen rows, those left out since nothing comes before an answer
    later_turns: int = 0  # of rows with `turns`, of which the first is taken
    conversations: list[int | str] = field(default_factory=list)  # of the prompts: their rows' `id`, or number

    def __str__(self) -> str:
        left_out = (
            f"{self.too_long} left out as longer than max_length" if self.too_long else "",
            f"{self.empty} left out as empty" if self.empty else "",
            f"{self.later_turns} later `turns` left out" if self.later_turns else "",
        )
        return "; ".join([f"{self.prompts} prompts of {self.rows} rows", *filter(None, left_out)])


def read_prompts(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    max_length: int,
    template_kwargs: dict | None = None,
) -> tuple[list[list[int]], PromptReport]:
    """Token ids of the prompts of `num_prompts` rows, spread evenly over all; of all rows if there are fewer. Each is
    what serving sends for the answer that a conversation ends with, or lacks; see
    [`~blockdraft.trainer.data.rendering.served_prompt`].

    Args:
        source: see [`~blockdraft.trainer.data.rows.open_rows`].
        max_length: longer prompts, in tokens, are left out.
        template_kwargs: passed to the chat template, as at serving.

    Raises:
        ValueError: if a chosen row is malformed (file, row and field are named), or none has a prompt.
    """
    opened = open_rows(source)
    count, first, prompts = sum(len(dataset) for _, dataset in opened), 0, []
    chosen = range(count) if count <= num_prompts else [i * count // num_prompts for i in range(num_prompts)]
    report = PromptReport(rows=count)
    for name, dataset in opened:
        for index in (place - first for place in chosen if first <= place < first + len(dataset)):
            with errors_of(f"{name}: row {index}"):
                row = read_row(dataset[index])
                ids = [] if row is None else served_prompt(row, tokenizer, template_kwargs)[0]
            if not ids or len(ids) > max_length:
                report.empty += not ids
                report.too_long += len(ids) > max_length
                continue
            prompts.append([int(token) for token in ids])
            report.later_turns += later_turns(row)
            report.conversations.append(row_id(row, first + index))
        first += len(dataset)
    report.prompts = len(prompts)
    if not prompts:
        raise ValueError(f"data: there is no prompt: {report}")
    return prompts, report
