"""The text of `blockdraft COMMAND --help`, in groups and with defaults; neither torch nor transformers is imported."""

import ast
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from importlib.util import find_spec
from inspect import formatannotation, getdoc
from pathlib import Path
from typing import NamedTuple, get_type_hints

from ..training_settings import NOT_TAKEN, TrainingSettings

NOTE = (
    "CONFIG.yaml holds `key: value` lines with the same keys; the command line wins. Keys may have hyphens. "
    "With BLOCKDRAFT_DEBUG=1 in the environment, wrong input shows the traceback of its error."
)
TRAINING_NOTE = "--help_all adds the remaining settings of transformers.TrainingArguments."
# The groups of `train --help` in which our settings stand beside those of transformers that are used most.
TRAINING_GROUPS = {
    "Steps and batches": """
        max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps seed max_skipped_share
    """,
    "Objective": """
        loss_type num_anchors loss_decay_gamma prefix_weight_base ce_loss_alpha l1_loss_alpha confidence_head_alpha
        confidence_head_stop_gradient expert_bias_step
    """,
    "Optimizer": "learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm optim muon",
    "Precision, speed and memory": """
        bf16 use_cpu loss_chunk_size features cache_features features_dtype activation_checkpointing torch_compile
        train_sampling_strategy dataloader_num_workers ddp_timeout fsdp deepspeed
    """,
    "Features from a serving engine": """
        served_features served_layer_ids served_index served_final_norm served_attn_res_stream served_wait
    """,
    "Evaluation": "eval_strategy eval_steps per_device_eval_batch_size eval_decode_prompts eval_max_new_tokens",
    "Output, checkpoints and logs": """
        output_dir resume_from_checkpoint save_strategy save_steps save_total_limit load_best_model_at_end
        metric_for_best_model greater_is_better logging_steps report_to run_name disable_tqdm
    """,
    "Card and Hub": """
        license license_name license_link datasets push_to_hub hub_model_id hub_private_repo hub_strategy hub_revision
    """,
}


class Setting(NamedTuple):
    """What help says of a setting: its options, its type as annotated, and its line."""

    options: tuple[str, ...]
    kind: str
    text: str


def help_text(usage: str, description: str, settings: Mapping[str, type], everything: bool = False) -> str:
    """How a command is called, what it does and its `settings`, dataclasses by the title of their group;
    [`TrainingSettings`] is shown in groups of its own, with `everything` including what is rarely used."""
    shortened = TrainingSettings in settings.values() and not everything
    formatter = partial(HelpFormatter, max_help_position=32)
    parser = ArgumentParser(usage=usage, description=description, add_help=False, formatter_class=formatter)
    parser.epilog = f"{TRAINING_NOTE} {NOTE}" if shortened else NOTE
    for title, dtype in settings.items():
        if dtype is TrainingSettings:
            for group, known in training_groups(everything).items():
                _add_group(parser, group, None, known)
        else:
            _add_group(parser, title, getdoc(dtype), settings_of(dtype).values())
    return parser.format_help()


def _add_group(parser: ArgumentParser, title: str, description: str | None, settings: Iterable[Setting]) -> None:
    group = parser.add_argument_group(title, description)
    for setting in settings:
        group.add_argument(*setting.options, metavar=_metavar(setting.kind), help=setting.text)


def training_groups(everything: bool = False) -> dict[str, list[Setting]]:
    """The groups of [`TRAINING_GROUPS`], and with `everything` what else `TrainingArguments` has."""
    known = transformers_settings() | settings_of(TrainingSettings)
    groups = {title: names.split() for title, names in TRAINING_GROUPS.items()}
    if everything:
        shown = {name for names in groups.values() for name in names} | NOT_TAKEN.keys() | {"hub_token"}
        groups["Other settings of transformers.TrainingArguments"] = [name for name in known if name not in shown]
    return {title: [known[name] for name in names if name in known] for title, names in groups.items()}


def settings_of(dtype: type) -> dict[str, Setting]:
    """By name, the settings of a dataclass."""
    settings, types = {}, get_type_hints(dtype)  # HfArgumentParser changes the fields' own
    for field in fields(dtype):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        options = (f"--{field.name}", *field.metadata.get("aliases", ()))
        kind = formatannotation(types[field.name])
        settings[field.name] = Setting(options, kind, _with_default(field.metadata["help"], default))
    return settings


def transformers_settings() -> dict[str, Setting]:
    """By name, the settings of the installed `transformers.TrainingArguments`, read from its source, since importing
    it would import torch."""
    [folder] = find_spec("transformers").submodule_search_locations
    module = ast.parse(Path(folder, "training_args.py").read_text(encoding="utf-8"))
    [cls] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    # A default may be a name that the class sets before it, by the version of torch: the last value is the newest's.
    assignments = (node for node in ast.walk(cls) if isinstance(node, ast.Assign))
    values = {node.targets[0].id: node.value for node in assignments if isinstance(node.targets[0], ast.Name)}
    settings = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            name, given = node.target.id, {keyword.arg: keyword.value for keyword in node.value.keywords}
            default = given.get("default", ast.Constant(None))
            default = values.get(default.id, default) if isinstance(default, ast.Name) else default
            metadata = dict(zip(map(_literal, given["metadata"].keys), given["metadata"].values, strict=True))
            text = _with_default(_literal(metadata["help"]), _literal(default))
            settings[name] = Setting((f"--{name}",), ast.unparse(node.annotation), text)
    return settings


def _literal(node: ast.expr):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _with_default(text: str, default) -> str:
    """The help of a setting with its default; where that is `None`, the help says what happens."""
    if default is MISSING:
        return f"{text} (required)"
    if default is None or default == "":
        return text
    if isinstance(default, list | tuple):
        default = " ".join(map(str, default))
    return f"{text} (default: {str(default).lower() if isinstance(default, bool) else default})"


def _metavar(kind: str) -> str:
    """The name of a value in help, from the annotation of a setting."""
    kinds = [part for part in kind.split(" | ") if part != "None"]
    if kinds == ["bool"]:
        return "[true|false]"
    many = next((part for part in kinds if part.startswith("list[")), None)
    if many:
        return f"{many[5:-1].upper()} ..."
    return "JSON" if "dict" in kinds[0] else kinds[-1].upper() if len(kinds) == 1 else "STR"
