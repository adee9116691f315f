"""Out of memory, as a message: the step, the table, what to type."""

import traceback
import weakref

import pytest
import torch

from runner.diagnostics.memory.out_of_memory import is_out_of_memory, release_frames


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_it_is_distinguished_from_other_errors(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_the_tensors_of_the_failed_frames_are_freed_after_somebody_read_their_variables():
    def fail():
        tensor = torch.zeros(1)
        references.append(weakref.ref(tensor))
        raise MemoryError

    references = []
    with pytest.raises(MemoryError) as caught:
        fail()
    for frame, _ in traceback.walk_tb(caught.value.__traceback__):
        assert frame.f_locals
    release_frames(caught.value)
    assert references[0]() is None


BACKWARD = "runner.core.loop.step.backpropagate"


@pytest.fixture
def failing(quick, monkeypatch):
    """A run whose n-th call of a function of runner.modes.train finds no memory."""

    def run_and_fail(name, *args, run=quick):
        def fails(*_, **__):
            torch.empty(2**60)

        monkeypatch.setattr(name, fails)
        return run("precision=32-true", *args)

    return run_and_fail


def test_a_step(failing, tmp_path):
    done = failing(BACKWARD, "train.batch_size=15", "train.accumulate=2")
    assert done.rc == 1
    lines = [line.removeprefix("error: ") for line in done.stderr.splitlines()]
    assert lines[0].startswith("Out of memory in step 1 on ")
    assert "allocate memory" in lines[0]
    names = [line.split()[0] for line in lines[1:-1]]
    assert names == ["weights", "gradients", "optimizer", "peak"]
    assert lines[-1] == (
        "To need less, type train.batch_size=5 train.accumulate=6, or precision=bf16-true, or "
        "optimizer=adamw8bit."
    )
    (file,) = tmp_path.glob("outputs/runs/*/error.txt")
    assert "Traceback" in file.read_text()


def test_a_model_of_blocks_may_compute_them_twice(failing, main):
    typed = ("model=vit", "model.layers=2", "train.batch_size=2", "optimizer=sgd", "tracking=none")
    done = failing(BACKWARD, *typed, run=main)
    assert done.stderr.endswith(
        "To need less, type train.batch_size=1 train.accumulate=2, or "
        "train.activation_checkpointing=true, or precision=bf16-true.\n"
    )
    done = failing(BACKWARD, *typed, "train.activation_checkpointing=true", run=main)
    assert done.rc == 1
    assert "activation_checkpointing" not in done.stderr


def test_an_evaluation(failing):
    done = failing("runner.modes.startup.loss_of", "train.batch_size=1", "optimizer=sgd")
    assert done.stderr.startswith("error: Out of memory in the first evaluation on ")
    assert done.stderr.endswith("To need less, type precision=bf16-true.\n")


def test_a_model_that_cannot_be_built(failing):
    done = failing("runner.modes.execution.ModelBuilder.build")
    assert "Out of memory before the first step on " in done.stderr
    assert "precision=bf16-true init.low_memory=true, or optimizer=adamw8bit." in done.stderr
