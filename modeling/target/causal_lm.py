"""The forward of a text model with its language modeling head, which the targets here share."""

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple


class CausalLMForward:
    """For a `PreTrainedModel` that holds a backbone `model` and a head `lm_head`."""

    # Those of `generate` that can hold the layers' own caches.
    cache_implementations: tuple[str | None, ...] = (None, "dynamic")

    def _prepare_cache_for_generation(self, generation_config, *args, **kwargs):
        if (kind := generation_config.cache_implementation) not in self.cache_implementations:
            raise ValueError(
                f"`cache_implementation={kind!r}`: {type(self).__name__} has cache layers of its own, which no such "
                "cache can hold. Leave it out."
            )
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """
        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, kwargs: those of the backbone.
            labels: `[B, S]` int64, -100 where ignored; they are shifted here.
            logits_to_keep: how many of the last positions get logits, or which; 0: all.

        Returns:
            [`~transformers.modeling_outputs.MoeCausalLMOutputWithPast`]: `logits` `[B, kept, V]`, with `labels` the
            `loss`, and what the backbone returns beside its last state.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )
