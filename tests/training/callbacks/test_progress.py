import io

import pytest
from rich.console import Console

from runner.training.callbacks.progress import progress, progress_line


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


@pytest.fixture
def printed(step, evaluation):
    """What a run of three steps and an evaluation leaves on a console."""

    def print_run(terminal):
        out = console(terminal)
        observer = progress(out, 3, "16-mixed keep_fp32=[head]")
        observer.on_steps((step(1, 8.0), step(2, 4.0, skipped=1)), None)
        observer.on_evaluation(evaluation(2, loss=1.25, accuracy=0.5), None)
        observer.on_steps((step(3, 4.0, skipped=1),), None)
        observer.close()
        return out.file.getvalue()

    return print_run


def test_the_bar(printed):
    text = printed(True)
    assert "16-mixed keep_fp32=[head]" in text
    assert "3/3" in text
    assert "loss 0.5" in text
    assert "val/accuracy 0.5" in text
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_lines_hold_no_control_characters(printed):
    text = printed(False)
    assert text.splitlines() == [
        "epoch 1  step 2  train/loss 0.5  val/loss 1.25  val/accuracy 0.5  loss scale 4  skipped 1"
    ]


def test_a_line_without_a_loss_scale_or_steps(step, evaluation):
    assert progress_line(evaluation(4, loss=2.0), step(4)).endswith("train/loss 0.5  val/loss 2")
    assert progress_line(evaluation(4, loss=2.0), None) == "epoch 1  step 4  val/loss 2"
