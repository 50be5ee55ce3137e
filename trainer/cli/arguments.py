"""Settings of the `blockdraft` command: dataclasses, a YAML file under them, and errors that name the setting."""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from ...hub_cards.rules import is_hub_id
from ..data.loss_mask import THINKING_TAGS

DRAFT_REVISION = "Commit, tag or branch of a draft that is on the Hub."


def setting(help: str, **kwargs):
    """A field with its line of help; required unless it has a default."""
    return field(metadata={"help": help}, **kwargs)


@dataclass
class TargetArguments:
    """The frozen target, as `from_pretrained` takes it."""

    target: str = setting("Target model: a directory or a Hub id.")
    target_revision: str | None = setting("Commit, tag or branch of the target.", default=None)
    target_dtype: str = setting("Dtype of the target: auto (as saved), float32, bfloat16 or float16.", default="auto")
    target_device_map: str | None = setting("How to spread the target over devices, e.g. auto.", default=None)
    trust_remote_code: bool = setting("Run code that comes with target or draft.", default=False)

    def __post_init__(self):
        if self.target_dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"`target_dtype` is {self.target_dtype!r}; choose auto, float32, bfloat16 or float16.")


# Settings of a new draft that only one type has.
OWN_SETTINGS = {"dflash": ("is_causal", "num_full_attention_layers"), "dspark": ("markov_rank", "confidence_input")}


@dataclass
class DraftArguments:
    """An existing draft to go on with, or the shape of a new one."""

    draft: str | None = setting(
        "Draft to go on with: a directory or a Hub id. Without it a new one is made.", default=None
    )
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    draft_type: str | None = setting("What a new draft is: dflash (the default) or dspark.", default=None)
    num_draft_layers: int | None = setting(
        "Layers of a new draft (dflash: 5; dspark: what the target says, or 3).", default=None
    )
    block_size: int | None = setting(
        "Tokens of its block, the known one included (dflash: 16; dspark: what the target says, or 5).", default=None
    )
    mask_token_id: int | None = setting("Token for positions to predict (proposed by the tokenizer).", default=None)
    target_layer_ids: list[int] | None = setting(
        "Zero-based target layers it reads (spread over the depth).", default=None
    )
    sliding_window: int | None = setting(
        "Context tokens that it sees (dflash: the block size, 0 for all; dspark: the target's, or 128).", default=None
    )
    num_full_attention_layers: int | None = setting(
        "dflash: last layers that see the whole context all the same (1 of several layers, or 0).", default=None
    )
    is_causal: bool | None = setting("dflash: whether a slot sees only earlier slots (true).", default=None)
    markov_rank: int | None = setting(
        "dspark: rank of the Markov head, 0 for none and no confidence head (what the target says, or 256).",
        default=None,
    )
    confidence_input: str | None = setting(
        "dspark: what the confidence head reads, post_norm (the default) or pre_norm (what engines serve).",
        default=None,
    )

    def shape(self) -> dict:
        """The settings of a new draft that were given, `draft_type` too; 0 for "none" is `None` in the config."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("draft", "draft_revision")}
        given = {name: value for name, value in values.items() if value is not None}
        return given | {name: None for name in ("sliding_window", "markov_rank") if given.get(name) == 0}

    def __post_init__(self):
        shape = self.shape()
        if self.draft is None and self.draft_revision is not None:
            raise ValueError("`draft_revision` belongs to an existing draft: name it as `draft`.")
        if self.draft is not None and shape:
            raise ValueError(f"`draft` is given, whose shape is fixed: leave out {', '.join(shape)}.")
        draft_type = self.draft_type or "dflash"
        if draft_type not in OWN_SETTINGS:
            raise ValueError(f"`draft_type` is {draft_type!r}; choose one of {', '.join(OWN_SETTINGS)}.")
        for owner, names in OWN_SETTINGS.items():
            if owner != draft_type and (foreign := [name for name in names if name in shape]):
                raise ValueError(f"`{foreign[0]}` belongs to `draft_type` {owner}; this draft is a {draft_type}.")


@dataclass
class LoraArguments:
    """An adapter of `draft`, under the names of peft's `LoraConfig`; without `lora_r` the draft itself is trained."""

    lora_r: int | None = setting(
        "Rank of a LoRA adapter, which is trained and saved instead of the draft.", default=None
    )
    lora_alpha: int | None = setting("The adapter is scaled by lora_alpha / lora_r (lora_r).", default=None)
    lora_dropout: float | None = setting("Dropout of the adapter's input (0).", default=None)
    use_dora: bool = setting("DoRA: the adapter has magnitudes of its own.", default=False)
    target_modules: list[str] | None = setting("Linear layers that are adapted, e.g. o_proj (all).", default=None)
    modules_to_save: list[str] | None = setting(
        "Modules that are trained and saved whole, e.g. norm or markov_head (none).", default=None
    )

    def __post_init__(self):
        if self.lora_r is None and (given := self._given()):
            raise ValueError(f"`{next(iter(given))}` belongs to an adapter: give its rank, `lora_r`, too.")
        if self.lora_r is not None and self.lora_r < 1:
            raise ValueError(f"`lora_r` is {self.lora_r}: it must be at least 1.")

    def lora_config(self) -> dict | None:
        """Arguments of `LoraConfig`; `None` without an adapter."""
        if self.lora_r is None:
            return None
        given = self._given()
        return {"r": given.pop("lora_r"), "lora_alpha": self.lora_r} | given

    def _given(self) -> dict:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


