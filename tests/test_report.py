import json

import pytest

from runner.report.old import history, rebuild, write_report
from runner.result import RunResult


@pytest.fixture
def sweep(tmp_path):
    """A sweep's folder: one job that finished, one that failed, one that died."""
    (tmp_path / "sweep.json").write_text(
        json.dumps({"id": "s", "overrides": [], "command": ["python", "-m", "runner", "-m"]})
    )
    done = tmp_path / "0"
    RunResult(
        "16-mixed", "16-mixed seed=0", str(done), quality="val/accuracy",
        metrics={"val/accuracy": 0.9375}, best=0.95, examples_per_second=1234.5, skipped_steps=2,
        loss_scale=16384.0,
    ).write(done)  # fmt: skip
    lines = [{"kind": "start"}]
    for step in range(1, 6):
        values = {"train/loss": 1 / step, "loss_scale/value": 2.0**step}
        lines.append({"kind": "metrics", "step": step, "time": step, "values": values})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (done / "journal.jsonl").write_text(text)
    RunResult("64-true", "64-true", str(tmp_path / "1"), "failed", "a | b\nsecond").write(
        tmp_path / "1"
    )
    (tmp_path / "2").mkdir()
    return tmp_path


def test_every_job_is_in_every_form(sweep):
    markdown, page, picture = write_report(sweep)
    text, html = markdown.read_text(), page.read_text()
    for form in (text, html):
        for cell in ("16-mixed seed=0", "0.9375", "0.95", "1234", "16384", "64-true", "failed"):
            assert cell in form
        assert "died without a result" in form
        assert "python -m runner -m" in form
    assert "a \\| b second" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in html


def test_the_page_escapes_what_it_shows(sweep):
    RunResult("x", "<script>", str(sweep / "0")).write(sweep / "0")
    assert "<script>" not in write_report(sweep)[1].read_text()


def test_no_picture_without_a_journal(sweep):
    (sweep / "0" / "journal.jsonl").unlink()
    assert [path.name for path in write_report(sweep)] == ["report.md", "report.html"]


def test_history_is_the_journals(sweep):
    assert [step for step, _ in history(sweep / "0")] == [1, 2, 3, 4, 5]
    assert [v["loss_scale/value"] for _, v in history(sweep / "0")] == [2, 4, 8, 16, 32]


def test_a_journal_that_breaks_off_is_read_up_to_there(sweep):
    with (sweep / "0" / "journal.jsonl").open("a") as journal:
        journal.write('{"kind": "metr')
    assert len(list(history(sweep / "0"))) == 5


def test_rebuild_by_folder_and_the_newest(sweep, tmp_path, monkeypatch, capsys):
    assert rebuild([str(sweep)]) == 0
    assert "16-mixed seed=0" in capsys.readouterr().out
    home = tmp_path / "home"
    (home / "outputs" / "sweeps").mkdir(parents=True)
    monkeypatch.chdir(home)
    assert rebuild([]) == 2
    assert "no sweep under outputs/sweeps" in capsys.readouterr().err
    (home / "outputs" / "sweeps" / "2026").symlink_to(sweep)
    assert rebuild([]) == 0


@pytest.mark.parametrize("argv", [["a", "b"], ["."]])
def test_what_is_no_sweep_is_told(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert rebuild(argv) == 2
    assert capsys.readouterr().err.startswith("error: ")
