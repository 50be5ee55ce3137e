"""Configuration of the layers that the Kimi K3 text model and its DFlash draft share."""

from huggingface_hub.dataclasses import strict

from .validation import CheckedConfig


@strict
class KimiK3BaseConfig(CheckedConfig):
    r"""What a layer of the Kimi K3 text model and one of its DFlash draft have in common: gated multi-head latent
    attention (MLA, from DeepSeek-V2, arXiv 2405.04434, section 2.1) without positional encoding, and a dense
    feed-forward with the SiTU activation. The defaults are the released model's shape.

    Args:
        q_lora_rank (`int`, *optional*): Width of the compressed query; `None` projects queries directly.
        kv_lora_rank (`int`): Width of the latent row from which the keys and values of all heads are made.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim (`int`): Width of a head's own part of the key, of the part that
            all heads share, and of the value. Neither part is rotated, whatever the names say.
        mla_use_nope (`bool`): K3's MLA has no positional encoding at all; `False` is rejected.
        mla_use_output_gate (`bool`): Whether the MLA output is multiplied by a sigmoid gate of the layer's input.
        activation_situ_beta, activation_situ_linear_beta (`float`, *optional*): Bounds of the SiTU activation's gate
            (`None` or 0 means 1) and of its linear half (`None` means unbounded).

    Raises:
        ValueError: if a setting is outside of what the architecture defines; the message names it.
    """

    positive_ints = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "situ"
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True

    activation_situ_beta: float | int | None = 4.0
    activation_situ_linear_beta: float | int | None = 25.0

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def check(self) -> None:
        super().check()
        self.require("mla_use_nope", self.mla_use_nope, "K3's MLA has no rotary form; it must be true")
        heads, is_tied = self.num_attention_heads, self.tie_word_embeddings
        reason = f"MLA has one key/value per query head; it must equal num_attention_heads ({heads})"
        self.require("num_key_value_heads", self.num_key_value_heads == heads, reason)
        self.require("tie_word_embeddings", not is_tied, "K3 has a separate LM head; it must be false")
        for name in ("q_lora_rank", "activation_situ_linear_beta"):
            value = getattr(self, name)
            self.require(name, value is None or value > 0, "null or positive")
