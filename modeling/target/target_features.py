"""Hidden states of a frozen target, captured with forward hooks: what a block-parallel draft reads as context.

A draft names zero-based decoder layers and a point in them: mostly their *outputs* (`hidden_states[i + 1]` in
transformers' numbering). Hooks read them where they are made, whatever the architecture, and never confuse the last
layer's output with the final normed state.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import logging

from ...configuration.configuration_draft import ATTENTION_INPUT_MEAN, LAYER_OUTPUT

logger = logging.get_logger(__name__)


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of any transformers causal LM, also of a multimodal one: the outermost `nn.ModuleList` of its
    text decoder whose length is `num_hidden_layers`. Raises a `ValueError` if there is none, or more than one."""
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    # Some classes call their LM head `decoder`, which `get_decoder` then returns.
    for decoder in (target.get_decoder(), target.base_model):
        found = [
            (name.count("."), name, module)
            for name, module in decoder.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == num_layers
        ]
        if found:
            break
    outermost = [(name, module) for depth, name, module in found if depth == min(found)[0]]
    if len(outermost) != 1:
        raise ValueError(
            f"{type(target).__name__}: expected one ModuleList of `num_hidden_layers`={num_layers} decoder layers, "
            f"found {[name for name, _ in outermost] or 'none'}. The target must be a transformers causal LM."
        )
    return outermost[0][1]


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Runs what torch.compile made of a model, or of parts of it, as it was written: compiled code does not call hooks
    that were set after it, or is compiled anew for each."""
    is_compiled = any(
        module._compiled_call_impl is not None  # by `module.compile()`
        or "_orig_mod" in module._modules  # by `torch.compile(module)`
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )
    if is_compiled:
        logger.warning_once(
            "The target is compiled (`torch.compile`). Its hidden states are read with hooks, uncompiled."
        )
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        yield


class _LastLayerReached(BaseException):
    """Ends a target forward after the last captured layer; not an `Exception`, so no wrapper's handler swallows it."""


class FeatureCapture:
    """What the hooks of [`capture_features`] saw in the calling thread's last target forward."""

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int], stop_after_last: bool):
        self._target, self._layer_ids = target, list(layer_ids)
        self._stop_after = max(layer_ids) if stop_after_last else None
        self._thread = threading.get_ident()
        # All layers' states side by side, as they come: held once, not once more while they are concatenated.
        self._features: torch.Tensor | None = None
        self._missing: set[int] = set()

    def run(self, *args, **kwargs):
        """Calls the target. Returns its output, or `None` where `stop_after_last` ended the forward."""
        self._features = None
        try:
            return self._target(*args, **kwargs)
        except _LastLayerReached:
            return None

    def features(self, device: torch.device | None = None) -> torch.Tensor:
        """Hands over the captured hidden states; they are forgotten here, so each forward is read once.

        Args:
            device: where to put them; default: where the lowest of the layers runs (they may lie on several devices).

        Returns:
            `[batch, sequence, len(layer_ids) * hidden_size]` in the target's dtype, in the order of `layer_ids`.

        Raises:
            RuntimeError: if no target forward went through the layers since the last call.
        """
        if self._features is None or self._missing:
            raise RuntimeError(
                "No features: the target has not run in this thread since they were last read, or its forward ended "
                "early."
            )
        features, self._features = self._features, None
        return features if device is None else features.to(device)

    def register(self, layer: nn.Module, layer_id: int, capture_point: str) -> RemovableHandle:
        """Hooks one layer; the handle removes the hook."""
        places = [place for place, name in enumerate(self._layer_ids) if name == layer_id]

        def keep(hidden_states: torch.Tensor, versions: int) -> None:
            # Another thread may run the same target (a server, a second evaluation): its forward is not ours.
            if threading.get_ident() != self._thread:
                return
            if hidden_states.dim() == 4:
                hidden_states = hidden_states.mean(dim=versions)
            *shape, width = hidden_states.shape
            if self._features is None or layer_id == min(self._layer_ids):  # a forward begins
                self._features = hidden_states.new_empty(*shape, len(self._layer_ids) * width)
                self._missing = set(self._layer_ids)
            for place in places:
                self._features[..., place * width : (place + 1) * width] = hidden_states
            self._missing.discard(layer_id)
            if layer_id == self._stop_after:
                raise _LastLayerReached

        def keep_output(module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
            # Gemma 3n carries several versions of every state, in front of the batch.
            keep(output if isinstance(output, torch.Tensor) else output[0], versions=0)

        if capture_point == LAYER_OUTPUT:
            return layer.register_forward_hook(keep_output)
        return layer.attn_hc.register_forward_pre_hook(lambda module, args: keep(args[0], versions=2))


@contextmanager
def capture_features(
    target: PreTrainedModel,
    layer_ids: Sequence[int],
    capture_point: str = LAYER_OUTPUT,
    stop_after_last: bool = False,
) -> Iterator[FeatureCapture]:
    """Captures hidden states of a target's decoder layers while the context is open; the hooks go when it closes. A
    compiled target runs [`uncompiled`] meanwhile.

    ```python
    with capture_features(target, [1, 3, 5], stop_after_last=True) as capture:
        capture.run(input_ids=input_ids, use_cache=False)
        features = capture.features()  # [batch, sequence, 3 * hidden_size]
    ```

    Args:
        target: the frozen causal LM.
        layer_ids: zero-based decoder layers, in the order of concatenation (repetitions allowed).
        capture_point: `"layer_output"`: the first element of what the layer returns (of Gemma 3n's versions of a
            state, their mean); `"attention_input_mean"`: the mean over the hyper-connection streams of what enters the
            layer's `attn_hc`, after its Engram where there is one (DeepSeek V4.1's own features).
        stop_after_last: end the target's forward at the capture point of the highest of `layer_ids`: nothing after
            it, no LM head. For use with [`FeatureCapture.run`].

    Raises:
        ValueError: for an unknown `capture_point` or one that the target lacks, empty `layer_ids` or one outside the
            target.
    """
    if capture_point not in (LAYER_OUTPUT, ATTENTION_INPUT_MEAN):
        raise ValueError(
            f"`capture_point`={capture_point!r} is unknown: use {LAYER_OUTPUT!r} or {ATTENTION_INPUT_MEAN!r}."
        )
    layers = decoder_layers(target)
    has_streams = all(hasattr(layer, "attn_hc") for layer in layers)
    if has_streams != (capture_point == ATTENTION_INPUT_MEAN):
        raise ValueError(
            f"`capture_point`={capture_point!r} does not fit {type(target).__name__}: layers with hyper-connections "
            f"have no single output and take {ATTENTION_INPUT_MEAN!r}, all others {LAYER_OUTPUT!r}."
        )
    if not layer_ids or not all(0 <= layer_id < len(layers) for layer_id in layer_ids):
        raise ValueError(
            f"`target_layer_ids`={list(layer_ids)} must name at least one of the target's layers 0..{len(layers) - 1}."
        )
    capture = FeatureCapture(target, layer_ids, stop_after_last)
    handles = [capture.register(layers[layer_id], layer_id, capture_point) for layer_id in sorted(set(layer_ids))]
    try:
        with uncompiled(target):
            yield capture
    finally:
        for handle in handles:
            handle.remove()
