"""The `blockdraft` command.

    blockdraft train [CONFIG.yaml] [--key value ...]
    blockdraft regenerate TARGET DATA OUTPUT [--key value ...]
    blockdraft calibrate TARGET DRAFT --data FILE [--key value ...]
    blockdraft evaluate TARGET DRAFT --data FILE [--key value ...]
    blockdraft doctor TARGET DRAFT [DATA] [--key value ...]
    blockdraft generate TARGET DRAFT "prompt" [--key value ...]
    blockdraft export DRAFT OUTPUT --format deepseek [--key value ...]
    blockdraft push DIRECTORY REPO_ID [--key value ...]

Every command takes a YAML file first, with the same keys as the command line, which wins. `blockdraft COMMAND --help`
lists the settings.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from warnings import catch_warnings, simplefilter

import torch
from datasets import Dataset, concatenate_datasets
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer, set_seed
from transformers.utils import logging

from ...hub_cards.card import CARD, add_to_card
from ...hub_cards.upload import publish
from ...modeling.decoding.block_decoding import block_decode
from ...modeling.decoding.confidence_schedule import ConfidenceThreshold
from ...modeling.deepseek_v41.deepseek_v41_release import export_deepseek
from ...modeling.target.pairing import check_pair
from ...modeling.target.target_identity import loaded_commit
from ..adapters import is_adapter
from ..data.dataset import answers_of, mix, prepare_dataset, prepare_stream
from ..data.loss_mask import apply_template
from ..data.packing import pack_rows
from ..data.regenerate import regenerate
from ..data.rows import hub_datasets
from ..diagnostics.checkpoint import draft_folder
from ..diagnostics.doctor import doctor
from ..diagnostics.findings import FAULT, findings_text
from ..diagnostics.rows import check_provenance
from ..evaluation.calibration import calibrate, save_temperatures, split_prompts
from ..evaluation.decoding import evaluate_decoding, held_out_prompts
from ..evaluation.held_out import HELD_OUT
from ..evaluation.run_report import write_calibration, write_report
from ..interrupt import SaveOnInterrupt
from ..runs import (
    TimeEstimate,
    cost_table,
    is_finished,
    load_draft,
    load_target,
    new_draft,
    new_trainer,
    save_finished,
    train_draft,
)
from ..training_args import DraftTrainingArguments
from .arguments import (
    CalibrateArguments,
    DataArguments,
    DoctorArguments,
    DraftArguments,
    EvaluateArguments,
    ExportArguments,
    GenerateArguments,
    LoraArguments,
    PushArguments,
    RegenerateArguments,
    RunArguments,
    ScheduleArguments,
    SettingsParser,
    TargetArguments,
)

logger = logging.get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 0, 1 if `doctor` finds a fault, 2 for wrong input, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    try:
        if argv[0] not in COMMANDS:
            raise ValueError(f"{argv[0]!r} is not a command; choose one of {', '.join(COMMANDS)}")
        command = COMMANDS[argv[0]]
        usage = f"blockdraft {argv[0]} [CONFIG.yaml] {' '.join(map(str.upper, command.positionals))} [--key value ...]"
        parser = SettingsParser(command.settings, command.positionals, usage=usage, description=command.run.__doc__)
        return command.run(*parser.parse(argv[1:])) or 0
    except (ValueError, OSError, StrictDataclassError) as error:
        logger.debug("The error's origin:", exc_info=True)
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted {interrupt}; the same command goes on from there.", file=sys.stderr)
        return 130


def train(
    target_args: TargetArguments,
    draft_args: DraftArguments,
    lora_args: LoraArguments,
    data_args: DataArguments,
    run_args: RunArguments,
    args: DraftTrainingArguments,
) -> None:
    """Trains a draft for a frozen target, evaluates it by real decoding, and saves it with its card and report. An
    interrupted run goes on from its last checkpoint when the same command is given again; a finished draft stays as it
    is. With `lora_r` an adapter of an existing draft is trained and saved instead."""
    lora = lora_args.lora_config()
    if lora and not draft_args.draft:
        raise ValueError("`lora_r` adapts a draft that is saved already: name it as `draft`.")
    set_seed(args.seed)
    target, tokenizer = _target(target_args)
    train_set, eval_set = _datasets(data_args, tokenizer, args)
    args.datasets = args.datasets or hub_datasets(data_args.train_data) or None
    answers = answers_of(data_args.train_data, target, tokenizer, _target_commit(target_args))
    if draft_args.draft:
        draft = load_draft(draft_args.draft, torch.float32, target_args.trust_remote_code, draft_args.draft_revision)
        check_pair(target, draft, tokenizer, _target_commit(target_args))
    else:
        shape = draft_args.shape()
        if draft_args.draft_type == "dspark" and args.confidence_head_alpha == 0:
            shape["confidence_head"] = False  # it would not be trained
        draft = new_draft(target, tokenizer, rows=train_set, **shape)
    trainer = new_trainer(
        draft,
        target,
        args,
        target_revision=_target_commit(target_args),
        peft_config=LoraConfig(**lora, revision=draft_args.draft_revision) if lora else None,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        callbacks=[SaveOnInterrupt(), TimeEstimate()],
    )
    trainer.data_record = {"answers": answers}
    if not run_args.overwrite_output_dir and is_finished(trainer):
        print(f"{args.output_dir} is finished and stays as it is; `overwrite_output_dir` starts anew.")
        if trainer.publisher:
            trainer.publisher.finish()
            with suppress(OSError, ValueError):  # raised at the end
                trainer.publisher.publish(args.output_dir, commit_message="Model save")
    else:
        train_draft(trainer, run_args.overwrite_output_dir)
        if args.eval_decode_prompts and trainer.is_world_process_zero():
            prompts = held_out_prompts(eval_set, args.eval_decode_prompts)
            report = evaluate_decoding(target, trainer.draft, prompts, args.eval_max_new_tokens)
            trainer.card_metrics = {HELD_OUT: report.headline()}
            print(report.table())
            path = write_report(args.output_dir, trainer.state.log_history, {report.block_size: report})
            print(f"The figures are in {path}.")
        save_finished(trainer)
        print(f"Saved in {args.output_dir}.")
    # Processes that exit with their group open may abort.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if trainer.publisher and trainer.publisher.error:
        raise trainer.publisher.error


def _datasets(args: DataArguments, tokenizer: PreTrainedTokenizerBase, training: DraftTrainingArguments):
    """Rows to train on and held-out ones; says what became of the rows that were read."""
    if args.streaming and training.max_steps < 1:
        raise ValueError("`streaming` data has no length: set `max_steps`.")
    if not args.streaming and args.shuffle_buffer != DataArguments.shuffle_buffer:
        logger.warning("`shuffle_buffer` is not used: without `streaming`, a row is drawn from all of them.")
    if args.eval_data and args.eval_fraction != DataArguments.eval_fraction:
        logger.warning("`eval_fraction` is not used: `eval_data` is held out, and all of `train_data` is trained on.")
    same = ("assistant_turns", "stop_token_ids", "template_kwargs", "train_on_thinking", "thinking_tags")
    settings = {name: getattr(args, name) for name in ("max_length", "max_bad_fraction", *same)}
    stream = partial(prepare_stream, tokenizer=tokenizer, **settings)

    def prepare(name: str, data: list[str], id_prefix: str = "") -> Dataset:
        rows, report = prepare_dataset(data, tokenizer, num_proc=args.num_proc, id_prefix=id_prefix, **settings)
        print(f"{name}: {report}")
        return rows

    sources = {str(i): [name] for i, name in enumerate(args.train_data)} if args.data_mix else {"": args.train_data}
    with training.main_process_first(desc="encoding the rows"):
        eval_set = prepare("eval_data", args.eval_data) if args.eval_data else None
        if args.streaming:
            parts = [stream(data, id_prefix=prefix) for prefix, data in sources.items()]
        else:
            parts = [prepare(f"train_data {prefix}".strip(), data, prefix) for prefix, data in sources.items()]
        if eval_set is None:
            split = [_hold_out(part, args.eval_fraction, training.seed) for part in parts]
            parts, eval_set = [part["train"] for part in split], concatenate_datasets([part["test"] for part in split])
            print(f"{len(eval_set)} rows of train_data are held out for evaluation.")
        train_set = mix(parts, args.data_mix, training.seed) if args.data_mix else parts[0]
        if args.streaming:
            train_set = train_set.shuffle(seed=training.seed, buffer_size=args.shuffle_buffer)
        if args.packing:
            train_set = pack_rows(train_set, args.max_length)
    return train_set, eval_set


def _hold_out(rows: Dataset, fraction: float, seed: int) -> dict[str, Dataset]:
    held_out = max(1, round(fraction * len(rows)))
    if held_out == len(rows):
        raise ValueError("`train_data` has one row: none is left to hold out; give more rows, or `eval_data`.")
    return rows.train_test_split(test_size=held_out, seed=seed)


def regenerate_answers(target_args: TargetArguments, args: RegenerateArguments) -> None:
    """Writes the target's own answers to the prompts of chat rows: what a draft should be trained on."""
    target, tokenizer = _target(target_args)
    given = {name: getattr(args, name) for name in ("do_sample", "temperature", "top_p")}
    report = regenerate(
        target,
        tokenizer,
        args.data,
        args.output,
        max_new_tokens=args.max_new_tokens,
        generation_config=GenerationConfig(**{name: value for name, value in given.items() if value is not None}),
        batch_size=args.batch_size,
        max_prompt_length=args.max_prompt_length,
        template_kwargs=args.template_kwargs,
        seed=args.seed,
        target_revision=_target_commit(target_args),
    )
    print(
        f"{report.written} answers written to {args.output} ({report.stopped} ended by themselves, "
        f"{report.completion_tokens} tokens); {report.resumed} were there, {report.too_long} prompts too long."
    )


