"""LoRA and DoRA adapters of drafts: their base, what of them is saved, and how they are loaded."""

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import cached_file, find_adapter_config_file

from ..hub_cards.repository_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ..hub_cards.rules import is_hub_id
from ..modeling.saving.atomic_save import staged_directory
from ..modeling.target.pairing import check_is_draft

TASK_TYPE = "FEATURE_EXTRACTION"
# What of the draft's configuration an adapter changes: kept in the header of its weights, for the merged draft.
RECORDED = ("target", "objective", "training", "confidence_temperatures")
# Settings that must not change when a run is resumed; the base is compared too.
SHAPE = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_dora",
    "use_rslora",
    "target_modules",
    "target_parameters",
    "modules_to_save",
)


def adapt(draft: PreTrainedModel, peft_config: LoraConfig) -> PeftModel:
    """
    A draft with a new adapter, whose weights alone get gradients; in half precision they are fp32.

    Args:
        draft ([`DraftPreTrainedModel`]): the base, as it was loaded from a directory or the Hub; changed in place.
        peft_config ([`~peft.LoraConfig`]): `use_dora=True` makes a DoRA. By default every linear layer is adapted.
            Routed experts are not linear layers: name them in `target_parameters` (`"experts.gate_up_proj"`,
            `"experts.down_proj"`), or they are not trained. Norms and heads are trained by `modules_to_save`.
            `revision` names what a base from the Hub was loaded at, unless that is the default branch.

    Raises:
        ValueError: if the settings are not LoRA's, name another task or a module that the draft does not have, or if
            the base was never saved, or has changed since it was.
    """
    if isinstance(draft, PeftModel):
        raise ValueError("`peft_config` is given for a model that already has an adapter: leave one of them out.")
    config = copy.deepcopy(peft_config)
    _check_config(config)
    base = locate_base(draft, config.revision)
    check_unchanged(draft, base)
    _check_names(config, draft)
    if config.target_modules is None and config.target_parameters is None:
        config.target_modules = "all-linear"
    config.base_model_name_or_path = draft.name_or_path  # PEFT's own entry: no warning about another one
    model = get_peft_model(draft, config)
    config.base_model_name_or_path, config.revision = base.name, base.revision
    return model


def check_adapter(model: PeftModel) -> None:
    """Checks a model that already has an adapter, and records its base and task as [`adapt`] does. Raises a
    `ValueError` as that does, and unless there is exactly one adapter and it is trainable."""
    if len(model.peft_config) != 1:
        raise ValueError(f"The draft has the adapters {', '.join(model.peft_config)}: one at a time can be trained.")
    [config] = model.peft_config.values()
    _check_config(config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("No weight of the adapter is trainable: load it with `is_trainable=True`.")
    base = locate_base(model.get_base_model(), config.revision)
    config.base_model_name_or_path, config.revision = base.name, base.revision


def _check_config(config: PeftConfig) -> None:
    """It has to be LoRA, for the task of AutoPeftModelForFeatureExtraction, which is set where there is none."""
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"`peft_config` is a {type(config).__name__}: drafts are adapted with LoraConfig, or with "
            "LoraConfig(use_dora=True)."
        )
    config.task_type = config.task_type or TASK_TYPE
    if config.task_type != TASK_TYPE:
        raise ValueError(f'`task_type` is "{config.task_type}": a draft returns hidden states, use "{TASK_TYPE}".')


def _check_names(config: LoraConfig, draft: nn.Module) -> None:
    """PEFT ignores a name that nothing has, as long as it finds another one."""
    modules, parameters = ([name for name, _ in named] for named in (draft.named_modules(), draft.named_parameters()))
    known = {"target_modules": modules, "modules_to_save": modules, "target_parameters": parameters}
    for setting, there in known.items():
        names = getattr(config, setting) or ()
        if isinstance(names, str):  # a pattern, or "all-linear"
            continue
        if missing := sorted(name for name in names if not any(f".{key}".endswith(f".{name}") for key in there)):
            raise ValueError(f"`{setting}` names {', '.join(missing)}, which the draft does not have.")


def check_publishable(model: PeftModel, repo_id: str) -> None:
    """Raises a `ValueError` if the adapter's base is a directory, which others do not have, or is in the repository
    itself, from where it could then no longer be loaded alone."""
    [config] = model.peft_config.values()
    if os.path.isabs(base := config.base_model_name_or_path):
        raise ValueError(
            f"The adapter cannot be pushed to the Hub: its base draft is the directory {base}, which others do not "
            'have. Push the base first (`draft.push_to_hub("user/draft")`), load it by its repository name and train '
            "the adapter on that."
        )
    if base == repo_id:
        raise ValueError(f"`hub_model_id`: {repo_id} holds the adapter's base draft. Choose another repository.")


