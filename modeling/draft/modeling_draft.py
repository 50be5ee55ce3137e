"""What block-parallel drafts share: the target's embedding and head, initialisation, saving with their own code."""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from ...configuration.configuration_draft import DraftConfig
from ..decoding.block_decoding import block_decode
from ..decoding.generate import generate
from ..ops.shapes import check_shape
from ..saving.atomic_save import staged_directory
from ..saving.remote_code import write_remote_code
from .block_visibility import BlockPlan, block_visibility
from .visible_attention import VisibleKeys, plan_visible_keys

logger = logging.get_logger(__name__)

# Arguments of a draft's forward, by their names in the reference implementation (NeMo AutoModel).
REFERENCE_NAMES = {
    "noise_embedding": "noise_embeds",
    "noise_embeddings": "noise_embeds",
    "target_hidden": "context_hidden_states",
    "target_hidden_states": "context_hidden_states",
}
# PEFT's wrapper passes these, as `None`, to whatever it wraps.
PASSED_BY_PEFT = ("input_ids", "inputs_embeds", "output_attentions", "output_hidden_states", "return_dict")
PUSH_ARGUMENTS = ("commit_message", "commit_description", "private", "revision", "create_pr", "tags")


def draft_arguments(forward: Callable) -> Callable:
    """Decorates a draft's `forward`: inputs may have their reference names, and what PEFT's wrapper adds is left out.
    Any other argument that `forward` does not name is a `TypeError`, as in every function."""

    @functools.wraps(forward)
    def with_names(self, *args, **kwargs):
        for alias, name in REFERENCE_NAMES.items():
            if alias in kwargs:
                if name in kwargs:
                    raise ValueError(f"`{alias}` is another name of `{name}`: pass one of them.")
                kwargs[name] = kwargs.pop(alias)
        for name in PASSED_BY_PEFT:
            if kwargs.get(name, "given") is None:
                del kwargs[name]
        return forward(self, *args, **kwargs)

    return with_names


def head_dtype(lm_head: nn.Module | Callable) -> torch.dtype | None:
    """The dtype of the states that a head takes: its weights', or `None` where they are packed and it takes any."""
    if not isinstance(lm_head, nn.Module):
        return None
    dtypes = (parameter.dtype for parameter in lm_head.parameters() if parameter.is_floating_point())
    return next((dtype for dtype in dtypes if dtype.itemsize > 1), None)


