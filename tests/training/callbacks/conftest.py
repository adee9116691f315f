import pytest

from runner.training.records import EvalRecord, StepRecord


@pytest.fixture
def step():
    """A step record with a loss scale, made shorter."""

    def made(number, scale=None, overflow=None, skipped=None, **more):
        fields = {
            "time_ms": 1000 + number,
            "epoch": 1,
            "loss": 0.5,
            "lr": 0.1,
            "grad_norm": 2.0,
            "step_ms": 10.0,
            "examples": 8,
        }
        if scale is not None:
            overflow, skipped = overflow or 0.0, skipped or 0
        return StepRecord(
            number, **{**fields, **more}, loss_scale=scale, overflow=overflow, skipped_steps=skipped
        )

    return made


@pytest.fixture
def evaluation():
    """An evaluation record."""

    def made(number, stagnant=None, **metrics):
        named = {f"val/{key}": value for key, value in metrics.items()}
        return EvalRecord(number, 1000 + number, 1, named, stagnant)

    return made