def base_draft(model: nn.Module) -> PreTrainedModel:
    """The draft itself, of a draft with an adapter or without."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


# ---- the base -----------------------------------------------------------------------------------------------------


class Base(NamedTuple):
    """Where a base draft can be loaded from again."""

    name: str  # Hub id, or absolute path of a directory, whose name could otherwise be taken for a Hub id
    revision: str | None  # commit; `None` for a directory
    folder: Path | None  # its files on this machine; `None` if they are in a cache that is not the standard one


def locate_base(draft: PreTrainedModel, revision: str | None = None) -> Base:
    """Where a draft was loaded from: an adapter is useless without its base. `revision` is the commit, branch or tag
    of the Hub, which a loaded model does not know. Raises a `ValueError` if the place or its commit is unknown."""
    name = draft.name_or_path
    if not name:
        raise ValueError(
            "The base draft was never saved, and an adapter holds changes to a saved one: call "
            "`draft.save_pretrained(directory)` or `draft.push_to_hub(repo)`, then load the draft from there."
        )
    if os.path.isdir(name):
        return Base(os.path.abspath(name), None, Path(name))
    file = try_to_load_from_cache(name, "config.json", revision=revision) if is_hub_id(name) else None
    if isinstance(file, str):
        return Base(name, Path(file).parent.name, Path(file).parent)
    if is_hub_id(name) and revision and len(revision) == 40:
        return Base(name, revision, None)
    raise ValueError(
        f"The base draft was loaded from {name}, which is not a directory here, and the Hub's cache does not hold "
        f"{revision or 'main'} of it: give the commit that it was loaded at as `LoraConfig(revision=...)`."
    )


def check_unchanged(draft: PreTrainedModel, base: Base) -> None:
    """Raises a `ValueError` if the draft's weights are not those of its base; the first row of each is compared."""
    tensors = draft.state_dict()
    for file in sorted(base.folder.glob("model*.safetensors")) if base.folder else ():
        with safe_open(file, "pt") as saved:
            for name in saved.keys() & tensors.keys():
                rows = saved.get_slice(name)[:1] if tensors[name].dim() else saved.get_tensor(name)
                here = tensors[name][:1] if tensors[name].dim() else tensors[name]
                if torch.equal(rows.to(here.dtype), here.cpu()):
                    continue
                place = f"{base.name} at {base.revision}" if base.revision else file
                other = ", or was loaded at another commit, which `LoraConfig(revision=...)` has to name"
                raise ValueError(
                    f"The draft's `{name}` is not that of {place}: it has been trained or merged since"
                    f"{other if base.revision else ''}. Save the draft elsewhere, load it from there and adapt that."
                )


# ---- saving -------------------------------------------------------------------------------------------------------


