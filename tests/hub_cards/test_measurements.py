"""Which files hold measurements."""

from blockdraft.hub_cards.measurements import MEASURED, is_one_of
from blockdraft.trainer.evaluation.report_folder import CAPTIONS, RELIABILITY, TEXTS


def test_every_plot_and_text_of_a_report_is_known_as_a_measurement():
    assert {*CAPTIONS, *TEXTS, RELIABILITY} < set(MEASURED)


def test_only_files_beside_the_weights_are_meant_but_for_the_hub_s_evaluation_file():
    names = (
        "metrics.json",
        "loss.png",
        ".eval_results/tau.yaml",
        "other/loss.png",
        ".eval_results/gsm8k.yaml",
        "a.png",
    )
    assert [is_one_of(name, MEASURED) for name in names] == [True, True, True, False, False, False]
