"""Answers and reports with known numbers, for the tests of reports."""

from blockdraft.trainer.evaluation.decoding_report import Answer, DecodingReport

LOOP, TEXT = [1, 2, 3, 4] * 4, list(range(16))


def make_answer(tokens: list[int], accepted_lengths: list[int], gap: float | None = None, rows: int = 4) -> Answer:
    """8 tokens a second for 16 tokens; the plain decoders take 4 and 3 s for them, 0.4 s a step. A round verifies
    `rows`."""
    rounds = len(accepted_lengths)
    seconds = {"wall": 2.0, "prefill": 0.1, "target": 0.6 * rounds, "draft": 0.3 * rounds, "rest": 0.1 * rounds}
    difference = None if gap is None else {"position": 3, "gap": gap}
    plain = {"generate()": (len(tokens), 4.0), "plain loop": (len(tokens), 3.0)}
    return Answer(5, tokens, accepted_lengths, [rows] * rounds, seconds, plain, 0.4, difference)


def make_report(
    answers: list[Answer],
    checks_equality: bool = True,
    block_size: int = 4,
    drafted: int | None = None,
    confidence_schedule: str = "off",
) -> DecodingReport:
    """Of a draft whose anchor has a slot of its own, unless `drafted` says otherwise."""
    drafted = block_size - 1 if drafted is None else drafted
    return DecodingReport(
        block_size, drafted, confidence_schedule, 16, "float32", "bfloat16", "cpu", 2, 1e-4, checks_equality, answers
    )