def save_adapter(
    directory: str | os.PathLike, model: PeftModel, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """
    Writes `adapter_model.safetensors` and `adapter_config.json` of a model with one adapter, each atomically, the
    latter last. No tokenizer: `AutoPeftModelForFeatureExtraction` would compare it with an embedding, and a draft has
    none. `state_dict` holds the model's gathered weights, where they are spread over devices.
    """
    [(name, config)] = model.peft_config.items()
    draft = model.get_base_model()
    # Otherwise PEFT asks the Hub whether the vocabulary was resized.
    tensors = get_peft_model_state_dict(model, state_dict, name, save_embedding_layers=False)
    record = {key: getattr(draft.config, key) for key in RECORDED if hasattr(draft.config, key)}
    name_or_path = (record["target"] or {}).get("name_or_path")
    if name_or_path and (os.path.exists(name_or_path) or not is_hub_id(name_or_path)):  # a place on this machine
        record["target"] = record["target"] | {"name_or_path": os.path.basename(os.path.abspath(name_or_path))}
    with staged_directory(directory) as staging:
        _write_weights(staging / ADAPTER_WEIGHTS, tensors, record)
    config = copy.deepcopy(config)
    config.inference_mode = True
    if isinstance(config.target_modules, set):  # whose order differs from process to process
        config.target_modules = sorted(config.target_modules)
    with staged_directory(directory) as staging:
        config.save_pretrained(staging)


def update_record(directory: str | os.PathLike, **values) -> Path:
    """Changes what a saved adapter records of the draft's configuration, atomically. Returns the file."""
    file = Path(directory) / ADAPTER_WEIGHTS
    record = read_record(file) | values
    with staged_directory(directory) as staging:
        _write_weights(staging / ADAPTER_WEIGHTS, load_file(file), record)
    return file


def read_record(file: str | os.PathLike) -> dict:
    """What the header of an adapter's weights says of the draft's configuration; empty if another tool wrote it."""
    with safe_open(file, "pt") as saved:
        metadata = saved.metadata() or {}
    return {name: json.loads(metadata[name]) for name in RECORDED if name in metadata}


def _write_weights(file: Path, tensors: Mapping[str, torch.Tensor], record: dict) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {name: json.dumps(value, sort_keys=True) for name, value in record.items()}
    save_file(tensors, file, metadata={"format": "pt"} | metadata)


def describe(model: PeftModel) -> dict:
    """What a card says of an adapter: its base and revision, kind, rank, and numbers of parameters."""
    [config] = model.peft_config.values()
    trainable, total = model.get_nb_trainable_parameters()
    base = {"base": config.base_model_name_or_path, "base_revision": config.revision}
    return base | recipe(model) | {"trainable_parameters": trainable, "total_parameters": total}


def recipe(model: PeftModel) -> dict:
    """What the configuration of the merged draft keeps of an adapter; a local base means nothing to others."""
    [config] = model.peft_config.values()
    published = {} if os.path.isabs(config.base_model_name_or_path) else {"base": config.base_model_name_or_path}
    if published and config.revision:
        published["base_revision"] = config.revision
    kind = "DoRA" if config.use_dora else "LoRA"
    return published | {"peft_type": kind, "r": config.r, "lora_alpha": config.lora_alpha}


# ---- loading ------------------------------------------------------------------------------------------------------


def is_adapter(name: str, revision: str | None = None) -> bool:
    """Whether a directory or a Hub repository holds an adapter."""
    return find_adapter_config_file(name, revision=revision) is not None


def load_merged(
    name: str, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedModel:
    """
    A base draft with an adapter merged into it, with the configuration that the adapter recorded; `save_pretrained`
    writes it as a draft of its own.

    Args:
        name, revision: directory or Hub repository of the adapter, which knows those of its base.
        dtype, trust_remote_code: of the base, see `from_pretrained`.

    Raises:
        ValueError: if the base is a directory that is not there, or no draft; `OSError` for what the Hub does not
            have.
    """
    # From a local folder: PEFT asks the Hub about a repository even if everything is in the cache.
    _, weights = (cached_file(name, file, revision=revision) for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    folder = os.path.dirname(weights)
    config = PeftConfig.from_pretrained(folder)
    base = config.base_model_name_or_path
    if not base or (os.path.isabs(base) and not os.path.isdir(base)):
        raise ValueError(
            f"`draft`: the adapter {name} belongs to the draft {base}, which is not there; put its directory or Hub "
            f"id into `base_model_name_or_path` of {ADAPTER_CONFIG}."
        )
    check_is_draft(base, config.revision)
    draft = AutoModel.from_pretrained(base, dtype=dtype, revision=config.revision, trust_remote_code=trust_remote_code)
    draft = PeftModel.from_pretrained(draft, folder, torch_device="cpu").merge_and_unload()
    for key, value in read_record(weights).items():
        setattr(draft.config, key, value)
    # It is no longer what is saved there.
    draft.name_or_path = draft.config.name_or_path = ""
    return draft


def check_resumable(model: nn.Module, checkpoint: str | os.PathLike) -> None:
    """Raises a `ValueError` for the checkpoint of an adapter where a whole draft is trained, or the other way round,
    and for one of another shape; it says what differs."""
    file = Path(checkpoint) / ADAPTER_CONFIG
    if file.exists() != isinstance(model, PeftModel):
        there, here = ("an adapter", "a whole draft") if file.exists() else ("a whole draft", "an adapter")
        raise ValueError(f"{checkpoint} holds {there}, this run trains {here}. Choose another `output_dir`.")
    if file.exists():
        [config] = model.peft_config.values()
        saved, names = PeftConfig.from_pretrained(checkpoint), ("base_model_name_or_path", "revision", *SHAPE)
    else:
        config, saved = model.config, AutoConfig.from_pretrained(checkpoint)
        names = config.fixed_in_training
    for name in names:
        here, there = (_comparable(getattr(c, name)) for c in (config, saved))
        if here != there:
            raise ValueError(
                f"`{name}` is {here}, but {checkpoint} was trained with {there}. Choose another `output_dir`, or "
                "start anew with `overwrite_output_dir`."
            )


def _comparable(value):
    return sorted(value) if isinstance(value, set | list | tuple) else value