def calibrate_confidence(target_args: TargetArguments, args: CalibrateArguments) -> None:
    """Fits a temperature to each slot of a draft's confidence head on decoded prompts, writes them into the draft's
    configuration, and reports on other prompts how well confidence meets acceptance, before and after."""
    if not Path(args.draft).is_dir():
        raise ValueError(f"`draft` is {args.draft!r}: give a directory, its configuration is written anew.")
    target, tokenizer = _target(target_args)
    draft = _draft_of(target, tokenizer, target_args, args.draft)
    fit, test = split_prompts(_prompts(args, tokenizer))
    set_seed(args.seed)
    config = GenerationConfig(**_sampling(args))
    report = calibrate(target, draft, fit, test, args.max_new_tokens, args.rounds, config)
    saved = save_temperatures(draft, report.temperatures, args.draft)
    print(report.table(), report.summary(), sep="\n\n")
    path = write_calibration(args.output or args.draft, report)
    print(f"The temperatures are in {saved}, the figures in {path}.")


def evaluate(target_args: TargetArguments, args: EvaluateArguments, schedule_args: ScheduleArguments) -> None:
    """Decodes held-out prompts with the draft, with `generate()` and with the same loop without a draft."""
    if args.card and not Path(args.draft, "config.json").is_file():
        raise ValueError(f"`card` writes into a saved draft: `draft` is {args.draft!r}, give its directory.")
    target, tokenizer = _target(target_args)
    draft = _draft_of(target, tokenizer, target_args, args.draft, args.draft_revision)
    prompts = _prompts(args, tokenizer)
    schedule = _schedule(schedule_args, target, draft, prompts[0])
    report = evaluate_decoding(target, draft, prompts, args.max_new_tokens, confidence_schedule=schedule)
    print(report.table())
    if args.output:
        Path(args.output).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    if args.card:
        task = {"benchmark_task": args.benchmark_task} if args.benchmark_task else {}
        add_to_card(args.draft, draft.config, args.card, report.headline() | task)
        print(f"The figures are in {Path(args.draft) / CARD}.")


