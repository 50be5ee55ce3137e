"""The doctor's look at a saved draft: its files, its configuration, its weights."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ...hub_cards.repository_files import code_files
from ...modeling.families import FAMILIES, DraftFamily
from ...modeling.target.target_shapes import draft_fault
from ..evaluation.report_folder import REPORT_NAME
from ..loading import check_draft
from .findings import Check, Finding, fault, ok, skipped

LOGGED = ("accuracy", "estimated_tau")
CANNOT_BE = (ValueError, TypeError, StrictDataclassError)


def draft_folder(name: str, revision: str | None = None) -> Path:
    """The directory of a draft, downloaded if it is on the Hub, at a commit, branch or tag. Raises a `ValueError` if
    there is none."""
    check_draft(name, revision)
    if Path(name).is_dir():
        return Path(name)
    wanted, left_out = ["*.json", "*.safetensors", "*.py", "*.jinja"], "*/*.safetensors"  # of checkpoints in it
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=left_out))
    except (OSError, ValueError) as error:
        raise ValueError(f"`draft`: {name} is no directory here, and the Hub does not give it: {error}") from error


def load_leniently(folder: Path) -> tuple[PreTrainedConfig | None, PreTrainedModel | None, list[Finding]]:
    """Configuration and draft, in evaluation mode on the CPU, each `None` where it cannot be loaded; and the findings
    "configuration" and "weights". Raises a `ValueError` if the folder holds no draft of ours."""
    stored, family = _read_settings(folder)
    config, finding = _read_config(family.config, stored)
    findings = [finding.of("configuration", "Correct config.json, or save the draft again.")]
    if config is None:
        return None, None, findings
    leniently = {"dtype": "auto", "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        draft, info = family.model.from_pretrained(folder, config=config, **leniently)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        unreadable = fault(f"they cannot be read: {' '.join(str(error).split())}")
        return config, None, [*findings, unreadable.of("weights", "Save or download the draft again.")]
    fix = "Save the draft again after its training. Delete an embedding or LM head: the target's own is used."
    return config, draft.eval(), [*findings, _loading(info).of("weights", fix)]


def _read_settings(folder: Path) -> tuple[dict, DraftFamily]:
    """`config.json` as it is stored, and the family that it names."""
    path, families = folder / "config.json", {family.model_type: family for family in FAMILIES.values()}
    if not path.is_file():
        raise ValueError(f"`draft`: {folder} has no config.json, so it holds no draft.")
    try:
        stored = _read_object(path)
    except ValueError as error:
        raise ValueError(f"`draft`: {path} holds no settings: {error}. Save the draft again.") from error
    if (model_type := str(stored.get("model_type"))) not in families:
        known = f"`draft`: {path} has the `model_type` {model_type!r}; a draft has {', '.join(families)}."
        raise ValueError(draft_fault(stored, str(folder)) or known)
    objects = {"auto_map", "target", "objective", "training", families[model_type].config.engine_view_key}
    for name in objects & stored.keys():
        if not isinstance(stored[name], dict | None):
            raise ValueError(f"`draft`: {path}: `{name}` is {stored[name]!r}, not an object. Save the draft again.")
    return stored, families[model_type]


def _read_object(path: Path) -> dict:
    """A JSON file that holds an object; a `ValueError` if it does not."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stored, dict):
        raise ValueError("it is no JSON object")
    return stored


def _read_config(kind: type[PreTrainedConfig], stored: dict) -> tuple[PreTrainedConfig | None, Finding]:
    """The configuration; where it contradicts itself, what it says under the draft's own names, not the engines'."""
    try:
        config = kind.from_dict(dict(stored))
        return config, ok(f"{config.model_type}, complete; blocks of {config.block_size}")
    except CANNOT_BE as error:
        finding = fault(" ".join(str(error).split()))
    view = stored if kind.engine_view_key is None else stored.get(kind.engine_view_key) or {}
    own = {ours: view[theirs] for theirs, ours in kind.engine_view.items() if theirs in view}
    foreign = {"sample_from_anchor", kind.engine_view_key, *kind.engine_view} - {*kind.engine_view.values()}
    own |= {name: value for name, value in stored.items() if name not in foreign}
    try:
        return kind.from_dict(own | {"slot_layout": kind.family_slot_layout}), finding
    except CANNOT_BE:
        return None, finding


def _loading(info: dict) -> Finding:
    """From `output_loading_info`."""
    problems = []
    for what, names in (
        ("missing, so they are random", sorted(info["missing_keys"])),
        ("unknown, so they are not used", sorted(info["unexpected_keys"])),
        ("of another shape, so they are random", sorted(key[0] for key in info["mismatched_keys"])),
    ):
        if names:
            problems.append(f"{len(names)} tensors are {what}: {', '.join(names[:3])}{', ...' * (len(names) > 3)}")
    return fault("; ".join(problems)) if problems else ok("every tensor of the draft is there, and no other")


def logged_training(folder: Path) -> dict[str, float]:
    """The last logged `accuracy` and `estimated_tau` of the training whose folder or checkpoint this is; may be empty.
    Raises a `ValueError` if the file that should hold them is damaged."""
    checkpoint = Path(get_last_checkpoint(folder) or folder)
    for path in (checkpoint / TRAINER_STATE_NAME, folder / TRAINER_STATE_NAME, folder / f"{REPORT_NAME}.json"):
        if path.is_file():
            try:
                logs = [log for log in _read_object(path)["log_history"] if log.keys() >= set(LOGGED)]
                return {name: float(logs[-1][name]) for name in LOGGED} if logs else {}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} holds no readable `log_history`: {error!r}") from error
    return {}


def check_code(folder: Path) -> Finding:
    """Whether the draft loads where this package is absent."""
    auto_map = _read_object(folder / "config.json").get("auto_map") or {}
    if missing := {"AutoConfig", "AutoModel"} - auto_map.keys():
        return fault(f"config.json has no `auto_map` for {' and '.join(sorted(missing))}")
    try:
        code_files(folder / "config.json")
    except ValueError as error:
        # `snapshot_download` lists the files of a repository beside its snapshot, unless it does not reach the Hub.
        listing = folder.parent.parent / "trees" / f"{folder.name}.json"
        if folder.match("models--*/snapshots/*") and not listing.is_file():
            return skipped("it is not in the cache of the Hub", "Look again where the Hub can be reached.")
        return fault(str(error))
    return ok("its code is in the checkpoint")


def _chat_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Finding:
    config, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    if not config.is_file():
        return skipped("the draft was saved without a tokenizer to compare with")
    try:
        trained = _read_object(config).get("chat_template")
        trained = template.read_text(encoding="utf-8") if template.is_file() else trained
    except ValueError as error:
        found = f"the tokenizer saved with the draft ({config}, {template.name}) cannot be read: {error}"
        return fault(found, "Save the tokenizer of the training into the draft's folder again.")
    served = tokenizer.chat_template
    if isinstance(served, dict):  # several, of which one is used unless another is named
        served = served.get("default")
    if trained == served:
        return ok("the one that the draft was trained with" if trained else "none, as in training")
    if trained is None or served is None:
        return fault(f"the {'draft was trained' if trained is None else 'target is served'} without a chat template")
    return fault("the target's tokenizer has another chat template than the one saved with the draft")


FILES = (
    Check("code", check_code, "Save the draft with its own `save_pretrained`, or upload the .py files too."),
    Check("chat template", _chat_template, "Serve with the draft's, or train with this one."),
)
