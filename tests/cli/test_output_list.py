"""runner list: a row for each run and sweep, whatever else lies below a folder."""

import json
import shutil
import sys
from subprocess import run

import pytest
from environments import ROOT, clean_env

from runner.cli.output_list import disk_bytes, find_rows

WORDS = "model=mlp model.hidden=[4] train.max_steps=2 hydra/launcher=basic".split()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, inside, empty_store):
    """A folder with two runs and a sweep."""
    folder = tmp_path_factory.mktemp("listed")
    empty_store(folder / "outputs" / "mlflow.db")
    with inside(folder) as main:
        note = "tracking.note='the good one'"
        assert main(*WORDS, note, "precision=bf16-true", "hydra.run.dir=outputs/runs/a").rc == 0
        assert main(*WORDS, "tracking=none", "hydra.run.dir=outputs/runs/b").rc == 0
        swept = ("-m", "seed=0,1", "hydra.sweep.dir=outputs/sweeps/s")
        assert main(*WORDS, "tracking=none", *swept).rc == 0
    return folder


@pytest.fixture
def listed(outputs, inside):
    """Return the rows that `runner list --json` prints behind some words."""
    with inside(outputs) as main:

        def rows(*words):
            return json.loads(main("list", *words, "--json").check_ok().stdout)

        yield rows


def test_the_newest_comes_first_and_a_job_is_no_row(listed):
    sweep, second, first = listed()
    folders = [row["folder"] for row in (sweep, second, first)]
    assert folders == ["outputs/sweeps/s", "outputs/runs/b", "outputs/runs/a"]
    assert (first["name"], first["precision"]) == ("mlp on digits", ["bf16-true"])
    assert (first["note"], len(first["ids"][0])) == ("the good one", 32)
    assert first["answer"].startswith("val/accuracy 0.")
    assert sweep["answer"].startswith("32-true finished: val/accuracy ")
    assert sweep["size"] > second["size"] > 4096


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("precision=bf16-true", ["a"]),
        ("model=mlp data=digits", ["s", "b", "a"]),
        ("model=resnet", []),
        ("GOOD", ["a"]),
        ("bf16 good", ["a"]),
        ("bf16 bad", []),
        ("outputs/runs", ["b", "a"]),
        ("outputs/runs/b", ["b"]),
        ("outputs/sweeps/s outputs/runs/a", ["s", "a"]),
    ],
)
def test_filters(listed, words, found):
    assert [row["folder"][-1] for row in listed(*words.split())] == found


def test_a_terminal_of_80_columns_shows_whole_folders(outputs):
    command = [sys.executable, "-c", "import runner.cli.main as m, sys; m.main(['list']); "]
    command[-1] += "print('torch' in sys.modules, 'mlflow' in sys.modules)"
    env = clean_env(PYTHONPATH=str(ROOT), COLUMNS="80", TTY_COMPATIBLE="1")
    text = run(command, cwd=outputs, env=env, capture_output=True, text=True, check=True).stdout
    assert text.endswith("False False\n")
    for part in ("outputs/runs/a ", "bf16-true", "the good one", "runs and sweeps: 3, "):
        assert part in text


def test_an_empty_folder_is_said_to_be(main):
    assert main("list").check_ok().stdout == "No such run or sweep is below outputs.\n"


def test_folders_of_strangers_do_no_harm(outputs, tmp_path):
    shutil.copytree(outputs / "outputs", tmp_path / "outputs")
    runs = tmp_path / "outputs" / "runs"
    (runs / "a" / "result.json").write_text("[]")
    (runs / "b" / "checkpoints").rename(tmp_path / "elsewhere")
    (runs / "b" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (runs / "c").symlink_to(runs / "a")
    (runs / "d").mkdir()
    (runs / "d" / "sweep.json").write_text('{"id": "x", "command": [], "began_ms": 1e300}')
    (runs / "e").mkdir()
    (runs / "e" / "journal.jsonl").write_text('{"kind": "start", "tags": 3}\n')
    rows = {row.folder[-1]: row.answer for row in find_rows(tmp_path / "outputs")}
    assert rows == {
        "s": rows["s"],
        "a": "not read: its result.json is damaged.",
        "b": "not read: it holds a link out of it.",
        "d": f"not read: {runs}/d/sweep.json is damaged: began_ms is no Manifest's",
        "e": "not read: its journal.jsonl is damaged.",
    }


def test_a_file_with_two_names_counts_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(100_000))
    before = disk_bytes(tmp_path)
    (tmp_path / "link").hardlink_to(tmp_path / "a" / "file")
    assert disk_bytes(tmp_path, tmp_path / "a") == before > 100_000
