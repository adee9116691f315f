"""Files of a run or a sweep that are damaged, of another kind, or somebody's trap: one message or
one line, no traceback, nothing executed, nothing that never ends."""

import io
import json
import os
import pickle
import shutil
import signal
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hostile import QUICK, cases, ended_well
from hypothesis import given
from hypothesis import strategies as st
from run_folders import only_sweep
from tiers import counts, crossed

from runner.core.base.errors import ConfigError
from runner.core.base.layout import HISTORY
from runner.core.record import checkpoint_file, journals
from runner.diagnostics import saved_batch
from runner.tracking import history
from runner.tracking.upload_state import UploadState

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part),
    max_leaves=6,
)
CANARY = "touched"


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path(CANARY),)


@pytest.fixture(scope="module")
def swept(inside, tmp_path_factory):
    """(main, the folder of a finished sweep of two jobs)."""
    with inside(tmp_path_factory.mktemp("files")) as main:
        main(*QUICK, "-m", "seed=0,1", "hydra/launcher=basic").check_ok()
        yield main, only_sweep(Path.cwd())


@pytest.fixture
def copy(swept, tmp_path):
    shutil.copytree(swept[1], tmp_path / "copy")
    return tmp_path / "copy"


def spoil(path, how, data):
    """Replace what a file holds."""
    raw = path.read_bytes() if path.exists() else b"{}"
    if how == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    elif how == "flip":
        raw = bytearray(raw)
        for _ in range(3):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "pickle":
        raw = pickle.dumps(Bomb())
    elif how == "json":
        raw = json.dumps(data.draw(JSON)).encode()
    elif how == "field":
        content = json.loads(raw)
        content[data.draw(st.sampled_from(sorted(content)))] = data.draw(JSON)
        raw = json.dumps(content).encode()
    path.write_bytes(bytes(raw))


@counts(6, 25)
def test_a_report_of_spoilt_files(swept, count):
    main, folder = swept
    names = st.sampled_from(("sweep.json", "0/result.json"))
    ways = st.sampled_from(("cut", "flip", "pickle", "json", "field", "field"))

    @cases(count)
    @given(names, st.data(), ways)
    def check(name, data, how):
        path = folder / name
        before = path.read_bytes()
        try:
            spoil(path, how, data)
            ended_well(main("report", str(folder)))
        finally:
            path.write_bytes(before)
        assert not Path(CANARY).exists()

    check()


def metrics(value):
    return json.dumps({"kind": "metrics", "step": value, "time": value, "values": value})


LINES = (
    JSON.map(json.dumps)
    | JSON.map(metrics)
    | st.just('{"kind":"metrics","step":1,"time":2,"values":{"a":1.0}}')
    | JSON.map(lambda value: json.dumps({"kind": "start", "continues": value}))
)
BATCH = st.fixed_dictionaries(dict.fromkeys(("steps", "micro_batches", "loss_scale", "seed"), JSON))


@cases(60)
@given(lines=st.lists(LINES, max_size=5), state=JSON)
def test_a_journal_of_anything(tmp_path_factory, lines, state):
    folder = tmp_path_factory.getbasetemp() / "journal"
    folder.mkdir(exist_ok=True)
    path = folder / "journal.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.with_suffix(".state").write_text(json.dumps(state))
    UploadState(path).read()
    list(journals.read_records(path))
    history.from_folder(folder)


@cases(40)
@given(content=JSON | BATCH)
def test_a_batch_of_anything(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "batch.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="is no batch that a guard saved"):
        saved_batch.read_saved_batch(path)


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def zipped(name, content=b"x"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return file.getvalue()


ARCHIVES = {
    "pickled": lambda: npz(a=np.array([Bomb()], dtype=object)),
    "shape": lambda: npz(**{"train/loss": np.zeros(3)}),
    "text": lambda: npz(**{"train/loss": np.array([["a"] * 2] * 3)}),
    "up": lambda: zipped("../../touched.npy"),
    "empty": lambda: b"",
    "zeros": lambda: zipped("a.npy", bytes(20_000_000)),
}


@pytest.mark.parametrize(("reader", "kind"), crossed(["a run", "a report"], ARCHIVES))
def test_a_history_of_anything(swept, copy, reader, kind):
    (copy / "0" / HISTORY).write_bytes(ARCHIVES[kind]())
    if reader == "a run":
        history.from_folder(copy / "0")
    else:  # it draws its charts, for seconds
        ended_well(swept[0]("report", str(copy)))
    assert not Path(CANARY).exists()
    assert not (copy.parent / "touched.npy").exists()


def fifo(path):
    os.mkfifo(path)


KINDS = {
    "fifo": fifo,
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path),
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "nowhere": lambda path: path.symlink_to("/no/where"),
    "secret": lambda path: path.symlink_to("/etc/shadow"),
}
PLACES = (
    "0/result.json 0/checkpoints/step-00000002.pt sweep.json 0/history.npz 0/journal.jsonl"
).split()


@contextmanager
def in_time():
    """What reads a pipe or /dev/zero never ends by itself."""

    def stop(*_):
        raise TimeoutError("it reads what never ends")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(240)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("place", "kind"), crossed(PLACES, KINDS))
def test_no_file_at_all(swept, copy, place, kind):
    path = copy / place
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    command = ["report", copy]
    if path.suffix == ".pt":
        command = [*QUICK, f"checkpoint.resume={path.parent.parent}"]
    with in_time():
        done = swept[0](*command)
    ended_well(done)
    assert done.rc == 2 or path.suffix != ".pt"


TYPED = ("batch={} debug=replay", "init.weights={}", "data=text data.path={}")


@pytest.mark.parametrize(("typed", "kind"), crossed(TYPED, KINDS))
def test_no_file_where_one_is_typed(swept, tmp_path, typed, kind):
    KINDS[kind](tmp_path / "it")
    with in_time():
        done = swept[0](*QUICK, *typed.format(tmp_path / "it").split())
    ended_well(done)
    assert done.rc == 2


def test_a_checkpoint_whose_members_lead_elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "evil.pt").write_bytes(zipped("../../touched"))
    with pytest.raises(ConfigError):
        checkpoint_file.load(folder / "evil.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["above"]
    assert [path.name for path in (tmp_path / "above").rglob("*")] == ["folder", "evil.pt"]
