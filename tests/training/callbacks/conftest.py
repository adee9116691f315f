import pytest

from runner.core.loop.step_records import EvalRecord, StepRecord


@pytest.fixture
def step():
    """A step record with a loss scale, made shorter."""

    def made(number, scale=None, overflow=None, skipped=None, **more):
        plain = StepRecord(number, 1000 + number, 1, 0.5, 0.1, 2.0, step_ms=10.0, examples=8)
        if scale is None:
            return plain._replace(**more)
        scaled = {"loss_scale": scale, "overflow": overflow or 0.0, "skipped_steps": skipped or 0}
        return plain._replace(**scaled, **more)

    return made


@pytest.fixture
def evaluation():
    """An evaluation record."""

    def made(number, stagnant=None, **metrics):
        named = {f"val/{key}": value for key, value in metrics.items()}
        return EvalRecord(number, 1000 + number, 1, named, stagnant)

    return made
