import json
import unicodedata

import pytest
import torch
from goldens import GOLDENS, load_golden
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.modeling.deepseek_v41.engram import (
    MASKED,
    EngramHash,
    EngramLayer,
    compressed_token_map,
    engram_constants,
    primes_from,
)

TOLERANCE = 1e-5
CASE = "v41_target_engram"


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def golden_config(**settings) -> DeepseekV41TextConfig:
    return DeepseekV41TextConfig(**(load_golden(CASE).meta["config"] | settings))


def golden_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(GOLDENS / f"{CASE}.tokenizer.json"))


def golden_token_map() -> torch.Tensor:
    return torch.tensor(json.loads((GOLDENS / f"{CASE}.token_map.json").read_text(encoding="utf-8"))["token_map"])


def ready_hash(**settings) -> EngramHash:
    engram_hash = EngramHash(golden_config(**settings))
    engram_hash.set_token_map(golden_token_map())
    return engram_hash


# The token map


def test_token_map_is_the_reference_one():
    assert torch.equal(compressed_token_map(golden_tokenizer()), golden_token_map())


def tokenizer_of(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: token for token, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])))


@pytest.mark.parametrize(
    "words, expected",
    [
        (["<unk>", "Cafe", "café", "CAFE\u0301", " cafe ", "cafe!"], [0, 1, 1, 1, 1, 2]),
        (["<unk>", "ﬁ", "fi", "２", "2", "Å", "a"], [0, 1, 1, 2, 2, 3, 3]),
        # White space is one space, kept where it is all there is; an empty rest keeps the text (a lone accent here).
        (["<unk>", " ", "\t", "\r\n ", "a \n b", "a b", "\u0301", "\u0300"], [0, 1, 1, 1, 2, 2, 3, 4]),
        # Other white space is stripped, but what is nothing else stays itself.
        (["<unk>", "\u2028", "\u2028x", "x", "\x0b"], [0, 1, 2, 2, 3]),
    ],
)
def test_what_the_token_map_takes_for_one(words, expected):
    assert compressed_token_map(tokenizer_of(*words)).tolist() == expected


def test_pieces_of_characters_keep_their_vocabulary_strings(chat_tokenizer):
    token_map = compressed_token_map(chat_tokenizer)
    assert token_map.shape == (len(chat_tokenizer),) and token_map.dtype == torch.int64
    texts = [chat_tokenizer.backend_tokenizer.decode([i], skip_special_tokens=False) for i in range(len(token_map))]
    pieces = [i for i, text in enumerate(texts) if "\ufffd" in text]
    assert len(pieces) > 100 and len({int(token_map[i]) for i in pieces}) == len(pieces)
    # Numbered by first appearance, and equal only where the texts are, up to case, accents and space.
    first = [token_map[:i].max() if i else -1 for i in range(len(token_map))]
    assert all(number <= highest + 1 for number, highest in zip(token_map, first, strict=True))
    plain = [unicodedata.normalize("NFKD", text).lower().split() for text in texts]
    for a in range(len(texts)):
        for b in (token_map[:a] == token_map[a]).nonzero().flatten().tolist():
            assert plain[a] == plain[b], (texts[a], texts[b])


def test_a_tokenizer_without_backend_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="`tokenizer` is a Slow without a tokenizers backend"):
        compressed_token_map(Slow())


# The constants


def test_released_constants():
    config = DeepseekV41TextConfig()
    primes, offsets, multipliers = engram_constants(config)
    assert primes.shape == offsets.shape == (2, 3, 8) and multipliers.shape == (2, 4)
    assert primes.flatten()[:3].tolist() == [16000057, 16000079, 16000081]
    assert primes.flatten(1).sum(1).tolist() == config.engram_num_embeddings == [384006168, 384016682]
    assert multipliers[0].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert (primes.flatten().diff() > 0).all() and offsets[:, 0, 0].tolist() == [0, 0]
    assert torch.equal(offsets.flatten(1).diff(dim=1), primes.flatten(1)[:, :-1])
    # The largest id never overflows.
    assert all(int(m) * (config.engram_compressed_vocab_size - 1) < 2**63 for m in multipliers.flatten())


@pytest.mark.parametrize("minimum", [1, 2, 3, 24, 29, 113, 7919, 999_983])
def test_primes(minimum):
    def is_prime(number):
        return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))

    expected = [number for number in range(minimum, minimum + 2000) if is_prime(number)][:60]
    assert primes_from(minimum, 60).tolist() == expected
    assert primes_from(minimum, 1).tolist() == expected[:1]


def test_constants_do_not_depend_on_the_depth():
    shallow = engram_constants(golden_config(num_hidden_layers=2))
    for one, other in zip(shallow, engram_constants(golden_config()), strict=True):
        assert torch.equal(one, other)


def test_too_few_rows_are_refused():
    needed = engram_constants(golden_config()).primes.flatten(1).sum(1).tolist()
    assert needed == [138, 202]  # 29 + 31 + 37 + 41 and 43 + 47 + 53 + 59
    engram_constants(golden_config(engram_num_embeddings=needed))
    with pytest.raises(ValueError, match=r"`engram_num_embeddings` is .*need \[138, 202\] rows"):
        EngramHash(golden_config(engram_num_embeddings=[138, 201]))