def examine(target_args: TargetArguments, args: DoctorArguments) -> int:
    """Looks for what lowers a draft's acceptance: wrong settings, another target or tokenizer, broken weights, and,
    given data, what decoding and other settings show. The exit code is 1 if there is a fault."""
    draft = draft_folder(args.draft, args.draft_revision)
    target, tokenizer = _target(target_args)
    if is_adapter(str(draft)):
        draft = load_draft(str(draft), trust_remote_code=target_args.trust_remote_code)
    rows, findings = None, []
    if args.data:
        rows, report = prepare_dataset(args.data, tokenizer, args.max_length, template_kwargs=args.template_kwargs)
        print(f"data: {report}")
        commit = _target_commit(target_args)
        findings += check_provenance(report.provenance, target, tokenizer, args.template_kwargs, commit)
    findings += doctor(
        target,
        tokenizer,
        draft,
        rows,
        target_revision=_target_commit(target_args),
        engine=args.engine,
        num_prompts=args.num_prompts,
        max_new_tokens=args.max_new_tokens,
    )
    print(findings_text(findings))
    if args.output:
        Path(args.output).write_text(json.dumps([finding.to_dict() for finding in findings], indent=2) + "\n")
    return int(any(finding.status == FAULT for finding in findings))


def export(args: ExportArguments) -> None:
    """Writes a DSpark draft as the `mtp.*` tensors of a released DeepSeek V4.1 checkpoint: into a folder of its own,
    or beside the files of its target, which stay as they are."""
    draft = load_draft(args.draft, revision=args.draft_revision)
    with catch_warnings():
        simplefilter("ignore")  # they are returned as well
        misfits = export_deepseek(draft, args.output, args.quantize, args.into, args.engine)
    for misfit in misfits:
        print("warning:", misfit, file=sys.stderr)
    print(f"Written into {' and '.join(place for place in (args.output, args.into) if place)}.")


