"""The target's own answers to the prompts of a data set: what a draft has to predict is these, not other text."""

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.ops.number_formats import dtype_name
from ...modeling.saving.atomic_save import staged_directory
from ...modeling.target.positions import check_length, has_position_table, position_limit
from ...modeling.target.target_identity import weights_fingerprint
from ..process_lock import one_process
from .provenance import chat_template_digest, provenance_path, read_settings
from .rendering import served_prompt, stop_tokens
from .rows import Source, errors_of, iter_rows, later_turns, open_rows

BATCHES_A_WINDOW = 32  # rows are sorted by length among so many batches, so that a batch has little padding


@dataclass
class RegenerateReport:
    """Rows by what became of them in this run."""

    written: int = 0  # answers
    stopped: int = 0  # of these, with a stop token; the others reached `max_new_tokens`
    resumed: int = 0  # rows that the output already held
    too_long: int = 0  # rows left out because their prompt exceeds `max_prompt_length`
    later_turns: int = 0  # of rows with `turns`, which are answered up to the first
    completion_tokens: int = 0  # in the written answers, stop tokens included


@dataclass
class _Prompt:
    row_id: int | str
    fields: dict  # the row to be written, without its answer
    ids: list[int]


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    output_path: str | Path,
    max_new_tokens: int = 1024,
    generation_config: GenerationConfig | None = None,
    batch_size: int = 8,
    max_prompt_length: int | None = None,
    template_kwargs: dict | None = None,
    seed: int = 0,
    target_revision: str | None = None,
) -> RegenerateReport:
    """Writes the target's answers as JSON lines that `prepare_dataset` reads, one row for each conversation.

    The prompt is everything before the answer that a conversation ends with (everything, if it ends otherwise), the
    row's `prompt`, or the first of its `turns`, as serving sends it. An output row has the answer as text and as
    `completion_ids`, exactly the tokens that the target produced, with its `prompt_ids`, `finish_reason` ("stop" or
    "length") and `id`. Rows are written in another order than they are read.

    An interrupted run resumes where it stopped if called again: ids already in `output_path` are skipped, and a line
    that was cut short is dropped and written again. Rows may have been added to the source, but those that were
    answered must be in it, with the same prompts. The settings are kept in `OUTPUT_PATH.provenance.json`. One process
    at a time writes to a file.

    Args:
        source: see [`~blockdraft.trainer.data.rows.open_rows`]; ids must be unique.
        generation_config: greedy or sampled; what it leaves unset is the target's own `generation_config`.
        max_prompt_length: longer prompts, in tokens, are left out and counted. Default: those for which
            `max_new_tokens` leaves no room in the target's table of positions, if it has one.
        template_kwargs: passed to the chat template, e.g. `{"enable_thinking": False}`: the same as at serving.
        target_revision: commit that the target was loaded at, to be recorded.
        seed: for sampling. A resumed run draws from another seed, so its samples are not those of one whole run.

    Raises:
        ValueError: if a row is malformed (file, row and field are named) or an id appears twice, if the output was
            made with other settings, from other prompts, or is being written, if the generation settings are not one
            plain sequence a prompt, or if the target has no positions for such prompts and answers.
    """
    output_path = Path(output_path)
    with one_process(output_path):
        max_prompt_length = _longest_prompt(target, max_new_tokens, max_prompt_length)
        config = _resolve(generation_config, target, tokenizer, max_new_tokens)
        _check_provenance(output_path, _settings(target, tokenizer, config, template_kwargs, seed, target_revision))
        done = _recover(output_path)
        report = RegenerateReport(resumed=len(done))
        torch.manual_seed(seed + len(done))
        target.eval()

        opened = open_rows(source)
        if done:
            _check_answered(opened, tokenizer, template_kwargs or {}, done, max_prompt_length, output_path)
        prompts = _pending(opened, tokenizer, template_kwargs or {}, done, max_prompt_length, report)
        rows = sum(len(dataset) for _, dataset in opened)
        with (
            output_path.open("a", encoding="utf-8") as output,
            tqdm(total=rows, initial=len(done), desc="Regenerating", unit="row") as progress,
        ):
            for batch in _batches(prompts, batch_size):
                for prompt, completion in zip(batch, _complete(target, batch, config), strict=True):
                    stopped = completion[-1] in config.eos_token_id
                    row = _answered(prompt, completion, stopped, tokenizer)
                    output.write(json.dumps(row, ensure_ascii=False) + "\n")
                    report.written += 1
                    report.stopped += stopped
                    report.completion_tokens += len(completion)
                output.flush()
                progress.update(len(batch))
        return report


