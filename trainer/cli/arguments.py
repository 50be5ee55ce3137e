"""Settings that several commands share. Like those of each command, they import nothing that takes time."""

from dataclasses import dataclass

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
