"""The drafts' objectives the plain way: a dense mask over `[context | blocks]`, logits over the whole vocabulary for
every slot, losses by their definition, gradients by autograd.

What the trainers do has to give the same loss and gradients; `python -m benchmarks.step` compares both at full size.
Which attention reads the mask is up to the draft: with `attn_implementation="eager"` it is the definition.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from blockdraft.modeling.draft.block_targets import build_block_inputs, build_block_targets, build_dspark_targets
from blockdraft.modeling.draft.block_visibility import block_visibility
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.trainer.objectives.dspark import DSparkAlphas
from blockdraft.trainer.objectives.slot_targets import slot_weights


def dense_dflash_loss(
    draft: KimiK3DFlashDraftModel,
    embedding: nn.Module,
    head: nn.Module,
    features: Tensor,
    rows: dict[str, Tensor],
    gamma: float | None = None,
) -> Tensor:
    """
    Args:
        embedding, head: the target's.
        features (`[B, S, F * H]`): the target's.
        rows: `input_ids`, `loss_mask` `[B, S]`, `anchor_positions`, `block_keep_mask` `[B, N]`, and `prefix_lengths`
            `[B, N]` for that objective.
        gamma: decay of the weights, in slots.

    Returns:
        `[]`, the weighted mean.
    """
    config, input_ids = draft.config, rows["input_ids"]
    anchors = (rows["anchor_positions"], rows["block_keep_mask"])
    prefix_lengths = rows.get("prefix_lengths", 1)
    block_ids = build_block_inputs(input_ids, *anchors, config.block_size, config.mask_token_id, prefix_lengths)
    rule = {"sliding_window": config.sliding_window, "causal": config.is_causal}
    hidden_states = draft(
        noise_embeds=draft.embed_block(block_ids, embedding).detach(),
        context_hidden_states=features,
        attention_mask=block_visibility(*anchors, input_ids.shape[1], config.block_size, **rule).dense_mask(),
    ).last_hidden_state
    labels = build_block_targets(input_ids, rows["loss_mask"], *anchors, config.block_size)
    weights = slot_weights(labels.mask, prefix_lengths, gamma)
    logits = draft.compute_logits(hidden_states, head).float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.token_ids.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / (weights.sum() + 1e-6)


def dense_dspark_loss(
    draft: DeepseekV41DSparkModel,
    embedding: nn.Module,
    head: nn.Module,
    features: Tensor,
    last_states: Tensor,
    rows: dict[str, Tensor],
    alphas: DSparkAlphas,
    gamma: float | None = None,
) -> Tensor:
    """
    Args:
        last_states (`[B, S, H]`): what the target's head reads.
        alphas: weights of the three terms.
        embedding, head, features, rows, gamma: as in [`dense_dflash_loss`].

    Returns:
        `[]`, the weighted mean.
    """
    config, input_ids, length = draft.config, rows["input_ids"], rows["input_ids"].shape[1]
    anchors, size = (rows["anchor_positions"], rows["block_keep_mask"]), config.block_size
    block_ids = build_block_inputs(input_ids, *anchors, size, config.mask_token_id)
    rule = {"sliding_window": config.sliding_window, "window_per_query": False}
    output = draft(
        noise_embeds=draft.embed_block(block_ids, embedding).detach(),
        context_hidden_states=features,
        attention_mask=block_visibility(*anchors, length, size, **rule).dense_mask(),
        position_ids=draft.build_position_ids(anchors[0], length),
    )
    labels = build_dspark_targets(input_ids, rows["loss_mask"], *anchors, size)
    weights = slot_weights(labels.mask, 0, gamma).flatten(1)
    transitions, markov_embeddings = draft.markov_head(labels.previous_token_ids.flatten(1))
    logits = draft.compute_logits(output.last_hidden_state, head) + transitions.float()
    with torch.no_grad():
        # Slot k's token follows position a + k.
        places = (anchors[0][..., None] + torch.arange(size, device=features.device)).flatten(1).clamp(max=length - 1)
        read = last_states.gather(1, places[..., None].expand(-1, -1, last_states.shape[-1]))
        teacher = draft.compute_logits(read, head).softmax(-1)
    distances = (logits.softmax(-1) - teacher).abs().sum(-1)
    confidence = draft.confidence_head(output.confidence_states, markov_embeddings)
    terms = DSparkAlphas(
        F.cross_entropy(logits.transpose(1, 2), labels.token_ids.flatten(1), reduction="none"),
        distances,
        F.binary_cross_entropy_with_logits(confidence, (1 - distances.detach() / 2).clamp(0, 1), reduction="none"),
    )
    loss = sum(alpha * (weights * term).sum() for alpha, term in zip(alphas, terms, strict=True))
    return loss / (weights.sum() + 1e-6)
