"""What commands do with a stranger's folder: the table of docs/reliability.md.

`theirs` is a run and `sweep` a sweep, made with another user's key, below the working directory.
After each command the files in `mine`, to which their links lead, are what they were, and nobody
has asked the server that their journals and databases name.
"""

import json
import shutil
import signal
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from quiet_mlflow import MlflowClient
from run_folders import read_json
from transformers import GPT2Config, GPT2LMHeadModel
from waiting import SECONDS, wait_for

from runner.core.record.journals import Journal

pytestmark = pytest.mark.slow

QUICK = (
    "model=mlp model.hidden=[4] train.max_steps=2 train.log_every=1 accelerator=cpu tracking=none"
)
JOBS = f"-m {QUICK} seed=0,1 hydra/launcher=basic"
BATCH = {"why": "a test", "steps": [2, 2], "micro_batches": [[0, 1]], "loss_scale": None}
BATCH |= {"begun": 0, "precision": "32-true", "model": "mlp", "data": "digits", "seed": 0}
SMALL = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 64, "n_positions": 16}
PRETRAINED = (
    "model=hf model.kind=causal_lm model.path=theirs/hf data=synthetic_tokens "
    "data.context=16 data.vocab=64 train.max_steps=1 accelerator=cpu tracking=none"
)
RESUME = "checkpoint.resume=theirs train.max_steps=3 tracking=none"
WRITTEN = """.partial config.partial dtypes.json dtypes.partial environment.partial error.txt
    history.npz history.partial journal.spare journal.state log.txt loss_scale.png metrics.jsonl
    model.safetensors numerics.html numerics.json numerics.partial result.json
    result.partial report.csv report.html report.json report.md report.partial report.png
    signature.partial sweep.partial tracking.log""".split()
"""Files of a run or a sweep that commands write, and the drafts of those that they replace."""
FILES_WITH_FOLDERS = (
    "checkpoints/step-00000003.partial checkpoints/best.partial model.safetensors metrics.jsonl "
    "config.partial result.partial dtypes.partial"
).split()
"""Files and drafts in whose places there may be folders."""
FOLDERS = "checkpoints model guard samples callbacks pretrained adapter ranks .hydra".split()


def link(path, target):
    """Put a link in a file's or a folder's place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    path.symlink_to(Path(target).absolute())


def link_files(folder, _):
    """Put a link in the place of every file that a command writes, and none in that of an input."""
    for name in WRITTEN:
        Path("mine", name).write_text("mine")
        link(folder / name, Path("mine", name))


def linked(name, target):
    return lambda folder, _: link(folder / name, target)


def make_folder(path):
    """Put a folder that is not empty in a file's place."""
    path.unlink(missing_ok=True)
    (path / "inside").mkdir(parents=True)


def folder_at(name):
    return lambda folder, _: make_folder(folder / name)


def name_server(folder, server):
    """Write a journal whose store is the server, and a run with one below outputs/."""
    for place in (folder, Path("outputs/runs/theirs")):
        if not (place / "journal.jsonl").exists():
            journal = Journal(place)
            facts = {"sweep": None, "role": "run", "tags": {}, "params": {}, "experiment": "x"}
            journal.append("start", id="i", name="n", time=0, uri=server, continues=None, **facts)
            journal.append_end(status="FINISHED", error=None, time=0)
            journal.close()


def name_server_without_state(folder, server):
    """Write a journal of the server beside whose upload state no file can be."""
    name_server(folder, server)
    make_folder(folder / "journal.state")


def database(place):
    """A store whose artifacts are in `place`, in which {server} is the server's address."""

    def write(_, server):
        shutil.copy("empty.db", "theirs.db")
        client = MlflowClient("sqlite:///theirs.db")
        tags = {"sweep_id": "s", "role": "sweep"}
        client.create_run(client.create_experiment("x", "art"), tags=tags)
        uri = place.format(server=server, mine=Path("mine").absolute())
        with closing(sqlite3.connect("theirs.db")) as file, file:
            file.execute("update runs set artifact_uri = ?", (uri,))

    return write


