"""What commands do with a stranger's folder: the table of docs/reliability.md.

`theirs` is a run and `sweep` a sweep, made with another user's key, below the working directory.
After each command the files in `mine`, to which their links lead, are what they were, and nobody
has asked the server that their journals and databases name.
"""

import json
import shutil
import socket
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from runner.tracking.journal import Journal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mlflow's imports, not ours
    from mlflow import MlflowClient

pytestmark = pytest.mark.slow

QUICK = (
    "model=mlp model.hidden=[4] train.max_steps=2 train.log_every=1 accelerator=cpu tracking=none"
)
JOBS = f"-m {QUICK} seed=0,1 hydra/launcher=basic"
RESUME = "checkpoint.resume=theirs train.max_steps=3 tracking=none"
WRITTEN = """.partial config.partial dtypes.json dtypes.partial environment.partial error.txt
    history.npz history.partial journal.spare journal.state log.txt loss_scale.png metrics.jsonl
    model.safetensors numerics.html numerics.json numerics.partial numerics.png result.json
    result.partial report.csv report.html report.json report.md report.partial report.png
    signature.partial sweep.partial tracking.log""".split()
"""Files of a run or a sweep that commands write, and the drafts of those that they replace."""
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


def name_server(folder, server):
    """Write a journal whose store is the server, and a run with one below outputs/."""
    for place in (folder, Path("outputs/runs/theirs")):
        if not (place / "journal.jsonl").exists():
            journal = Journal(place)
            facts = {"sweep": None, "role": "run", "tags": {}, "params": {}, "experiment": "x"}
            journal.append("start", id="i", name="n", time=0, uri=server, continues=None, **facts)
            journal.append_end(status="FINISHED", error=None, time=0)
            journal.close()


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


HOSTILE = {
    "links in files' places": link_files,
    **{f"{name}/ is a link": linked(name, "mine") for name in FOLDERS},
    "0/ is a link": linked("0", "mine"),
    "0/.hydra/ holds a link": linked("0/.hydra/config.yaml", "mine/file"),
    "model/ holds a link": linked("model/model.pt2", "mine/file"),
    "checkpoints/ holds a link": linked("checkpoints/step-00000003.partial", "mine/file"),
    "Hydra's file is a link": linked("multirun.yaml", "mine/file"),
    "a journal of a server": name_server,
    "a database of my folder": database("{mine}"),
    "a database of a server": database("{server}/art"),
}
"""What is done to both folders, by name: functions of the folder and the server's address."""
OUT = "through a link. Delete the link"
UNNAMED = "which is neither signed with your key"
NO_PLACE = "which is no place of MLflow's"
STORE = "tracking.uri=sqlite:///theirs.db"
ROWS = [
    # A link in the place of a file is replaced by a file.
    (f"{RESUME} checkpoint.best=true", "links in files' places", 0, ""),
    (f"{RESUME} checkpoint.safetensors=true numerics.every=1", "links in files' places", 0, ""),
    (f"{QUICK} hydra.run.dir=theirs", "links in files' places", 0, ""),
    ("mode=evaluate checkpoint=theirs tracking=none", "links in files' places", 0, ""),
    (f"{QUICK} init.weights=theirs", "links in files' places", 0, ""),
    (f"{QUICK} mode=diff precision=bf16-mixed against=theirs", "links in files' places", 0, ""),
    ("report sweep", "links in files' places", 0, ""),
    ("report sweep other --out sweep", "links in files' places", 0, ""),
    (f"{JOBS} sweep.resume=sweep", "links in files' places", 0, ""),
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
        path = Path("originals/sweep/sweep.json")
        manifest = json.loads(path.read_text())
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


@pytest.mark.parametrize(
    ("command", "hostile", "status", "message"),
    [pytest.param(*row, id=f"{row[0][-40:]}; {row[1]}") for row in ROWS],
)
def test_a_strangers_folder_leads_no_command_elsewhere(walk, command, hostile, status, message):
    main, server = walk
    for name in ("theirs", "sweep", "outputs", "mine"):
        shutil.rmtree(name, ignore_errors=True)
    Path("mine").mkdir()
    Path("mine/file").write_text("mine")
    for name in ("theirs", "sweep"):
        shutil.copytree(Path("originals", name), name)
        HOSTILE[hostile](Path(name), f"http://127.0.0.1:{server.getsockname()[1]}")
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
