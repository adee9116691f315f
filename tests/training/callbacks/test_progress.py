import io

import pytest
from rich.console import Console

from runner.output.console import JobConsole, plain_console
from runner.training.callbacks.progress import ProgressBar, ProgressLines, progress


def console(terminal, width=100):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False)


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
    assert "val/accuracy" in text
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_lines_hold_no_control_characters(printed):
    text = printed(False)
    assert text.splitlines() == [
        "  epoch     step  train/loss    val/loss  val/accuracy  loss scale  skipped",
        "      1        2         0.5        1.25           0.5           4        1",
    ]


def rows(records, terminal=False):
    """The rows about evaluations that a console of 80 columns gets, each after a step."""
    out = console(terminal, 80)
    observer = ProgressLines(out)
    for last, evaluated in records:
        if last is not None:
            observer.on_steps((last,), None)
        observer.on_evaluation(evaluated, None)
    return out.file.getvalue().splitlines()


def test_rows_are_aligned_and_fit_a_terminal_of_80_columns(step, evaluation):
    large = step(900_000, 2.0**20, skipped=12345, loss=1.234e-05)
    every = [(step(2, 4.0), evaluation(2, loss=2.0, accuracy=0.5))]
    every.append((large, evaluation(900_000, loss=-1.234e-05, accuracy=0.98765)))
    head, *lines = rows(every)
    assert {len(line) for line in (head, *lines)} == {75}
    assert lines[1].split()[-2:] == ["1048576", "12345"]


def test_a_terminal_gets_as_many_columns_of_a_longer_row_as_fit(step, evaluation):
    metrics = {f"metric_{number}": number / 8 for number in range(8)}
    records = [(step(2, 4.0), evaluation(2, loss=2.0, **metrics))]
    head, row = rows(records, terminal=True)
    assert head.split()[-1] == "val/metric_1"
    assert (len(head), len(row), row.split()[-1]) == (68, 68, "0.125")
    assert rows(records)[0].split()[-1] == "skipped"  # a file gets all of them


def test_a_file_gets_no_control_characters_where_colours_are_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in the processes that a notebook starts
    assert (plain_console().is_terminal, plain_console().width) == (False, 160)


def test_a_row_without_a_loss_scale_or_steps(evaluation):
    assert rows([(None, evaluation(4, loss=2.0))])[1].split() == ["1", "4", "2"]


def test_the_bar_moves_with_each_step_and_leaves_the_start_out_of_the_time_left(step):
    now = [0.0]
    out = console(True)
    bar = ProgressBar(out, out, 10, lambda: "run", clock=lambda: now[0])
    (task,) = bar._bar.tasks
    seen = []
    # A minute until the first step has ended, then 2 s for each.
    for number, at in ((1, 50.0), (2, 60.0), (3, 62.0), (4, 64.0)):
        now[0] = at
        bar.around_step(number)
        seen.append((task.completed, task.time_remaining))
    assert seen == [(0, None), (1, None), (2, 16.0), (3, 14.0)]
    now[0] = 64.05  # too soon for another update
    bar.around_step(5)
    assert task.completed == 3
    bar.on_steps((step(2),), None)  # records of a GPU are late
    assert (task.completed, task.fields["loss"]) == (3, "loss 0.5")
    bar.close()


def test_a_job_of_a_sweep_prints_to_its_log_and_warnings_to_the_screen(tmp_path, capsys):
    path = tmp_path / "2" / "log.txt"
    path.parent.mkdir()
    log = JobConsole(path, lambda: "job 3 of 8")
    for line in ("epoch 1", "warning: small", "resumed at step 2 of 4"):
        log.print(line)
    log.print()
    assert capsys.readouterr().out == "warning: small\nresumed at step 2 of 4\n"
    expected = "epoch 1\nwarning: small\nresumed at step 2 of 4\n\n"
    assert path.read_text() == expected
    screen = log.terminal = console(True)
    bar = progress(log, 4, "16-mixed")
    bar.close()
    log.close()
    assert "job 3 of 8" in screen.file.getvalue()


def test_a_warning_of_each_job_is_on_the_screen_once(tmp_path, capsys):
    stuck = (
        "warning: {} of the parameter elements did not move at step {}, " + 30 * "and so on " + "{}"
    )
    words = [("57%", 161, "bf16-true"), ("54%", 92, "bf16-true"), ("54%", 92, "16-true")]
    for number, one in enumerate(words):
        (tmp_path / str(number)).mkdir()
        log = JobConsole(tmp_path / str(number) / "log.txt", str)
        log.print(stuck.format(*one))
        log.print(f"resumed at step {number}")
        log.close()
    lines = " ".join(capsys.readouterr().out.split())
    assert lines.count("warning:") == 2
    assert lines.count("resumed at") == 3
    assert lines.index("bf16-true") < lines.index(" 16-true")