class DraftPreTrainedModel(PreTrainedModel):
    """
    Base of the drafts. A draft owns neither an embedding table nor an LM head: it reads blocks that were embedded with
    the target's embedding ([`~DraftPreTrainedModel.embed_block`]), and the target's head turns its hidden states into
    logits ([`~DraftPreTrainedModel.compute_logits`]).

    Where a draft's slots are chosen one after another (`drafts_in_sequence`), [`~DraftPreTrainedModel.slot_logits`]
    adds what the token before a slot says. One with a `confidence_head` says how likely a slot's token is to be
    accepted ([`~DraftPreTrainedModel.confidence_logits`]).
    """

    config: DraftConfig
    markov_head: nn.Module | None = None
    confidence_head: nn.Module | None = None
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    # Whether the sliding window moves along the block, and how many heads have a key in common.
    window_per_query = True
    heads_per_key = 1
    # Whether a slot's logits depend on the token that was chosen for the slot before it.
    drafts_in_sequence = False
    # Set where this package is installed, absent from a draft that came with its own code: `compare_target(target)`
    # warns of a target with other weights than in training, `publisher(repo_id, ...)` uploads the draft with a card.
    compare_target: Callable[[PreTrainedModel], None] | None = None
    publisher: Callable | None = None

    @property
    def target_layer_ids(self) -> list[int]:
        """The layers of the target whose hidden states the draft reads; see [`DraftConfig`]."""
        return self.config.target_layer_ids

    def block_decode(self, target: PreTrainedModel, input_ids: torch.LongTensor | None = None, **kwargs):
        """[`block_decode`] with this draft: `target.generate(input_ids, **kwargs)`, the same tokens in less time."""
        return block_decode(target, input_ids, draft=self, **kwargs)

    def embed_block(self, input_ids: torch.LongTensor, embed_tokens: nn.Module) -> Tensor:
        """
        Embeds draft blocks, for `noise_embeds`.

        Args:
            input_ids (`[B, Q]` int64): Block tokens: known ones, then `config.mask_token_id`.
            embed_tokens (`nn.Module`): `target.get_input_embeddings()`.

        Returns:
            `[B, Q, H]`, multiplied by `config.input_embedding_scale`.
        """
        embeds = embed_tokens(input_ids)
        scale = self.config.input_embedding_scale
        return embeds if scale == 1 else embeds * scale

    def compute_logits(self, hidden_states: Tensor, lm_head: nn.Module) -> Tensor:
        """
        Logits of the draft's hidden states.

        Args:
            hidden_states (`[..., H]`): `last_hidden_state` of the forward, or a part of it.
            lm_head (`nn.Module`): `target.get_output_embeddings()`.

        Returns:
            `[..., V]` in the head's dtype: multiplied by `config.output_multiplier`, then with
            `config.final_logit_softcapping` c, if any, `c * tanh(logits / c)`.
        """
        logits = lm_head(hidden_states.to(head_dtype(lm_head)))
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def slot_logits(self, base_logits: Tensor, previous_token_ids: torch.LongTensor, hidden_states: Tensor) -> Tensor:
        """
        What the draft proposes in a slot, given the token before it.

        Args:
            base_logits (`[..., V]`): Of [`~DraftPreTrainedModel.compute_logits`].
            previous_token_ids (`[...]` int64): The anchor for the first slot, then the token of the slot before.
            hidden_states (`[..., H]`): The states that `base_logits` were made of.

        Returns:
            `[..., V]`: `base_logits` as they are, unless the draft has more to say.
        """
        return base_logits

    def confidence_logits(self, confidence_states: Tensor, previous_token_ids: torch.LongTensor) -> Tensor:
        """`[..., H]` `confidence_states` of the forward's output and `[...]` tokens before the slots -> `[...]` fp32
        logits of acceptance, not calibrated. Only for a draft with a `confidence_head`."""
        raise NotImplementedError(f"{type(self).__name__} has no confidence head.")

    def plan_blocks(
        self,
        anchor_positions: torch.LongTensor,
        block_keep_mask: Tensor | None,
        context_length: int,
        document_ids: torch.LongTensor | None = None,
        device: torch.device | None = None,
    ) -> BlockPlan:
        """
        Plans the attention of many blocks, for the forward's `block_plan`.

        Args:
            anchor_positions (`[B, N]` int64): Where the blocks stand, ascending in each row if they are to be fast; 0
                for padded blocks. On the CPU: other devices are waited for.
            block_keep_mask (`[B, N]` bool, *optional*): False for padded blocks. Default: none is.
            context_length (`int`): S, the context rows of the forward.
            document_ids (`[B, S]` int, *optional*): Packed rows, the tokens of each document together: blocks see
                their anchor's document only.
            device (`torch.device`, *optional*): Where the forward will run. Default: where the draft is.

        Returns:
            [`BlockPlan`], on the device of `anchor_positions`.

        Raises:
            ValueError: if shapes do not fit, or `document_ids` come back to a document.
        """
        config = self.config
        keep = torch.ones_like(anchor_positions) if block_keep_mask is None else block_keep_mask
        blocks = (anchor_positions, keep.bool(), context_length, config.block_size)
        rule = {"window_per_query": self.window_per_query, "causal": config.is_causal, "document_ids": document_ids}
        windows = dict.fromkeys(config.context_windows)
        visible = {window: block_visibility(*blocks, sliding_window=window, **rule) for window in windows}
        if document_ids is not None:
            runs, documents = ((ids[:, 1:] != ids[:, :-1]).sum() for ids in (document_ids, document_ids.sort(-1)[0]))
            if runs != documents:
                raise ValueError("`document_ids` come back to a document: the tokens of each have to stand together.")
        if config._attn_implementation == "sdpa":
            heads = (config.num_attention_heads, self.heads_per_key)
            device = self.device if device is None else device
            visible = {window: plan_visible_keys(seen, *heads, device) for window, seen in visible.items()}
        return BlockPlan(anchor_positions, context_length, config.block_size, visible)

    def read_blocks(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        attention_mask: object | None,
        cache: object | None,
        block_plan: BlockPlan | None,
        anchor_positions: Tensor | None,
        block_keep_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> BlockPlan | None:
        """
        The plan of many blocks, on the device of `noise_embeds`, made of their anchors if it is not given; `None`
        without both. The arguments are those of the forward.

        Raises:
            ValueError: if an input has a shape that does not fit the configuration or the others, if the blocks are
                given twice, or if several come without what says which block sees what.
        """
        config = self.config
        for name, rows in (("noise_embeds", noise_embeds), ("context_hidden_states", context_hidden_states)):
            if rows is None or not rows.is_floating_point():
                raise ValueError(
                    f"`{name}` is {'missing' if rows is None else rows.dtype}, not a float tensor. The reference has "
                    "its arguments in another order: pass each by keyword, `noise_embeds=`, `context_hidden_states=`, "
                    "`attention_mask=`, `position_ids=`, or a DSpark draft's `input_ids=` and `loss_mask=`."
                )
        reason = "`hidden_size` wide, by the embedding of the draft's target"
        batch, length, _ = check_shape("noise_embeds", noise_embeds, "B", "Q", config.hidden_size, reason=reason)
        sizes, reason = (batch, "A", config.features_width), f"`target_layer_ids` are {config.target_layer_ids}"
        context_length = check_shape("context_hidden_states", context_hidden_states, *sizes, reason=reason)[1]
        names = ("anchor_positions", "block_keep_mask", "document_ids")
        blocks = zip(names, (anchor_positions, block_keep_mask, document_ids), strict=True)
        given = [name for name, value in blocks if value is not None]
        if block_plan is not None and given:
            raise ValueError(f"`block_plan` and `{given[0]}` say the same twice: pass one of them.")
        if block_plan is None and anchor_positions is None:
            if given:
                raise ValueError(f"`{given[0]}` goes with `anchor_positions`, which are missing.")
            tells_blocks_apart = attention_mask is not None and len(attention_mask.shape) == 4
            if length > config.block_size and not tells_blocks_apart:
                raise ValueError(
                    f"`noise_embeds` holds {length} tokens, more than one block of {config.block_size}: pass "
                    "`anchor_positions` (or a 4D `attention_mask`; positions go to `position_ids=`, by keyword), or "
                    "each block would see the others and what follows its anchor."
                )
            return None
        if attention_mask is not None:
            raise ValueError("`attention_mask` and `anchor_positions` say the same twice: pass one of them.")
        if cache is not None:
            raise ValueError("`cache` is for one block after its context: leave out the anchors, or the cache.")
        anchors = anchor_positions if block_plan is None else block_plan.anchor_positions
        size, blocks = config.block_size, check_shape("anchor_positions", anchors, batch, "N")[1]
        reason = f"{blocks} `anchor_positions` with `block_size` {size} make {blocks * size} tokens"
        check_shape("noise_embeds", noise_embeds, batch, blocks * size, config.hidden_size, reason=reason)
        if block_plan is None:
            device = noise_embeds.device
            block_plan = self.plan_blocks(anchors, block_keep_mask, context_length, document_ids, device)
        if (block_plan.context_length, block_plan.block_size) != (context_length, size):
            raise ValueError(
                f"`block_plan` is for {block_plan.context_length} context rows and blocks of {block_plan.block_size}; "
                f"the context has {context_length} rows and `block_size` is {size}."
            )
        return block_plan.to(noise_embeds.device)

    def layer_masks(self, plan: BlockPlan) -> dict[int | None, Tensor | VisibleKeys]:
        """
        What the attention of the layers with each window gets for many blocks: with `attn_implementation="sdpa"`
        [`VisibleKeys`], which make it compute what is visible and nothing else, with any other a dense bool mask.

        Raises:
            ValueError: if the plan was made for another implementation.
        """
        is_sdpa, dropout = self.config._attn_implementation == "sdpa", self.config.attention_dropout
        if is_sdpa and self.training and dropout > 0:
            logger.warning_once(
                f"`attention_dropout` is {dropout}: blocks attend through a dense mask, which takes several times the "
                "time and memory. Set it to 0 to compute only what is visible."
            )
        elif is_sdpa:
            if not all(isinstance(visible, VisibleKeys) for visible in plan.visible.values()):
                raise ValueError('`block_plan` was not made for `attn_implementation="sdpa"`: make it anew.')
            return plan.visible
        return {window: visible.dense_mask() for window, visible in plan.visible.items()}

    def get_input_embeddings(self) -> None:
        """`None`: block tokens are embedded with `target.get_input_embeddings()`. PEFT then has no embedding to save;
        its Auto classes ask for the size of one where a tokenizer lies beside an adapter, so none is saved there."""
        return None

    def enable_input_require_grads(self):
        """Makes the first layer's input require gradients, which PEFT's frozen weights need under checkpointing."""
        first_layer = next(module for module in self.modules() if isinstance(module, GradientCheckpointingLayer))

        def require_grads(layer, args):
            args[0].requires_grad_(True)

        self._require_grads_hooks = [first_layer.register_forward_pre_hook(require_grads)]

    def _init_weights(self, module: nn.Module):
        if isinstance(module, nn.Linear):
            # U(-fan_in^-1/2, fan_in^-1/2), torch's default, as in the reference: not the target's normal of std 0.02.
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        else:
            super()._init_weights(module)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **kwargs,
    ):
        """Saves weights, config and the code that loads them where this package is absent (`trust_remote_code=True`).
        Each file is written beside, synced and renamed, `config.json` last. The arguments are those of
        [`~transformers.PreTrainedModel.save_pretrained`]."""
        push_arguments = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
        repo_id = kwargs.pop("repo_id", Path(save_directory).name)
        save = functools.partial(super().save_pretrained, state_dict=state_dict, **kwargs)
        if not self.should_save_on_this_rank(is_main_process) or kwargs.get("distributed_checkpoint", False):
            # Other ranks write nothing but take part in gathering; a distributed checkpoint is written by all ranks.
            save(save_directory, is_main_process=is_main_process)
        else:
            with staged_directory(save_directory) as staging:
                self.config.auto_map = write_remote_code(staging, self._saved_class(), generate)
                save(staging)
                written = {file.name for file in staging.iterdir()}
            _remove_stale_weights(Path(save_directory), written)
        if push_to_hub:
            self.push_to_hub(repo_id, token=kwargs.get("token"), **push_arguments)

    def push_to_hub(self, repo_id: str, **kwargs):
        """
        Uploads weights, config, code and a fresh card to the Hub, in one commit; without a card where this package is
        not installed.

        Args:
            repo_id (`str`): `name` or `owner/name`; the repository is made if there is none.
            kwargs: `private`, `revision`, `create_pr`, `commit_message`, `commit_description`, `token`, `tags` and
                `max_shard_size`, as in [`~transformers.PreTrainedModel.push_to_hub`].

        Returns:
            [`~huggingface_hub.CommitInfo`].

        Raises:
            OSError: if the Hub refuses or stays out of reach; one line with the cause and what to do.
        """
        if self.publisher is None:
            return super().push_to_hub(repo_id, **kwargs)
        return self.publisher(repo_id, **kwargs)

    def _saved_class(self) -> type:
        """The draft's class; FSDP2 gives every module a class of its own, derived from it."""
        name = type(self).__name__.removeprefix("FSDP")
        return next(cls for cls in type(self).__mro__ if cls.__name__ == name)


def _remove_stale_weights(directory: Path, written: set[str]) -> None:
    """An earlier save with another number of shards leaves files that loading would prefer to the new ones."""
    if written & {SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME}:
        shards = directory.glob("model-?????-of-?????.safetensors")
        for file in [*shards, directory / SAFE_WEIGHTS_NAME, directory / SAFE_WEIGHTS_INDEX_NAME]:
            if file.name not in written:
                file.unlink(missing_ok=True)