LINKS = "links in files' places"
HOSTILE = {
    LINKS: link_files,
    **{f"{name}/ is a link": linked(name, "mine") for name in FOLDERS},
    "0/ is a link": linked("0", "mine"),
    "0/.hydra/ holds a link": linked("0/.hydra/config.yaml", "mine/file"),
    "model/ holds a link": linked("model/model.pt2", "mine/file"),
    "checkpoints/ holds a link": linked("checkpoints/step-00000003.partial", "mine/file"),
    "Hydra's file is a link": linked("multirun.yaml", "mine/file"),
    "a tokenizer's file is a link": linked("hf/vocab.txt", "mine/file"),
    **{f"{name} is a folder": folder_at(name) for name in FILES_WITH_FOLDERS},
    "a journal of a server": name_server,
    "a journal whose state is a folder": name_server_without_state,
    "a database of my folder": database("{mine}"),
    "a database of a server": database("{server}/art"),
}
"""What is done to both folders, by name: functions of the folder and the server's address."""
OUT = "through a link. Delete the link"
IS_FOLDER = "written: Is a directory."
UNSENT = "does not take the run"
UNNAMED = "which is neither signed with your key"
NO_PLACE = "which is no place of MLflow's"
STORE = "tracking.uri=sqlite:///theirs.db"
ROWS = [
    # A link in the place of a file is replaced by a file.
    (f"{RESUME} checkpoint.best=true", LINKS, 0, ""),
    (f"{RESUME} checkpoint.safetensors=true numerics.every=1", LINKS, 0, ""),
    (f"{QUICK} hydra.run.dir=theirs", LINKS, 0, ""),
    ("mode=evaluate checkpoint=theirs tracking=none", LINKS, 0, ""),
    (f"{QUICK} init.weights=theirs", LINKS, 0, ""),
    (f"{QUICK} mode=diff precision=bf16-mixed against=theirs", LINKS, 0, ""),
    ("debug=replay batch=theirs/guard/batch-000002.json tracking=none", LINKS, 0, ""),
    (f"{PRETRAINED} checkpoint.pretrained=true", "a tokenizer's file is a link", 0, "a link to"),
    ("report sweep", LINKS, 0, ""),
    ("report sweep other --out sweep", LINKS, 0, ""),
    (f"{JOBS} sweep.resume=sweep", LINKS, 0, ""),
    # A folder that leads out is refused before anything is written, renamed or deleted there.
    *((RESUME, f"{name}/ is a link", 2, OUT) for name in FOLDERS if name != "checkpoints"),
    (RESUME, "model/ holds a link", 2, OUT),
    (RESUME, "checkpoints/ holds a link", 2, OUT),
    (f"{QUICK} hydra.run.dir=theirs", "checkpoints/ is a link", 2, OUT),
    (f"{QUICK} hydra.run.dir=theirs", ".hydra/ is a link", 2, OUT),
    (f"{QUICK} hydra.run.dir=theirs checkpoint.resume=auto", ".hydra/ is a link", 2, OUT),
    (f"{JOBS} sweep.resume=sweep", "0/ is a link", 2, OUT),
    (f"{JOBS} sweep.resume=sweep", "0/.hydra/ holds a link", 2, OUT),
    (f"{JOBS} hydra.sweep.dir=sweep", "Hydra's file is a link", 2, "holds another sweep, or a run"),
    # A folder in a file's place: drafts are deleted, and what cannot be written is named.
    (f"{RESUME} checkpoint.best=true", "checkpoints/step-00000003.partial is a folder", 0, ""),
    (f"{RESUME} checkpoint.best=true", "checkpoints/best.partial is a folder", 0, ""),
    (f"{RESUME} checkpoint.safetensors=true", "model.safetensors is a folder", 1, IS_FOLDER),
    (RESUME, "metrics.jsonl is a folder", 2, f"theirs/metrics.jsonl cannot be {IS_FOLDER}"),
    (RESUME, "config.partial is a folder", 2, f"theirs/config.partial cannot be {IS_FOLDER}"),
    (RESUME, "result.partial is a folder", 1, f"result.json was not {IS_FOLDER}"),
    (RESUME, "dtypes.partial is a folder", 0, f"dtypes.json was not {IS_FOLDER}"),
    (f"sync theirs sweep {STORE}", "a journal whose state is a folder", 1, "2 failed"),
    (f"{RESUME[:-4]}mlflow {STORE}", "a journal whose state is a folder", 1, UNSENT),
    # Nothing is sent to a store that this user has not named.
    ("sync theirs", "a journal of a server", 1, UNNAMED),
    ("sync theirs tracking.experiment=mine", "a journal of a server", 1, UNNAMED),
    ("sync", "a journal of a server", 1, UNNAMED),
    ("report sweep", "a journal of a server", 0, ""),
    (RESUME.replace("=none", "=mlflow"), "a journal of a server", 2, "not signed with your key"),
    (f"report s {STORE}", "a database of my folder", 1, NO_PLACE),
    (f"report s {STORE}", "a database of a server", 1, NO_PLACE),
]
"""Command, what is hostile in the folders, exit status, and a part of its message."""


