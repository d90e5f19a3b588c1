"""The direction in which metrics improve."""

import pytest

from whet.config.metric_direction import lower_is_better


@pytest.mark.parametrize(
    "metric",
    [
        *("eval_loss", "loss", "eval_sft.loss", "best_eval_loss", "hard_loss", "test_loss"),
        *("eval_perplexity", "eval_bits_per_byte", "test.bits_per_byte", "eval_cross_entropy", "eval_kl"),
        *("seconds", "step_s", "eval_s", "elapsed_s", "peak_gib"),
    ],
)
def test_losses_divergences_and_costs_fall(metric):
    assert lower_is_better(metric)


@pytest.mark.parametrize(
    "metric",
    [
        "exact_match",
        "f1_macro",
        "accuracy",
        "eval_reward",
        "reward_margin",
        "tokens_per_s",
        "steps_per_s",
        "mfu",
        "exact_match_greece",
        "eval_exact_match_weight_loss",
        "eval_reward_no_loss",
        "piece",
        "test.exact_match_weight_loss",
        "eval_loss.reward_margin",
    ],
)
def test_scores_and_rates_rise(metric):
    assert not lower_is_better(metric)


@pytest.mark.parametrize(
    "metric",
    [
        *("eval_m.mtp_loss_1", "mtp_loss_2", "eval_truncated_fraction", "no_signal_fraction"),
        *("reward_errors", "eval_reward_errors", "brier", "ece", "hamming", "log_loss"),
        *("eval_reward.loss", "reward.kl", "eval_exact_match.loss", "eval_reward_model.chosen_loss"),
    ],
)
def test_losses_of_heads_failures_and_errors_fall(metric):
    assert lower_is_better(metric)
