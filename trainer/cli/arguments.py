"""Settings that several commands share. Like those of each command, they import nothing that takes time."""

from dataclasses import dataclass, fields

from ..training_settings import setting

DRAFT_DTYPE = "Dtype of the draft: auto (as saved), float32, bfloat16 or float16. Default: the target's."
DRAFT_REVISION = "Commit, tag or branch of a draft on the Hub."
TEMPLATE_KWARGS = "JSON for the chat template, the same as at serving; a row's chat_template_kwargs go before it."
MAX_LENGTH = "Longest row in tokens; longer ones are cut off (or as many as the target has positions for, if fewer)."
HELD_OUT_ROWS = "Held-out chat rows: .jsonl, .json or .parquet files."
ENGINES = ("vllm", "sglang")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class TargetArguments:
    """The frozen target, as `from_pretrained` takes it."""

    target: str = setting("Target model: a directory or a Hub id.")
    target_revision: str | None = setting("Commit, tag or branch of the target.", default=None)
    target_dtype: str = setting(
        "Dtype of the target: auto (as saved), float32, bfloat16 or float16.", default="auto", choices=DTYPES
    )
    target_device_map: str | None = setting("How to spread the target over devices, e.g. auto.", default=None)
    trust_remote_code: bool = setting("Run code that comes with the target or the draft.", default=False)


@dataclass
class ScheduleArguments:
    """How much of a drafted block is verified (default: all of it). Needs a draft with a confidence head."""

    confidence_threshold: float | None = setting(
        "Verify slots while the chance that all of them are accepted is at least this, in [0, 1].", default=None
    )
    confidence_cost_table: bool = setting(
        "Verify slots while they pay, given what rounds cost on this machine, which is measured first.", default=False
    )

    def __post_init__(self):
        threshold = self.confidence_threshold
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"`confidence_threshold` is {threshold}: it must lie between 0 and 1.")
        if threshold is not None and self.confidence_cost_table:
            raise ValueError("`confidence_threshold` and `confidence_cost_table` exclude each other: give one.")


@dataclass
class SamplingArguments:
    """How tokens are chosen."""

    temperature: float = setting("Temperature of sampling; 0: greedy.", default=0.0)
    top_p: float = setting("Nucleus of sampling: the share of the probability that is kept.", default=1.0)
    top_k: int = setting("Number of best tokens that sampling chooses among; 0: all.", default=0)
    seed: int = setting("Seed of sampling.", default=0)

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"`temperature` is {self.temperature}: it must not be negative.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p}: it must lie above 0 and at most at 1.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` is {self.top_k}: it must not be negative.")

    def generation(self) -> dict:
        """The settings of a `GenerationConfig`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


@dataclass
class DraftArguments:
    """An existing draft to train on, or the shape of a new one."""

    draft: str | None = setting("Draft to train on: a directory or a Hub id. Default: a new one.", default=None)
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    draft_type: str | None = setting("Kind of a new draft: dflash (the default) or dspark.", default=None)
    num_draft_layers: int | None = setting(
        "Layers of a new draft (dflash: 5; dspark: what the target says, or 3).", default=None
    )
    block_size: int | None = setting(
        "Tokens of its block, the known one included (dflash: 16; dspark: what the target says, or 5).", default=None
    )
    mask_token_id: int | None = setting("Token for positions to predict (proposed by the tokenizer).", default=None)
    target_layer_ids: list[int] | None = setting(
        "Zero-based target layers it reads (spread over the depth).", default=None
    )
    sliding_window: int | None = setting(
        "Context tokens that it sees (dflash: the block size, 0 for all; dspark: the target's, or 128).", default=None
    )
    num_full_attention_layers: int | None = setting(
        "dflash: number of last layers that see the whole context despite the window (1 of several layers, or 0).",
        default=None,
    )
    is_causal: bool | None = setting("dflash: whether a slot sees only earlier slots (true).", default=None)
    markov_rank: int | None = setting(
        "dspark: rank of the Markov head, 0 for none and no confidence head (what the target says, or 256).",
        default=None,
    )
    confidence_input: str | None = setting(
        "dspark: what the confidence head reads, post_norm (the default) or pre_norm (what engines serve).",
        default=None,
    )

    def shape(self) -> dict:
        """The settings of a new draft that were given, without `draft_type`; 0 for "none" is `None` in the config."""
        others = ("draft", "draft_revision", "draft_type")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}
        given = {name: value for name, value in given.items() if value is not None}
        return given | {name: None for name in ("sliding_window", "markov_rank") if given.get(name) == 0}

    def __post_init__(self):
        if self.draft is None and self.draft_revision is not None:
            raise ValueError("`draft_revision` belongs to an existing draft: name it as `draft`.")
        fixed = [*self.shape(), *(["draft_type"] if self.draft_type else [])]
        if self.draft is not None and fixed:
            raise ValueError(f"`draft` is given, whose shape is fixed: leave out {', '.join(fixed)}.")


@dataclass
class LoraArguments:
    """An adapter of `draft`, under the names of peft's `LoraConfig`; without `lora_r` the draft itself is trained."""

    lora_r: int | None = setting(
        "Rank of a LoRA adapter, which is trained and saved instead of the draft.", default=None
    )
    lora_alpha: int | None = setting("The adapter is scaled by lora_alpha / lora_r (lora_r).", default=None)
    lora_dropout: float | None = setting("Dropout of the adapter's input (0).", default=None)
    use_dora: bool = setting("DoRA: the adapter learns magnitudes apart from directions.", default=False)
    target_modules: list[str] | None = setting("Linear layers that are adapted, e.g. o_proj (all).", default=None)
    modules_to_save: list[str] | None = setting(
        "Modules that are trained and saved whole, e.g. norm or markov_head (none).", default=None
    )

    def __post_init__(self):
        if self.lora_r is None and (given := self._given()):
            raise ValueError(f"`{next(iter(given))}` belongs to an adapter: give its rank, `lora_r`, too.")
        if self.lora_r is not None and self.lora_r < 1:
            raise ValueError(f"`lora_r` is {self.lora_r}: it must be at least 1.")

    def lora_config(self) -> dict | None:
        """Arguments of `LoraConfig`; `None` without an adapter."""
        if self.lora_r is None:
            return None
        given = self._given()
        return {"r": given.pop("lora_r"), "lora_alpha": self.lora_r} | given

    def _given(self) -> dict:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