def _batches(prompts: Iterator[_Prompt], size: int) -> Iterator[list[_Prompt]]:
    """Batches of prompts of about one length, the longest first among those of a window."""
    while window := list(islice(prompts, size * BATCHES_A_WINDOW)):
        window.sort(key=lambda prompt: len(prompt.ids), reverse=True)
        for start in range(0, len(window), size):
            yield window[start : start + size]


def _longest_prompt(target: PreTrainedModel, max_new_tokens: int, max_prompt_length: int | None) -> int | None:
    """`max_prompt_length`, or what an answer leaves of a table of positions."""
    what = f"`max_prompt_length` {max_prompt_length} with `max_new_tokens` {max_new_tokens}"
    check_length(target, (max_prompt_length or 1) + max_new_tokens, what, "Lower one of them.")
    if max_prompt_length is None and has_position_table(target):
        return position_limit(target) - max_new_tokens
    return max_prompt_length


def _resolve(config: GenerationConfig | None, target, tokenizer, max_new_tokens: int) -> GenerationConfig:
    """The settings that `generate` will use: what `config` leaves unset comes from the target."""
    config = copy.deepcopy(config) if config is not None else GenerationConfig()
    if config.eos_token_id is None:
        config.eos_token_id = stop_tokens(tokenizer, target.generation_config) or None
    config.update(**target.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.max_new_tokens = max_new_tokens
    config.max_length = None
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(config, name) or 1) > 1:
            raise ValueError(f"{name}={getattr(config, name)}: one answer is written for each prompt; set {name}=1")
    if config.stop_strings:
        raise ValueError("stop_strings: a draft learns to stop at tokens; set eos_token_id instead")
    if config.eos_token_id is None:
        raise ValueError(
            "eos_token_id: neither the generation config nor tokenizer or template have one, so no answer would stop"
        )
    if isinstance(config.eos_token_id, int):
        config.eos_token_id = [config.eos_token_id]
    if config.pad_token_id is None:
        config.pad_token_id = config.eos_token_id[0]
    config.return_dict_in_generate = False
    return config


def _settings(
    target, tokenizer, config: GenerationConfig, template_kwargs: dict | None, seed: int, revision: str | None
) -> dict:
    generation = config.to_diff_dict()
    generation.pop("transformers_version", None)
    settings = {
        "target": target.config.name_or_path,
        "revision": revision,
        "weights_sha256": weights_fingerprint(target),
        "dtype": dtype_name(target.dtype),
        "tokenizer": tokenizer.name_or_path,
        "chat_template_sha256": chat_template_digest(tokenizer),
        "template_kwargs": template_kwargs or {},
        "generation": generation,
        "seed": seed,
    }
    return json.loads(json.dumps(settings))


def _check_provenance(output_path: Path, settings: dict) -> None:
    """Writes the settings beside a new output; refuses other settings for one that exists."""
    path = provenance_path(output_path)
    if not path.exists():
        if output_path.exists():
            raise ValueError(f"output_path: {output_path} exists, but {path.name} does not; choose another path")
        with staged_directory(path.parent) as staging:
            provenance = {"settings": settings, "transformers": transformers.__version__}
            (staging / path.name).write_text(json.dumps(provenance, indent=2), encoding="utf-8")
        return
    before = read_settings(path)
    changed = [
        f"{key} was {before[key]!r}, now {value!r}"
        for key, value in settings.items()
        if key in before and before[key] != value
    ]
    if changed:
        raise ValueError(
            f"output_path: {output_path} was made with other settings ({'; '.join(changed)}); "
            "choose another path, or the same settings to resume it"
        )