def push(args: PushArguments) -> None:
    """Uploads a saved draft to the Hub: config, weights, code, card, tokenizer, metrics and plots, nothing else."""
    commit = publish(
        args.directory,
        args.repo_id,
        private=args.private or None,
        revision=args.revision,
        create_pr=args.create_pr,
        commit_message=args.commit_message,
    )
    print(f"Published: {commit.pr_url or commit.commit_url}")


def generate(target_args: TargetArguments, args: GenerateArguments, schedule_args: ScheduleArguments) -> None:
    """Answers one prompt, streamed, and says how many tokens a round the draft brought."""
    target, tokenizer = _target(target_args)
    draft = _draft_of(target, tokenizer, target_args, args.draft, args.draft_revision)
    set_seed(args.seed)
    if tokenizer.chat_template is None:
        inputs = tokenizer(args.prompt, return_tensors="pt")
    else:
        messages = [{"role": "user", "content": args.prompt}]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        inputs = apply_template(tokenizer, messages, **options, **(args.template_kwargs or {}))
    input_ids = inputs["input_ids"].to(target.device)
    schedule = _schedule(schedule_args, target, draft, input_ids[0].tolist())
    output = block_decode(
        target,
        input_ids,
        draft=draft,
        confidence_schedule=schedule,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        max_new_tokens=args.max_new_tokens,
        return_dict_in_generate=True,
        **_sampling(args),
    )
    new, rounds = output.sequences.shape[1] - input_ids.shape[1], len(output.accepted_lengths)
    tau = f"tau {sum(output.accepted_lengths) / rounds:.2f}, " if rounds else ""
    print(f"\n[{new} tokens in {rounds} rounds: {tau}{new / output.seconds['total']:.1f} tokens/s]")


def _sampling(args: CalibrateArguments | GenerateArguments) -> dict:
    if args.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}


def _target(args: TargetArguments):
    return load_target(
        args.target, args.target_revision, args.target_dtype, args.target_device_map, args.trust_remote_code
    )


def _target_commit(args: TargetArguments) -> str | None:
    """What the target was loaded at: a branch moves on."""
    return loaded_commit(args.target, args.target_revision)


def _draft_of(target, tokenizer, target_args: TargetArguments, name: str, revision: str | None = None):
    draft = load_draft(name, trust_remote_code=target_args.trust_remote_code, revision=revision)
    check_pair(target, draft, tokenizer, _target_commit(target_args))
    return draft


def _prompts(args: EvaluateArguments | CalibrateArguments, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    rows, report = prepare_dataset(args.data, tokenizer, args.max_length, template_kwargs=args.template_kwargs)
    print(f"data: {report}")
    return held_out_prompts(rows, args.num_prompts)


def _schedule(args: ScheduleArguments, target, draft, prompt: list[int]):
    """How to cut what is verified; `None`: not at all."""
    if args.confidence_cost_table:
        return cost_table(target, draft, prompt)
    return None if args.confidence_threshold is None else ConfidenceThreshold(args.confidence_threshold)


@dataclass(frozen=True)
class Command:
    run: Callable
    settings: tuple[type, ...]
    positionals: tuple[str, ...] = ()


COMMANDS = {
    "train": Command(
        train, (TargetArguments, DraftArguments, LoraArguments, DataArguments, RunArguments, DraftTrainingArguments)
    ),
    "regenerate": Command(regenerate_answers, (TargetArguments, RegenerateArguments), ("target", "data", "output")),
    "calibrate": Command(calibrate_confidence, (TargetArguments, CalibrateArguments), ("target", "draft")),
    "evaluate": Command(evaluate, (TargetArguments, EvaluateArguments, ScheduleArguments), ("target", "draft")),
    "doctor": Command(examine, (TargetArguments, DoctorArguments), ("target", "draft", "data")),
    "generate": Command(
        generate, (TargetArguments, GenerateArguments, ScheduleArguments), ("target", "draft", "prompt")
    ),
    "export": Command(export, (ExportArguments,), ("draft", "output")),
    "push": Command(push, (PushArguments,), ("directory", "repo_id")),
}