@dataclass
class DataArguments:
    """Chat rows and how they become token rows."""

    train_data: list[str] = setting(
        "Chat rows to train on: .jsonl, .json, .parquet, or Hub datasets: owner/name[@revision][/config][:split]."
    )
    data_mix: list[float] | None = setting(
        "Share of each source in train_data; short ones start again until all is seen (every row once).", default=None
    )
    streaming: bool = setting(
        "Read and encode train_data while training; needs max_steps and eval_data.", default=False
    )
    shuffle_buffer: int = setting("streaming: rows among which the next one is drawn.", default=1000)
    packing: bool = setting("Pack the rows to train on into rows of max_length tokens.", default=False)
    num_proc: int | None = setting("Processes that encode rows.", default=None)
    eval_data: list[str] | None = setting("Held-out chat rows.", default=None)
    eval_fraction: float = setting("Share of the training rows held out where there is no eval_data.", default=0.02)
    max_length: int = setting("Longest row in tokens; what is beyond is cut off.", default=4096)
    assistant_turns: str = setting("Turns that are learned: all or last.", default="all")
    train_on_thinking: bool = setting("Learn an answer's thinking block instead of only reading it.", default=True)
    thinking_tags: list[str] = setting(
        "What opens and what closes a thinking block.", default_factory=lambda: list(THINKING_TAGS)
    )
    stop_token_ids: list[int] | None = setting("Tokens that end a turn (the tokenizer's eos).", default=None)
    template_kwargs: dict | str | None = setting("JSON for the chat template, the same as at serving.", default=None)
    max_bad_fraction: float = setting("Share of rows that may be unreadable.", default=0.0)

    def __post_init__(self):
        self.template_kwargs = read_json("template_kwargs", self.template_kwargs)
        if self.data_mix and len(self.data_mix) != len(self.train_data):
            raise ValueError(
                f"`data_mix` has {len(self.data_mix)} shares for {len(self.train_data)} sources in `train_data`."
            )
        if self.streaming and not self.eval_data:
            raise ValueError("`streaming` holds no rows out: give `eval_data`.")
        if not self.eval_data and not 0 < self.eval_fraction < 1:
            raise ValueError(
                f"`eval_fraction` is {self.eval_fraction}: it must lie between 0 and 1, or give `eval_data`."
            )


@dataclass
class RunArguments:
    """What to do with an earlier run in `output_dir`."""

    overwrite_output_dir: bool = setting(
        "Start anew: deletes the checkpoints in output_dir instead of going on from the last.", default=False
    )


@dataclass
class RegenerateArguments:
    """Prompts, and how the target answers them."""

    data: list[str] = setting("Chat rows whose last answer is to be rewritten, or prompts: .jsonl, .json, .parquet.")
    output: str = setting("JSON lines to write; an interrupted file is gone on with.")
    max_new_tokens: int = setting("Longest answer in tokens.", default=1024)
    batch_size: int = setting("Prompts answered at the same time.", default=8)
    max_prompt_length: int | None = setting("Longer prompts, in tokens, are left out.", default=None)
    do_sample: bool | None = setting(
        "Sample (true) or greedy (false); the target's own setting if not given.", default=None
    )
    temperature: float | None = setting("Temperature of sampling.", default=None)
    top_p: float | None = setting("Nucleus of sampling.", default=None)
    template_kwargs: dict | str | None = setting("JSON for the chat template, the same as at serving.", default=None)
    seed: int = setting("Seed of sampling.", default=0)

    def __post_init__(self):
        self.template_kwargs = read_json("template_kwargs", self.template_kwargs)