def _recover(output_path: Path) -> dict[int | str, bytes]:
    """The ids already written, each with a digest of its prompt's tokens; an incomplete last line, which a crash
    leaves, is cut off."""
    done: dict[int | str, bytes] = {}
    if not output_path.exists():
        return done
    with output_path.open("rb+") as output:
        whole = 0
        for number, line in enumerate(output):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                done[row["id"]] = _digest(row["prompt_ids"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"output_path: {output_path}: row {number} is damaged: {error!r}") from error
            whole += len(line)
        output.truncate(whole)
    return done


def _digest(ids: list[int]) -> bytes:
    return hashlib.sha256(json.dumps(ids).encode()).digest()


def _check_answered(
    opened, tokenizer, template_kwargs: dict, done: dict, max_prompt_length: int | None, output_path: Path
) -> None:
    """Refuses an output that answers other prompts: rows without an id are numbered, so that those of another file
    would pass for answered."""
    rest = set(done)
    for where, row_id, row in iter_rows(opened):
        if row_id not in done:
            continue
        with errors_of(where):
            ids, _ = served_prompt(row, tokenizer, template_kwargs)
        if _digest(ids) != done[row_id]:
            raise ValueError(
                f"output_path: {output_path} was made from other data: its row with id {row_id!r} answers another "
                f"prompt than {where}. Choose another path"
            )
        if max_prompt_length is None or len(ids) <= max_prompt_length:
            rest.discard(row_id)
    if rest:
        limit = "" if max_prompt_length is None else f" of at most {max_prompt_length} tokens (max_prompt_length)"
        raise ValueError(
            f"output_path: {output_path} was made from other data: {len(rest)} of its {len(done)} answers are to no "
            f"prompt{limit} of these, such as id {min(rest, key=str)!r}. Choose another path"
        )


def _pending(
    opened, tokenizer, template_kwargs: dict, done: dict, max_prompt_length: int | None, report: RegenerateReport
) -> Iterator[_Prompt]:
    seen = set()
    for where, row_id, row in iter_rows(opened):
        if row_id in seen:
            raise ValueError(f"{where}: id: {row_id!r} appears twice; ids must be unique")
        seen.add(row_id)
        if row_id in done:
            continue
        with errors_of(where):
            ids, fields = served_prompt(row, tokenizer, template_kwargs)
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            report.too_long += 1
        else:
            report.later_turns += later_turns(row)
            yield _Prompt(row_id, fields, ids)


def _complete(target: PreTrainedModel, batch: list[_Prompt], config: GenerationConfig) -> list[list[int]]:
    """Each prompt's answer: the tokens up to the first stop token included, or `max_new_tokens` of them."""
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    prompts = [torch.tensor(prompt.ids, dtype=torch.long, device=target.device) for prompt in batch]
    input_ids = pad(prompts, padding_value=config.pad_token_id)
    attention_mask = pad([torch.ones_like(ids) for ids in prompts])
    sequences = target.generate(input_ids, attention_mask=attention_mask, generation_config=config)
    answers = []
    for tokens in sequences[:, input_ids.shape[1] :].tolist():
        end = next((i for i, token in enumerate(tokens) if token in config.eos_token_id), len(tokens) - 1)
        answers.append(tokens[: end + 1])
    return answers


def _answered(prompt: _Prompt, completion: list[int], stopped: bool, tokenizer) -> dict:
    text = tokenizer.decode(completion, skip_special_tokens=True)
    row = {"id": prompt.row_id, **prompt.fields}
    if "messages" in row:
        row["messages"] = [*row["messages"], {"role": "assistant", "content": text}]
    else:
        row["completion"] = text
    row["finish_reason"] = "stop" if stopped else "length"
    return row | {"prompt_ids": prompt.ids, "completion_ids": completion}
