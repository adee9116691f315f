import pytest

from runner.observers.checkpoints import Checkpoints


@pytest.mark.parametrize(
    ("every", "ends", "saves"), [(2, [2, 3, 4, 6], 3), (5, [1, 2, 3, 4], 0), (1, [1, 2, 3], 3)]
)
def test_a_block_that_ends_on_the_interval_is_saved(step, every, ends, saves):
    made = []
    observer = Checkpoints(lambda: made.append(1), every)
    for end in ends:
        observer.steps((step(end),))
    assert len(made) == saves
