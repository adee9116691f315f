"""runner remove: what it deletes in folders and in a real store, and what it refuses."""

import io
import re
import shutil
import sys
from pathlib import Path

import pytest
from mlflow.entities import ViewType
from quiet_mlflow import client_of

from runner.cli.removal import _OWN_NAMES, _find, _stored_runs, remove
from runner.core.base.errors import ConfigError
from runner.core.base.files import folder_lock
from runner.core.base.layout import WRITTEN_PLACES

WORDS = "model=mlp model.hidden=[4] train.max_steps=2 hydra/launcher=basic".split()
RUN, OTHER, SWEEP = (Path("outputs", name) for name in ("runs/a", "runs/b", "sweeps/s"))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's, of SQLAlchemy


class Home:
    """A folder with a run, one that starts from its weights, and a sweep, all in one store."""

    def __init__(self, folder, main):
        self.folder, self.main = folder, main
        assert main(*WORDS, f"hydra.run.dir={RUN}").rc == 0
        later = (f"init.weights={RUN}", f"hydra.run.dir={OTHER}")
        assert main(*WORDS, "tracking=none", *later).rc == 0
        assert main(*WORDS, "-m", "seed=0,1", f"hydra.sweep.dir={SWEEP}").rc == 0
        self.client = client_of(f"sqlite:///{folder}/outputs/mlflow.db")

    @property
    def experiment(self):
        return [self.client.get_experiment_by_name("precision-runner").experiment_id]

    def active(self):
        """Return the ids of the runs that are not in the trash."""
        view = ViewType.ACTIVE_ONLY
        return {run.info.run_id for run in self.client.search_runs(self.experiment, "", view)}

    def models(self):
        return {model.source_run_id for model in self.client.search_logged_models(self.experiment)}

    def artifacts(self):
        """Return the names of the folders with artifacts of runs, and of models."""
        folder = self.folder / "outputs" / "mlartifacts"
        runs = {path.name for path in folder.iterdir()} - {"models"}
        return runs, {path.name for path in (folder / "models").iterdir()}


@pytest.fixture(scope="module")
def home(tmp_path_factory, inside, empty_store):
    folder = tmp_path_factory.mktemp("home")
    empty_store(folder / "outputs" / "mlflow.db")
    with inside(folder) as main:
        yield Home(folder, main)


def refusal(word):
    with pytest.raises(ConfigError) as caught:
        remove([str(word)], {"--yes": "--yes"})
    return str(caught.value)


def test_what_is_not_removed(home, tmp_path):
    before = home.active()
    assert len(before) == 4
    assert "it is a job of a sweep. Type outputs/sweeps/s for" in refusal(SWEEP / "0")
    link = tmp_path / "link"
    link.symlink_to(home.folder / RUN)
    for word in (link, "outputs", "conf", "0" * 32, tmp_path, "x\0"):
        assert "this is no folder of a run or a sweep" in refusal(word)
    with folder_lock(RUN):
        assert "outputs/runs/a: it runs." in refusal(RUN)
    for name in ("train.py", "src", "notes.md", "plan.txt", "scores.csv"):
        (RUN / name).mkdir()
        assert f"it also holds {name}, which no run writes" in refusal(RUN)
        (RUN / name).rmdir()
    (RUN / "out").symlink_to("/etc")
    assert "it holds a link out of it" in refusal(RUN)
    (RUN / "out").unlink()
    assert home.main("remove").rc == 2
    assert home.active() == before
    assert RUN.is_dir()


@pytest.mark.parametrize("name", WRITTEN_PLACES)
def test_every_place_that_commands_write_to_is_known(name):
    assert _OWN_NAMES.fullmatch(name)


def test_it_says_what_it_deletes_and_asks(home, monkeypatch):
    done = home.main("remove", str(RUN))
    assert done.rc == 2
    assert "(folders: 1, runs of MLflow: 1) only if you type --yes, too" in done.stderr
    what, needed = done.stdout.splitlines()
    assert what.startswith("outputs/runs/a: mlp on digits; 32-true; val/accuracy ")
    assert needed == f"  outputs/runs/b was run with init.weights='{RUN}'"
    keyboard = io.StringIO("n\n")
    keyboard.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", keyboard)
    done = home.main("remove", str(RUN))
    assert done.rc == 1
    assert done.stdout.endswith("(folders: 1, runs of MLflow: 1)? [y/N] ")
    assert RUN.is_dir()


def test_a_folder_of_a_stranger_deletes_no_run_of_the_users(home):
    copy = home.folder / "outputs" / "runs" / "c"
    shutil.copytree(RUN, copy)
    journal = copy / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    (reader, run), *_ = _stored_runs(RUN)
    lines[0] = lines[0].replace(run.tags["mlflow.runner.journal"], "0" * 32)
    journal.write_text("".join(lines))
    assert reader.artifact_folders(run).keys() >= {run.run_id}
    assert not [*_stored_runs(copy)]
    # A run that no journal is named by is of another program.
    journal.write_text("".join([re.sub('"id": "0+"', '"x": 0', lines[0]), *lines[1:]]))
    reader.client.delete_tag(run.run_id, "mlflow.runner.journal")
    assert not [*_stored_runs(copy)]
    reader.client.set_tag(run.run_id, "mlflow.runner.journal", run.tags["mlflow.runner.journal"])
    remove([str(copy)], {"--yes": "--yes"})
    assert not copy.exists()
    assert run.run_id in home.active()


def test_a_run_and_a_sweep_are_deleted_everywhere(home):
    (_, run), *_ = _stored_runs(RUN)
    assert run.run_id in home.active() & home.models() & home.artifacts()[0]
    # One by its id, although an earlier removal deleted the run in the store and was interrupted.
    reader, _ = next(_stored_runs(RUN))
    reader.delete_run(run)
    (RUN / "config.yaml").unlink()
    assert home.main("remove", run.run_id, "--yes").rc == 0
    assert not RUN.exists()
    assert run.run_id not in home.active() | home.models() | home.artifacts()[0]
    sweep = _find(str(SWEEP), [])
    assert home.main("remove", sweep.ids[-1], "--yes").rc == 0
    assert not SWEEP.exists()
    assert (home.active(), home.models()) == (set(), set())
    assert home.artifacts() == (set(), set())
    assert OTHER.is_dir()
