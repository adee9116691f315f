"""mode=gate gives no answer where its baseline does not train."""

from types import SimpleNamespace

import pytest

from runner.core.base.errors import ConfigError
from runner.core.run.run_result import RunResult
from runner.sweeps.advisor.schedule import run_gate_rounds
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.ranking import rank_precisions

SETTINGS = AdviseRequest("time", 1.0, 10, 100, 3, "5m", ["python"], mode="gate", max_gap=0.1)


def trial(precision: str, seed: int, loss: float, diverged: bool) -> RunResult:
    return RunResult(
        precision=precision,
        label=f"{precision} seed={seed}",
        folder=f"/{precision}-{seed}",
        status="failed" if diverged else "finished",
        group=precision,
        seed=seed,
        metrics={} if diverged else {"val/loss": loss},
        steps=10,
        diverged=diverged,
    )


@pytest.fixture
def rounds():
    """Rounds of trials whose divergence is given by precision."""

    def run(**diverged: bool) -> list[RunResult]:
        done = []

        def run_trial(precision, seed):
            name = precision.replace("-", "_")
            done.append(trial(precision, seed, 1.0 + seed, diverged[name]))

        command = SimpleNamespace(
            precisions=["32-true", "bf16-true"],
            recorded_result=lambda precision, seed: None,
            trial_seeds=range,
        )
        trials = SimpleNamespace(
            command=command,
            request=SETTINGS,
            run=run_trial,
            advice=lambda: rank_precisions(done, SETTINGS),
            remaining_seconds=100.0,
        )
        run_gate_rounds(trials)  # type: ignore[arg-type]
        return done

    return run


def test_a_baseline_that_diverges_rejects_nothing(rounds):
    with pytest.raises(ConfigError, match=r"the baseline 32-true itself does not train \(diverged"):
        rounds(**{"32_true": True, "bf16_true": True})
