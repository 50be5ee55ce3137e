"""Whether a target has the shapes that a draft was made for."""

from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig, PreTrainedModel


def draft_fault(settings: Mapping, name: str) -> str | None:
    """What a configuration is instead of a draft's, and what to do.

    Args:
        settings: of a `config.json`; name: the directory or repository that holds it.

    Returns:
        `None` for a draft's.
    """
    if {"slot_layout", "draft_schema_version"} & settings.keys():
        return None
    model_type, architectures = settings.get("model_type"), " ".join(settings.get("architectures") or [])
    what = f"`draft`: {name} is no draft of this library, but"
    layouts = {"speculators_model_type": "speculators'", "dflash_config": "z-lab's", "eagle_config": "an EAGLE head's"}
    if layout := next((layouts[key] for key in layouts if key in settings), None):
        return (
            f"{what} a draft in {layout} layout ({architectures or model_type}): serve it with the software that it "
            "is for, or train one for its target with `blockdraft train`."
        )
    return (
        f"{what} a model of the type {model_type!r} ({architectures or 'no architecture named'}). If it is the "
        "target, pass it as `target`, and as `draft` the output folder of `blockdraft train`; the draft inside of a "
        "DeepSeek V4.1 checkpoint is taken out with `blockdraft import`."
    )


def shape_faults(target: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    """Why a draft cannot work with a target, whatever its weights: it is none, an adapter puts virtual tokens in front
    of the prompt, no LM head, another hidden size, depth, vocabulary or number of embedding rows.

    Args:
        target: the loaded target, under PEFT's wrapper or not; block tokens go through its embedding and its head.
        config: the draft's.
    """
    if not hasattr(config, "slot_layout"):
        yield draft_fault(config.to_dict(), config.name_or_path or type(config).__name__)
        return
    record, model = config.target or {}, target.get_base_model() if hasattr(target, "get_base_model") else target
    text_config, architecture = model.config.get_text_config(decoder=True), type(model).__name__
    if any(adapter.is_prompt_learning for adapter in getattr(target, "peft_config", {}).values()):
        yield (
            "The target's adapter puts virtual tokens in front of every prompt, for which no draft has positions. Use "
            "an adapter that changes weights (LoRA and the like), or the target without it."
        )
    if model.get_output_embeddings() is None:
        yield (
            f"{architecture} has no LM head, which turns a draft's states into logits: load the target with "
            "`AutoModelForCausalLM`."
        )
    for setting, expected, actual in (
        ("hidden_size", config.target_hidden_size or config.hidden_size, text_config.hidden_size),
        ("num_target_layers", config.num_target_layers, text_config.num_hidden_layers),
        ("vocab_size", config.vocab_size, text_config.vocab_size),
        ("target.embedding_rows", record.get("embedding_rows"), len(model.get_input_embeddings().weight)),
    ):
        if expected is not None and expected != actual:
            yield (
                f"The draft was made for a target with `{setting}`={expected}, {architecture} has {actual}. "
                f"Load the target it names ({record.get('name_or_path') or 'none'}), or train a draft for this one."
            )
