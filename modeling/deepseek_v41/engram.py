"""Engram of DeepSeek V4.1: n-gram embeddings, looked up by a hash of the last tokens and gated into the streams."""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Regex, normalizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from ...configuration.configuration_deepseek_v41 import DeepseekV41TextConfig

# Compressed id of a token that no n-gram may reach across (padding, images); what fills a token map that is not set.
MASKED = -1
UNSET = -2

# What makes two vocabulary entries one: case, accents, compatibility forms and the amount of white space are dropped.
# A private-use character keeps a lone space from being stripped.
_LONE_SPACE = "\ue000"
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def compressed_token_map(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """
    Numbers the tokens by what they say once case, accents and white space are normalised (Engram, section 2.2 of
    arXiv:2601.07372, "tokenizer compression"). Entries that are no whole characters keep their vocabulary string.

    Args:
        tokenizer: the one the target was trained with; it needs a `tokenizers` backend.

    Returns:
        `[len(tokenizer)]` int64 on the CPU: compressed ids, numbered by first appearance.

    Raises:
        ValueError: if the tokenizer has no `tokenizers` backend.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"`tokenizer` is a {type(tokenizer).__name__} without a tokenizers backend, which Engram's token map is "
            "defined by: load it with AutoTokenizer from a folder that has a tokenizer.json."
        )
    backend = tokenizer.backend_tokenizer
    texts = backend.decode_batch([[token] for token in range(len(tokenizer))], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    compressed = []
    for token, text in enumerate(texts):
        if "\ufffd" in text:
            key = backend.id_to_token(token)
        else:
            key = _NORMALIZER.normalize_str(text) or text
        compressed.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(compressed, dtype=torch.int64)


def _sieve(start: int, stop: int) -> np.ndarray:
    """The primes in `[start, stop)`, ascending; `start` is at least 2."""
    is_prime = np.ones(stop - start, dtype=bool)
    root = math.isqrt(stop - 1)
    for divisor in _sieve(2, root + 1) if root >= 2 else ():
        first = max(divisor * divisor, -(-start // divisor) * divisor)
        is_prime[first - start :: divisor] = False
    return np.flatnonzero(is_prime) + start


@functools.lru_cache(maxsize=16)
def primes_from(minimum: int, count: int) -> np.ndarray:
    """The first `count` primes that are at least `minimum`, int64."""
    start = max(minimum, 2)
    primes = np.empty(0, dtype=np.int64)
    while len(primes) < count:
        # Primes are about ln(x) apart; twice as much room, so that one round is the rule.
        stop = start + 2 * (count + 8) * math.ceil(math.log(start + 8))
        primes = np.concatenate([primes, _sieve(start, stop)])
        start = stop
    return primes[:count]


class EngramConstants(NamedTuple):
    """What the hash is made of, int64 on the CPU, L being the number of Engram layers, N the longest n-gram: `primes`
    `[L, N - 1, heads]` are the sizes of the tables, `offsets` (same shape) their first rows in the layer's embedding,
    `multipliers` `[L, N]` the odd factor of each position of an n-gram, the newest token's first."""

    primes: Tensor
    offsets: Tensor
    multipliers: Tensor


def engram_constants(config: DeepseekV41TextConfig) -> EngramConstants:
    """
    The constants of all layers in `engram_layer_ids`, whether the model is deep enough to have them or not.

    Raises:
        ValueError: if `engram_num_embeddings` leaves a layer fewer rows than its tables have.
    """
    layers, sizes = len(config.engram_layer_ids), config.engram_max_ngram_size - 1
    primes = primes_from(config.engram_vocab_size, layers * sizes * config.engram_n_heads).reshape(layers, -1)
    needed = primes.sum(1).tolist()
    if any(rows < sum_ for rows, sum_ in zip(config.engram_num_embeddings, needed, strict=True)):
        raise ValueError(
            f"`engram_num_embeddings` is {config.engram_num_embeddings}: the hash tables of the layers in "
            f"engram_layer_ids need {needed} rows (or lower engram_vocab_size, the smallest size of a table)."
        )
    offsets = primes.cumsum(1) - primes
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    draws = [
        np.random.default_rng(10007 * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
        for layer in config.engram_layer_ids
    ]
    shape = (layers, sizes, config.engram_n_heads)
    return EngramConstants(
        torch.from_numpy(primes.reshape(shape)),
        torch.from_numpy(offsets.reshape(shape)),
        torch.from_numpy(2 * np.stack(draws) + 1),
    )


class EngramHash(nn.Module):
    """Table rows of every position's n-grams, for all Engram layers at once (Engram, arXiv:2601.07372, section 2.2).
    Nothing here is stored in a checkpoint: the constants follow from the config, the token map from the tokenizer;
    `is_ready` says whether it has been set."""

    def __init__(self, config: DeepseekV41TextConfig):
        super().__init__()
        self.config = config
        layers, ngram_size = len(config.engram_layer_ids), config.engram_max_ngram_size
        tables = (layers, ngram_size - 1, config.engram_n_heads)
        shapes = {"primes": tables, "offsets": tables, "multipliers": (layers, ngram_size)}
        for name, shape in (shapes | {"token_map": (config.vocab_size,)}).items():
            self.register_buffer(name, torch.empty(shape, dtype=torch.int64), persistent=False)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Computes the constants and forgets the token map; for `_init_weights`, after a start on the meta device."""
        for name, constant in engram_constants(self.config)._asdict().items():
            init.copy_(getattr(self, name), constant)
        init.constant_(self.token_map, UNSET)
        self.is_ready = False

    @torch.no_grad()
    def set_token_map(self, token_map: Tensor) -> None:
        """Takes the map of `compressed_token_map`, `[len(tokenizer)]`. Ids beyond it (embedding rows that the
        tokenizer does not use) count as masked. Raises a `ValueError` if the map does not belong to the config: its
        size, its number of compressed ids, its pad id."""
        size, count = len(token_map), int(token_map.max()) + 1
        vocab_size, pad = self.config.vocab_size, self.config.engram_pad_token_id
        if size > vocab_size:
            raise ValueError(
                f"`vocab_size` is {vocab_size}, the tokenizer has {size} tokens: it is not this model's tokenizer."
            )
        if count != self.config.engram_compressed_vocab_size:
            raise ValueError(
                f"`engram_compressed_vocab_size` is {self.config.engram_compressed_vocab_size}, the tokenizer's "
                f"tokens compress to {count} ids: pass the tokenizer that the model was trained with."
            )
        if pad >= size:
            raise ValueError(f"`engram_pad_token_id` is {pad}, the tokenizer's last token is {size - 1}.")
        self.token_map.fill_(MASKED)
        self.token_map[:size] = token_map.to(self.token_map.device)
        self.is_ready = True

    def compress(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Token ids `[B, S]` to compressed ids `[B, S]` int64, -1 where `mask` `[B, S]` is 0 (padding, images). Raises
        a `ValueError` if no token map has been set."""
        if not self.is_ready:
            raise ValueError(
                "`engram_layer_ids` is not empty, and Engram hashes what the tokens say: call "
                "`model.set_tokenizer(tokenizer)` with the model's own tokenizer before the first forward."
            )
        compressed = self.token_map[input_ids.to(self.token_map.device)]
        return compressed if mask is None else compressed.masked_fill(~mask.to(compressed.device).bool(), MASKED)

    def forward(self, compressed_ids: Tensor, num_new: int) -> Tensor:
        """
        Hashes the last S = `num_new` positions.

        Args:
            compressed_ids: `[B, past + S]`. What lies before is taken as the start of the text, so that a continuation
                needs (at least) the `engram_max_ngram_size - 1` ids before its first new one.

        Returns:
            `[B, S, layers, (N - 1) * heads]` int64 rows of the layers' tables, shorter n-grams first, heads inside.
        """
        assert num_new <= compressed_ids.shape[1], (num_new, compressed_ids.shape)
        lookback = self.config.engram_max_ngram_size - 1
        missing = lookback + num_new - compressed_ids.shape[1]
        recent = nn.functional.pad(compressed_ids, (missing, 0), value=MASKED)  # a negative `missing` crops
        tokens = recent.unfold(1, lookback + 1, 1).flip(-1)  # [B, S, N], newest first
        # A masked token hides all that lies behind it: the running minimum stays negative.
        pad = self.token_map[self.config.engram_pad_token_id]
        tokens = torch.where(tokens.cummin(-1).values < 0, pad, tokens)
        products = (tokens.unsqueeze(-2) * self.multipliers).unbind(-1)  # N times [B, S, layers]
        hashed, hashes = products[0], []
        for product in products[1:]:
            hashed = hashed ^ product
            hashes.append(hashed)
        return (torch.stack(hashes, dim=-1).unsqueeze(-1) % self.primes + self.offsets).flatten(-2)


class EngramLayer(nn.Module):
    """
    Adds the n-gram embeddings of a layer to each hyper-connection stream, gated by how well stream and embedding agree
    (Engram, arXiv:2601.07372, section 2.3, without the short convolution).

    Args:
        index: position of the layer in `engram_layer_ids`.
    """

    def __init__(self, config: DeepseekV41TextConfig, index: int):
        super().__init__()
        streams, hidden_size = config.hc_mult, config.hidden_size
        width = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
        self.embed = nn.Embedding(config.engram_num_embeddings[index], config.engram_head_dim)
        self.wkv = nn.Linear(width, (streams + 1) * hidden_size, bias=False)
        self.q_weight = nn.Parameter(torch.ones(streams, hidden_size))
        self.k_weight = nn.Parameter(torch.ones(streams, hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, streams: Tensor, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        """Streams `[B, S, s, H]`, `rows` `[B, S, (N - 1) * heads]`, this layer's part of what `EngramHash` returns,
        and `mask` `[B, S]`, true for text -> streams, as they were where it is false. Gate and sum are fp32."""
        num_streams, hidden_size = self.q_weight.shape
        key, value = self.wkv(self.embed(rows).flatten(-2)).split([num_streams * hidden_size, hidden_size], dim=-1)
        with maybe_autocast(streams.device.type, enabled=False):
            query, key = streams.float(), key.unflatten(-1, (num_streams, hidden_size)).float()
            # Sum first, the factors of the two norms after: fp32 gradients of the scales depend on the order.
            agreement = (query * (self.q_weight.float() * self.k_weight.float()) * key).sum(-1)
            agreement = agreement * self._inverse_rms(query) * self._inverse_rms(key) * hidden_size**-0.5
            gate = agreement.abs().clamp(min=1e-6).sqrt().copysign(agreement).sigmoid()
            if mask is not None:
                gate = gate.masked_fill(~mask.bool().unsqueeze(-1), 0.0)
            return (query + gate.unsqueeze(-1) * value.float().unsqueeze(-2)).to(streams.dtype)

    def _inverse_rms(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1) + self.eps)