@dataclass
class ScheduleArguments:
    """How much of a drafted block is verified; all of it unless given. Needs a draft with a confidence head."""

    confidence_threshold: float | None = setting(
        "Verify slots while the chance that all of them are accepted is at least this, in [0, 1].", default=None
    )
    confidence_cost_table: bool = setting(
        "Verify slots while they pay, by the times of this machine, which are measured first.", default=False
    )

    def __post_init__(self):
        threshold = self.confidence_threshold
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"`confidence_threshold` is {threshold}: it must lie between 0 and 1.")
        if threshold is not None and self.confidence_cost_table:
            raise ValueError("`confidence_threshold` and `confidence_cost_table` are two ways to cut: give one.")


@dataclass
class EvaluateArguments:
    """Held-out prompts to decode for real."""

    draft: str = setting("The draft: a directory or a Hub id.")
    data: list[str] = setting("Held-out chat rows: .jsonl, .json or .parquet files.")
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    num_prompts: int = setting("Prompts to decode, evenly spaced over the data.", default=32)
    max_new_tokens: int = setting("Longest answer in tokens.", default=128)
    max_length: int = setting("Longest row in tokens; what is beyond is cut off.", default=4096)
    template_kwargs: dict | str | None = setting("JSON for the chat template, the same as at serving.", default=None)
    output: str | None = setting("JSON file to write the figures to.", default=None)
    card: str | None = setting(
        "Name of the data, e.g. owner/name or HumanEval: puts the figures into the card of `draft`, a directory.",
        default=None,
    )
    benchmark_task: str | None = setting(
        "Where `card` is a benchmark of the Hub that ranks drafts by tau: its task, as in its eval.yaml. The Hub then "
        "reads tau from .eval_results as well.",
        default=None,
    )

    def __post_init__(self):
        self.template_kwargs = read_json("template_kwargs", self.template_kwargs)
        if self.benchmark_task and not is_hub_id(self.card):
            raise ValueError(
                f"`benchmark_task` belongs to a benchmark on the Hub, and `card` is {self.card!r}: name one there."
            )


@dataclass
class DoctorArguments:
    """A draft with low acceptance, and rows to measure it on."""

    draft: str = setting("The draft: a directory or a Hub id; it may be broken.")
    data: list[str] | None = setting(
        "Chat rows like those of the training: .jsonl, .json or .parquet files; nothing is measured without.",
        default=None,
    )
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    num_prompts: int = setting("Prompts to decode, evenly spaced over the data.", default=8)
    max_new_tokens: int = setting("Longest answer in tokens.", default=64)
    max_length: int = setting("Longest row in tokens; what is beyond is cut off.", default=4096)
    template_kwargs: dict | str | None = setting("JSON for the chat template, the same as at serving.", default=None)
    engine: str | None = setting("Engine to check a DSpark draft for: vllm or sglang.", default=None)
    output: str | None = setting("JSON file to write the findings to.", default=None)

    def __post_init__(self):
        self.template_kwargs = read_json("template_kwargs", self.template_kwargs)
        if self.engine not in (None, "vllm", "sglang"):
            raise ValueError(f"`engine` is {self.engine!r}; choose vllm or sglang.")
        for name in ("num_prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be at least 1.")


@dataclass
class CalibrateArguments:
    """Held-out prompts to learn from how often a slot of a given confidence is accepted."""

    draft: str = setting("The draft, a directory: the fitted temperatures are written into its configuration.")
    data: list[str] = setting("Held-out chat rows: .jsonl, .json or .parquet files.")
    num_prompts: int = setting("Prompts at most, evenly spaced over the data; fitted on the one part.", default=4000)
    rounds: int = setting("Rounds to measure on; half as many are fitted on.", default=5000)
    max_new_tokens: int = setting("Longest answer in tokens.", default=256)
    temperature: float = setting("Of the answers, as they will be served; 0: greedy.", default=0.0)
    top_p: float = setting("Nucleus of sampling.", default=1.0)
    seed: int = setting("Seed of sampling.", default=0)
    max_length: int = setting("Longest row in tokens; what is beyond is cut off.", default=4096)
    template_kwargs: dict | str | None = setting("JSON for the chat template, the same as at serving.", default=None)
    output: str | None = setting("Folder for the figures and the reliability plot (the draft's).", default=None)

    def __post_init__(self):
        self.template_kwargs = read_json("template_kwargs", self.template_kwargs)
        if self.num_prompts < 2 or self.rounds < 1:
            name, least = ("num_prompts", 2) if self.num_prompts < 2 else ("rounds", 1)
            raise ValueError(f"`{name}` is {getattr(self, name)}: it must be at least {least}.")