@dataclass
class DataArguments:
    """Chat rows and how they become token rows."""

    train_data: list[str] = setting(
        "Chat rows to train on: .jsonl, .json, .parquet, or Hub datasets: owner/name[@revision][/config][:split]."
    )
    data_mix: list[float] | None = setting(
        "Share of each source in train_data; short ones start again until all rows have been seen. Default: every row "
        "once.",
        default=None,
    )
    streaming: bool = setting(
        "Read and encode train_data while training; needs max_steps and eval_data.", default=False
    )
    shuffle_buffer: int = setting("streaming: number of rows among which the next one is drawn.", default=1000)
    packing: bool = setting("Pack the rows to train on into rows of max_length tokens.", default=False)
    num_proc: int | None = setting("Processes that encode rows.", default=None)
    eval_data: list[str] | None = setting("Held-out chat rows.", default=None)
    eval_fraction: float = setting("Share of the conversations held out if there is no eval_data.", default=0.02)
    max_length: int = setting(MAX_LENGTH, default=4096)
    assistant_turns: str = setting("Turns that are learned: all or last.", default="all")
    train_on_thinking: bool = setting("Learn an answer's thinking block instead of only reading it.", default=True)
    thinking_tags: list[str] | None = setting(
        "What opens and what closes a thinking block (those of known models, as <think> </think>).", default=None
    )
    stop_token_ids: list[int] | None = setting(
        "Tokens that end a turn (the target's, its tokenizer's and its template's).", default=None
    )
    template_kwargs: dict | None = setting(TEMPLATE_KWARGS, default=None)
    max_bad_fraction: float = setting("Share of rows that may be unreadable.", default=0.0)

    def __post_init__(self):
        if self.data_mix and len(self.data_mix) != len(self.train_data):
            raise ValueError(
                f"`data_mix` has {len(self.data_mix)} shares for {len(self.train_data)} sources in `train_data`."
            )
        if self.streaming and not self.eval_data:
            raise ValueError("`streaming` holds no rows out: give `eval_data`.")
        if not self.eval_data and not 0 < self.eval_fraction < 1:
            raise ValueError(
                f"`eval_fraction` is {self.eval_fraction}: it must lie between 0 and 1, or give `eval_data`."
            )


# By heading, what a trainer is made of, beside the settings of the training.
TRAINER = {"Target": TargetArguments, "Draft": DraftArguments, "Adapter": LoraArguments, "Data": DataArguments}
