import pytest

from runner.core.loop.step_records import EvalRecord
from runner.training.callbacks.runner_callbacks import Checkpointing


def evaluation(step, quality):
    return EvalRecord(step, 0, 1, {"val/accuracy": quality})


@pytest.mark.parametrize(
    ("every", "ends", "saves"), [(2, [2, 3, 4, 6], 3), (5, [1, 2, 3, 4], 0), (1, [1, 2, 3], 3)]
)
def test_a_block_that_ends_on_the_interval_is_saved(step, every, ends, saves):
    made = []
    observer = Checkpointing(made.append, every, lambda _: False)
    for end in ends:
        observer.on_steps((step(end),), None)
    assert made == [False] * saves


def test_a_checkpoint_comes_after_the_evaluation_of_its_step(step):
    made = []
    observer = Checkpointing(made.append, 2, lambda number: number == 4)
    observer.on_steps((step(2),), None)
    observer.on_steps((step(4),), None)
    assert made == [False]
    observer.on_evaluation(evaluation(4, 0.5), None)
    assert made == [False, False]


@pytest.mark.parametrize(("direction", "best"), [("max", 0.6), ("min", -0.4)])
def test_the_best_value_survives_an_interruption(direction, best):
    made = []

    def observer():
        return Checkpointing(made.append, None, lambda _: True, "val/accuracy", direction)

    first, second = observer(), observer()
    first.on_evaluation(evaluation(5, 0.5), None)
    first.on_evaluation(evaluation(10, 0.4), None)
    second.load_state_dict(first.state_dict())
    second.on_evaluation(evaluation(15, 0.6), None)
    assert made == [True] * 2
    assert second.state_dict() == {"best": best}