@dataclass
class ExportArguments:
    """A draft's weights under the names of a released checkpoint."""

    draft: str = setting("The draft: a directory or a Hub id.")
    output: str | None = setting("Folder to write; not needed with `into`.", default=None)
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    format: str = setting("deepseek: `mtp.*` tensors as DeepSeek V4.1 releases them.", default="deepseek")
    quantize: bool = setting("FP8 blocks and FP4 experts, as released, instead of bf16.", default=False)
    into: str | None = setting(
        "Target checkpoint, a directory, to put the draft beside: a shard and a merged index; its files stay.",
        default=None,
    )
    engine: str | None = field(
        default=None, metadata={"help": "Engine to check the draft for: vllm or sglang.", "aliases": ["--for"]}
    )

    def __post_init__(self):
        if self.format != "deepseek":
            raise ValueError(f"`format` is {self.format!r}; the one there is is deepseek.")
        if self.output is None and self.into is None:
            raise ValueError("Give the folder to write, `output`, or the target's, `into`.")
        if self.engine not in (None, "vllm", "sglang"):
            raise ValueError(f"`for` is {self.engine!r}; choose vllm or sglang.")


@dataclass
class PushArguments:
    """A saved draft and its repository."""

    directory: str = setting("The saved draft: the run's output_dir, or one of its checkpoints.")
    repo_id: str = setting("Repository on the Hub, owner/name; made if there is none.")
    private: bool = setting("Make the repository private; refuses one that is public.", default=False)
    revision: str | None = setting("Branch (the default one); made if there is none.", default=None)
    create_pr: bool = setting("Open a pull request instead.", default=False)
    commit_message: str | None = setting("Title of the commit.", default=None)


@dataclass
class GenerateArguments:
    """One prompt."""

    draft: str = setting("The draft: a directory or a Hub id.")
    prompt: str = setting("What the user says; the chat template is applied where the tokenizer has one.")
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    max_new_tokens: int = setting("Longest answer in tokens.", default=256)
    temperature: float = setting("0: greedy.", default=0.0)
    top_p: float = setting("Nucleus of sampling.", default=1.0)
    seed: int = setting("Seed of sampling.", default=0)
    template_kwargs: dict | str | None = setting("JSON for the chat template.", default=None)

    def __post_init__(self):
        self.template_kwargs = read_json("template_kwargs", self.template_kwargs)


def read_json(name: str, value: dict | str | None) -> dict | None:
    """A mapping given as JSON on the command line."""
    if not isinstance(value, str):
        return value
    try:
        value = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"`{name}` is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` must be a JSON object, not a {type(value).__name__}.")
    return value


class SettingsParser(HfArgumentParser):
    """[`~transformers.HfArgumentParser`] with a YAML file under the command line; errors are `ValueError`s.

    Args:
        dataclass_types: whose fields are the settings.
        positionals: settings that may be given first, without their name.
        kwargs: those of `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Sequence[type], positionals: Sequence[str] = (), **kwargs):
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        self.positionals = positionals
        known = [f for dtype in dataclass_types for f in fields(dtype) if f.init]
        self.settings = [f.name for f in known]
        self.settings += [alias.lstrip("-") for f in known for alias in f.metadata.get("aliases", ())]

    def error(self, message: str):
        raise ValueError(message)

    def parse(self, argv: Sequence[str]) -> tuple:
        """Instances of the dataclasses from `[CONFIG.yaml] [positionals] [--key value ...]`; the command line wins.

        Raises:
            ValueError: for an unknown setting, with the nearest known one, or a value that cannot be.
        """
        argv, given = list(argv), []
        if argv and argv[0].endswith((".yaml", ".yml")):
            given += self._read_yaml(Path(argv.pop(0)))
        for name in self.positionals:
            if not argv or argv[0].startswith("--"):
                break
            given.append(f"--{name}={argv.pop(0)}")
        for token in argv:
            if token.startswith("--") and (key := token[2:].split("=")[0].replace("-", "_")) != "help":
                self._check_known(key, "--" + key, extra=[f"no_{name}" for name in self.settings])
        *parsed, rest = self.parse_args_into_dataclasses(
            given + argv, return_remaining_strings=True, look_for_args_file=False
        )
        if rest:
            raise ValueError(f"{rest[0]!r} belongs to no setting; write --key value.")
        return tuple(parsed)

    def _check_known(self, key: str, shown: str, extra: Sequence[str] = ()) -> None:
        if key not in self.settings and key not in extra:
            near = difflib.get_close_matches(key, self.settings, n=1, cutoff=0.0)
            raise ValueError(f"{shown} is not a setting; the nearest one is `{near[0]}`.")

    def _read_yaml(self, path: Path) -> list[str]:
        """The file as command line arguments, so that both are read and checked alike."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold `key: value` lines")
        argv = []
        for key, value in values.items():
            self._check_known(key, f"`{key}` in {path}")
            if value is None:
                raise ValueError(f"`{key}` in {path} has no value; leave the line out for the default.")
            if isinstance(value, list):
                argv += [f"--{key}", *map(str, value)]
            else:
                argv.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
        return argv
