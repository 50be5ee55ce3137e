"""The doctor's look at a saved draft: its configuration as stored, its weights, its code, what lies beside them."""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ...hub_cards.upload import code_files
from ..evaluation.run_report import REPORT_NAME
from ..runs import DRAFT_TYPES, DraftType, check_draft
from .findings import Finding, fault, ok, skipped, warning

# Parameters of two and more dimensions that training may leave at zero.
MAY_BE_ZERO = ("bias_vl",)
# Settings that hold settings.
OBJECTS = ("auto_map", "target", "objective", "training")


def draft_folder(name: str, revision: str | None = None) -> Path:
    """The directory of a draft, downloaded if it is on the Hub, at a commit, branch or tag.

    Raises:
        ValueError: if there is none.
    """
    check_draft(name, revision)
    if Path(name).is_dir():
        return Path(name)
    try:
        patterns = ["*.json", "*.safetensors", "*.py", "*.jinja"]
        of_checkpoints = "*/*.safetensors"  # `*` stands for folders too
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=of_checkpoints)
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"`draft`: {name} is no directory here, and the Hub does not give it: {error}") from error


def read_settings(folder: Path) -> dict:
    """`config.json` as it is stored, with what is in the engines' view only under the draft's own names.

    Raises:
        ValueError: if there is none, or it is not a draft's.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"`draft`: {folder} has no config.json, so it holds no draft.")
    try:
        stored = _read_object(path)
    except ValueError as error:
        raise ValueError(f"`draft`: {path} holds no settings: {error}. Save the draft again.") from error
    kind = draft_type(stored, str(path)).config
    for name in {*OBJECTS, kind.engine_view_key} & stored.keys():
        if not isinstance(stored[name], dict | None):
            raise ValueError(f"`draft`: {path}: `{name}` is {stored[name]!r}, not an object. Save the draft again.")
    view = stored if kind.engine_view_key is None else stored.get(kind.engine_view_key) or {}
    return {ours: view[name] for name, ours in kind.engine_view.items() if name in view} | stored


def _read_object(path: Path) -> dict:
    """A JSON file that holds an object; a `ValueError` if it does not."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stored, dict):
        raise ValueError("it is no JSON object")
    return stored


def draft_type(settings: dict, where: str = "the draft") -> DraftType:
    """The family that a configuration names.

    Raises:
        ValueError: if it names none of ours.
    """
    for kind in DRAFT_TYPES.values():
        if kind.config.model_type == settings.get("model_type"):
            return kind
    known = ", ".join(kind.config.model_type for kind in DRAFT_TYPES.values())
    raise ValueError(f"`draft`: {where} has the `model_type` {settings.get('model_type')!r}; a draft has {known}.")