# The hash


def test_hashes_are_the_reference_ones(golden):
    golden, engram_hash = golden(CASE), ready_hash()
    compressed = engram_hash.compress(golden["in.input_ids"], golden["in.attention_mask"])
    assert torch.equal(engram_hash(compressed, compressed.shape[1]), golden["out.engram_hashes"])


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("kept", [2, 3, None])
def test_hashing_step_by_step(golden, step, kept):
    """The last ids (`kept`, all by default) are all that a continuation needs; two suffice for 3-grams."""
    golden, engram_hash = golden(CASE), ready_hash()
    compressed = engram_hash.compress(golden["in.input_ids"], golden["in.attention_mask"])
    for start in range(0, compressed.shape[1], step):
        new = compressed[:, start : start + step]
        past = compressed[:, 0 if kept is None else max(0, start - kept) : start]
        rows = engram_hash(torch.cat([past, new], dim=1), new.shape[1])
        assert torch.equal(rows, golden["out.engram_hashes"][:, start : start + step])


def rows_by_definition(config, compressed):
    """The hash of one sequence, written out: Python integers, one position at a time."""
    primes, offsets, multipliers = (constant.tolist() for constant in engram_constants(config))
    pad = int(golden_token_map()[config.engram_pad_token_id])
    rows = []
    for position in range(len(compressed)):
        rows.append([])
        for layer in range(len(primes)):
            blocked, hashed, row = False, 0, []
            for shift in range(config.engram_max_ngram_size):
                blocked = blocked or position < shift or compressed[position - shift] == MASKED
                hashed ^= (pad if blocked else compressed[position - shift]) * multipliers[layer][shift]
                if shift:
                    tables = zip(primes[layer][shift - 1], offsets[layer][shift - 1], strict=True)
                    row += [hashed % prime + offset for prime, offset in tables]
            rows[-1].append(row)
    return torch.tensor(rows)


def test_no_ngram_reaches_across_masked_tokens():
    """Images in the middle, left padding, longer n-grams than the reference case has."""
    settings = {"engram_max_ngram_size": 4, "engram_n_heads": 3, "engram_num_embeddings": [900, 900]}
    engram_hash = ready_hash(**settings)
    input_ids, mask = torch.randint(0, 89, (3, 24)), torch.rand(3, 24) > 0.2
    mask[0, :5] = False
    compressed = engram_hash.compress(input_ids, mask)
    assert torch.equal(compressed == MASKED, ~mask)
    rows = engram_hash(compressed, 24)
    assert rows.shape == (3, 24, 2, 9) and rows.dtype == torch.int64
    for one, expected in zip(rows, compressed.tolist(), strict=True):
        assert torch.equal(one, rows_by_definition(engram_hash.config, expected))
    # Left padding changes nothing for the tokens after it.
    assert torch.equal(engram_hash(compressed[:1, 5:], 19), rows[:1, 5:])


def test_unset_token_map_is_refused():
    with pytest.raises(ValueError, match="`engram_layer_ids` .*set_tokenizer"):
        EngramHash(golden_config()).compress(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    "settings, token_map, named",
    [
        ({"vocab_size": 88}, golden_token_map(), "`vocab_size` is 88, the tokenizer has 89"),
        ({"engram_compressed_vocab_size": 34}, golden_token_map(), "`engram_compressed_vocab_size` is 34, .* 33"),
        ({"engram_pad_token_id": 45, "vocab_size": 89}, golden_token_map()[:45], "`engram_pad_token_id` is 45"),
    ],
)
def test_a_foreign_tokenizer_is_refused(settings, token_map, named):
    with pytest.raises(ValueError, match=named):
        EngramHash(golden_config(**settings)).set_token_map(token_map)


def test_ids_beyond_the_tokenizer_count_as_masked():
    engram_hash = ready_hash(vocab_size=96)
    assert engram_hash.compress(torch.tensor([[88, 89, 95]])).tolist() == [[26, MASKED, MASKED]]


class Holder(PreTrainedModel):
    """The least model with both modules in it."""

    config_class = DeepseekV41TextConfig

    def __init__(self, config):
        super().__init__(config)
        self.engram_hash = EngramHash(config)
        self.engram = EngramLayer(config, 1)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, EngramHash):
            module.init_buffers()
        elif isinstance(module, EngramLayer):
            nn.init.ones_(module.q_weight)
            nn.init.ones_(module.k_weight)
        else:
            super()._init_weights(module)


def test_modules_come_back_from_a_checkpoint(tmp_path):
    """Buffers are not stored: they have to be computed again after a start on the meta device."""
    model = Holder(golden_config())
    nn.init.normal_(model.engram.q_weight)
    model.save_pretrained(tmp_path)
    loaded = Holder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert set(loaded.state_dict()) == {f"engram.{name}" for name in model.engram.state_dict()}
    assert torch.equal(loaded.engram.q_weight, model.engram.q_weight.bfloat16())
    assert not loaded.engram_hash.is_ready
    loaded.engram_hash.set_token_map(golden_token_map())
    ids, expected = torch.randint(0, 89, (2, 9)), ready_hash()
    assert torch.equal(loaded.engram_hash(loaded.engram_hash.compress(ids), 9), expected(expected.compress(ids), 9))