@pytest.fixture(scope="module")
def walk(inside, tmp_path_factory, empty_store):
    """(main, the server's socket), in a folder with a stranger's run and sweep in `originals`."""
    home = tmp_path_factory.mktemp("walk")
    with inside(home) as main, socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_DATA_HOME", str(home / "stranger"))
            assert main(*QUICK.split(), "hydra.run.dir=originals/theirs").rc == 0
            assert main(*JOBS.split(), "hydra.sweep.dir=originals/sweep").rc == 0
        Path("originals/theirs/guard").mkdir()
        Path("originals/theirs/guard/batch-000002.json").write_text(json.dumps(BATCH))
        tiny = GPT2LMHeadModel(GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0))
        tiny.save_pretrained("originals/theirs/hf")
        path = Path("originals/sweep/sweep.json")
        manifest = read_json(path)
        changes = {"command": ["python", "-m", "runner", *JOBS.split()], "finished": False}
        path.write_text(json.dumps(manifest | changes))
        shutil.copytree("originals/sweep", "other")
        Path("other/sweep.json").write_text(json.dumps(manifest | {"id": "other"}))
        shutil.rmtree("originals/sweep/1")
        empty_store(home / "empty.db")
        server.settimeout(0)
        yield main, server


def contents(folder):
    """Return the files below a folder by path."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def copy_folders(hostile, server):
    """Make `mine`, and the stranger's folders with what is hostile in them."""
    for name in ("theirs", "sweep", "outputs", "mine"):
        shutil.rmtree(name, ignore_errors=True)
    Path("mine").mkdir()
    Path("mine/file").write_text("mine")
    for name in ("theirs", "sweep"):
        shutil.copytree(Path("originals", name), name)
        HOSTILE[hostile](Path(name), f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("command", "hostile", "status", "message"),
    [pytest.param(*row, id=f"{row[0][-40:]}; {row[1]}") for row in ROWS],
)
def test_a_strangers_folder_leads_no_command_elsewhere(walk, command, hostile, status, message):
    main, server = walk
    copy_folders(hostile, server)
    before = contents("mine")
    done = main(*command.split())
    assert contents("mine") == before, done
    with pytest.raises(BlockingIOError):
        server.accept()
    assert done.rc == status, done
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    # A writer in the background would have begun its log.
    assert not Path("outputs/runs/theirs/tracking.log").exists()


@pytest.mark.parametrize(
    ("command", "hostile"),
    [
        ("ui", "a journal of a server"),
        (f"ui {STORE}", "a database of my folder"),
        (f"ui {STORE}", "a database of a server"),
    ],
)
def test_the_pages_of_a_strangers_folder_lead_nowhere(walk, start_command, command, hostile):
    _, server = walk
    copy_folders(hostile, server)
    before = contents("mine")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ui = start_command(*command.split(), f"port={port}", cwd=Path.cwd())

    def answers():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(answers, ui)
    ui.send_signal(signal.SIGINT)
    stdout, stderr = ui.communicate(timeout=SECONDS)
    assert ui.returncode == 0, (stdout, stderr)
    assert contents("mine") == before
    with pytest.raises(BlockingIOError):
        server.accept()
    assert not Path("outputs/runs/theirs/tracking.log").exists()


def test_links_of_ones_own_go_on_working(quick, tmp_path):
    """The folder of all runs, a run's and a sweep's own may be on another disk."""
    (tmp_path / "disk/run").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to("disk")
    (tmp_path / "run").symlink_to("disk/run")
    (tmp_path / "run/notes").symlink_to("/etc")  # the user's own, which no command writes
    assert quick("hydra.run.dir=run", "train.max_steps=2").rc == 0
    assert quick("checkpoint.resume=run", "train.max_steps=3").rc == 0
    assert (tmp_path / "disk/run/checkpoints/step-00000003.pt").is_file()
    assert quick("train.max_steps=2").rc == 0
    assert [*tmp_path.glob("disk/runs/*/result.json")]