def load_draft_leniently(folder: Path, settings: dict) -> tuple[PreTrainedModel | None, list[Finding]]:
    """Loads what can be loaded. A missing `slot_layout` is filled in and the engines' view left out: the checks of the
    settings have named what is wrong with them.

    Returns:
        The draft in evaluation mode, on the CPU; `None` where its configuration cannot be. And the findings
        "configuration" and "weights".
    """
    kind = draft_type(settings)
    views = {kind.config.engine_view_key, *(kind.config.engine_view if kind.config.engine_view_key is None else ())}
    repaired = {name: value for name, value in settings.items() if name not in {*views, "sample_from_anchor"}}
    repaired["slot_layout"] = kind.config.family_slot_layout
    try:
        config = kind.config.from_dict(repaired)
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        return None, [fault("configuration", reason, "Correct config.json, or save the draft again.")]
    try:
        draft, info = kind.model.from_pretrained(
            folder, config=config, dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        return None, [fault("weights", f"They cannot be read: {reason}", "Save or download the draft again.")]
    return draft.eval(), [ok("configuration", f"{config.model_type}, complete"), check_loading(info)]


def check_loading(info: dict) -> Finding:
    """From `output_loading_info`: tensors that the draft lacks, does not know, or has in another shape."""
    problems = []
    for what, names in (
        ("missing, so they are random", info["missing_keys"]),
        ("unknown, so they are not used", info["unexpected_keys"]),
        ("of another shape, so they are random", [key[0] for key in info["mismatched_keys"]]),
    ):
        if names := sorted(names):
            problems.append(f"{len(names)} tensors are {what}: {', '.join(names[:3])}{', ...' * (len(names) > 3)}")
    if problems:
        mend = "Save the draft again from where it was trained; its configuration must be the one it was trained with."
        return fault("weights", "; ".join(problems), mend)
    return ok("weights", "every tensor of the draft is in the checkpoint, and no other")


def check_values(draft: PreTrainedModel) -> Finding:
    """Weights that no training leaves behind: NaN, infinite, or a whole matrix of zeros."""
    broken, empty = [], []
    for name, parameter in draft.named_parameters():
        if not torch.isfinite(parameter).all():
            broken.append(name)
        elif parameter.dim() > 1 and not parameter.any() and not name.endswith(MAY_BE_ZERO):
            empty.append(name)
    problems = [
        f"{what}: {', '.join(names[:3])}"
        for what, names in (("NaN or infinite", broken), ("all zero", empty))
        if names
    ]
    if problems:
        mend = "Go back to an earlier checkpoint; in training, look for a loss of NaN and lower the learning rate."
        return fault("weight values", "; ".join(problems), mend)
    count = sum(parameter.numel() for parameter in draft.parameters())
    return ok("weight values", f"{count:,} parameters, all finite, no matrix of zeros")


def check_stray_heads(folder: Path) -> Finding:
    """A draft uses the target's embedding and head; a copy in its checkpoint tempts engines to load that instead."""
    try:
        names = [name for path in folder.glob("*.safetensors") for name in _tensor_names(path)]
    except SafetensorError:
        return skipped("stray head", "the weights cannot be read")
    stray = [name for name in names if {"lm_head", "embed_tokens"} & set(name.split("."))]
    if stray:
        mend = "Take them out of the checkpoint: the target's own are used, and a copy can be stale or untied."
        return fault("stray head", f"the checkpoint holds {', '.join(stray[:3])}", mend)
    return ok("stray head", "no embedding and no LM head in the checkpoint")


def _tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def check_code(folder: Path, settings: dict) -> Finding:
    """Whether the draft loads where this package is absent."""
    auto_map = settings.get("auto_map") or {}
    if missing := {"AutoConfig", "AutoModel"} - auto_map.keys():
        found = f"config.json has no `auto_map` for {' and '.join(sorted(missing))}"
        return fault("code", found, "Save the draft with its own `save_pretrained`, which ships its code.")
    try:
        code_files(folder / "config.json")
    except ValueError as error:
        if _is_unlisted_snapshot(folder):
            return skipped("code", "it is not in the cache of the Hub", "Look again where the Hub is in reach.")
        return fault("code", str(error), "Save the draft with its own `save_pretrained`, or upload the .py files too.")
    return ok("code", "its code is in the checkpoint")


def _is_unlisted_snapshot(folder: Path) -> bool:
    """Whether a folder is in the Hub's cache and may lack files of its repository: `snapshot_download` lists these
    beside it, unless it does not reach the Hub."""
    listing = folder.parent.parent / "trees" / f"{folder.name}.json"
    return folder.match("models--*/snapshots/*") and not listing.is_file()


def check_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """The template of the tokenizer that was saved with the draft, against the one that is served."""
    config, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    if not config.is_file():
        return skipped("chat template", "the draft was saved without a tokenizer to compare with")
    try:
        trained = _read_object(config).get("chat_template")
        if template.is_file():
            trained = template.read_text(encoding="utf-8")
    except ValueError as error:
        found = f"the tokenizer saved with the draft ({config}, {template.name}) cannot be read: {error}"
        return fault("chat template", found, "Save the tokenizer of the training into the draft's folder again.")
    served = tokenizer.chat_template
    if isinstance(served, dict):  # several, of which one is used unless another is named
        served = served.get("default")
    if trained != served:
        found = "the target's tokenizer has another chat template than the one saved with the draft"
        if trained is None or served is None:
            found = f"the {'draft was trained' if trained is None else 'target is served'} without a chat template"
        return fault("chat template", found, "Serve with the draft's chat_template, or train on rows of the new one.")
    return ok("chat template", "the one that the draft was trained with" if trained else "none, in training neither")


def check_training(settings: dict) -> Finding:
    """What the configuration records about the training."""
    training = settings.get("training")
    if not training:
        mend = "If the draft was made elsewhere, mind the measured checks; otherwise save it with the trainer."
        return warning("training", "no record of a training", mend)
    steps, epochs, rows = training.get("global_step") or 0, training.get("epoch") or 0, training.get("batch_size")
    if steps == 0:
        return fault(
            "training", "0 steps: the draft is untrained", "Train it, or load the checkpoint that was trained."
        )
    return ok("training", f"{steps} steps{f' of {rows} rows' if rows else ''}, {epochs:.2f} epochs")


def logged_training(folder: Path) -> tuple[dict[str, float], list[Finding]]:
    """The last logged `accuracy` and `estimated_tau` of the training whose folder or checkpoint this is; may be empty.
    With a finding "training log" if the file that should hold them is damaged."""
    checkpoint, names = Path(get_last_checkpoint(folder) or folder), ("accuracy", "estimated_tau")
    for path in (checkpoint / TRAINER_STATE_NAME, folder / TRAINER_STATE_NAME, folder / f"{REPORT_NAME}.json"):
        if path.is_file():
            try:
                history = _read_object(path)["log_history"]
                found = [{name: float(logs[name]) for name in names} for logs in history if logs.keys() >= set(names)]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                mend = "Copy it from the training's folder again, or delete it: then nothing is compared with the log."
                return {}, [fault("training log", f"{path} holds no readable `log_history`: {error!r}", mend)]
            return found[-1] if found else {}, []
    return {}, []