def test_start_of_training():
    model = Holder(golden_config(hidden_size=400, initializer_range=0.03))
    assert (model.engram.q_weight == 1).all() and (model.engram.k_weight == 1).all()
    for weight in (model.engram.embed.weight, model.engram.wkv.weight):
        assert 0.02 < weight.std() < 0.04


# The layer


def layer_of(golden, layer: int) -> EngramLayer:
    engram = EngramLayer(golden_config(), golden_config().engram_layer_ids.index(layer))
    engram.load_state_dict(golden.group(f"param.model.layers.{layer}.engram"))
    return engram


@pytest.mark.parametrize("layer", [1, 4])
def test_update_of_the_streams(golden, layer):
    """What leaves the layer before goes in, what enters the attention's hyper-connection comes out."""
    golden = golden(CASE)
    engram, streams = layer_of(golden, layer), golden[f"out.layer{layer - 1}.streams"]
    rows, mask = golden["out.engram_hashes"][:, :, [1, 4].index(layer)], golden["in.attention_mask"]
    output = engram(streams, rows, mask)
    assert relative_error(output, golden[f"out.layer{layer}.attn_hc_in"]) < TOLERANCE
    assert torch.equal(output[mask == 0], streams[mask == 0]) and not torch.equal(output, streams)
    # Without a mask everything is text.
    assert torch.equal(engram(streams, rows)[mask == 1], output[mask == 1])


def test_gradients_are_those_of_the_definition(golden):
    """Against double precision; no agreement is close to 0, where the square root magnifies any rounding."""
    golden = golden(CASE)
    engram, rows = layer_of(golden, 4), golden["out.engram_hashes"][:, :, 1]
    streams = torch.randn(2, 17, 3, 40, requires_grad=True)
    cotangent = torch.randn(2, 17, 3, 40)
    (engram(streams, rows) * cotangent).sum().backward()

    names = [name for name, _ in engram.named_parameters()]
    inputs = [tensor.detach().double().requires_grad_() for tensor in (streams, *engram.parameters())]
    x, q_weight, k_weight, table, wkv = (
        inputs[0],
        *(inputs[1 + names.index(name)] for name in ("q_weight", "k_weight", "embed.weight", "wkv.weight")),
    )
    kv = table[rows].flatten(-2) @ wkv.T
    key, value = kv[..., :120].unflatten(-1, (3, 40)), kv[..., 120:]
    eps = golden.meta["config"]["rms_norm_eps"]
    query = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * q_weight
    key = key / (key.square().mean(-1, keepdim=True) + eps).sqrt() * k_weight
    agreement = (query * key).sum(-1) / 40**0.5
    assert agreement.abs().min() > 1e-6
    gate = torch.sigmoid(agreement.sign() * agreement.abs().sqrt())
    expected = torch.autograd.grad(((x + gate[..., None] * value[..., None, :]) * cotangent).sum(), inputs)
    actual = [streams.grad, *(parameter.grad for parameter in engram.parameters())]
    for name, one, other in zip(["streams", *names], actual, expected, strict=True):
        assert relative_error(one.double(), other) < TOLERANCE, name


def test_gate_without_agreement_is_finite(golden):
    """A key of zeros agrees with nothing: the gate is sigmoid(+1e-3) by its floor, and its gradient is finite."""
    engram, streams = layer_of(golden(CASE), 1), torch.randn(1, 4, 3, 40, requires_grad=True)
    with torch.no_grad():
        engram.wkv.weight[:120] = 0
    rows = torch.randint(0, 170, (1, 4, 4))
    output = engram(streams, rows)
    value = engram.wkv(engram.embed(rows).flatten(-2))[..., 120:].unsqueeze(-2)
    expected = streams + torch.tensor(1e-3).sigmoid() * value
    assert relative_error(output, expected) < TOLERANCE
    output.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in engram.parameters())


@pytest.mark.parametrize("autocast", [False, True])
def test_gate_and_sum_are_fp32_in_reduced_precision(golden, autocast):
    """Only the lookup and its projection follow the dtype."""
    golden = golden(CASE)
    engram, rows, streams = layer_of(golden, 1), golden["out.engram_hashes"][:, :, 0], golden["out.layer0.streams"]
    if not autocast:
        engram, streams = engram.bfloat16(), streams.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = engram(streams, rows)
        projected = engram.wkv(engram.embed(rows).flatten(-2))
    assert output.dtype == streams.dtype and projected.dtype == torch.bfloat16
    exact = EngramLayer(golden_config(), 0)
    exact.load_state_dict(engram.state_dict())
    exact.wkv.forward = lambda _: projected.float()
    assert torch.equal(output, exact(streams.float(), rows).to(streams.dtype))
