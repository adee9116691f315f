"""Checkpoints from strangers: nothing in them is called that is not known here, and what is not as
it should be is told in one message."""

import pickle
import shutil
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hostile import cases, ended_well
from hypothesis import given
from hypothesis import strategies as st

from runner import checkpoint
from runner.errors import ConfigError

pytestmark = pytest.mark.slow

QUICK = ("model=mlp", "model.hidden=[4]", "train.max_steps=2", "train.log_every=1",
         "tracking=none", "accelerator=cpu")  # fmt: skip
CANARY = "touched"
CALLS = {
    "os.system": {"command": f"touch {CANARY}"},
    "os.mkdir": {"path": CANARY},
    "subprocess.run": {"args": ["touch", CANARY]},
    "subprocess.check_call": {"args": ["touch", CANARY]},
    "builtins.exec": {"source": f"open('{CANARY}', 'w')"},
    "builtins.open": {"file": CANARY, "mode": "w"},
    "shutil.copy": {"src": "/etc/hostname", "dst": CANARY},
    "pathlib.Path.touch": {"self": CANARY},
    "runner.config.instantiate": {"node": {"_target_": "os.mkdir", "path": CANARY}},
    "runner.config.locate": {"path": "antigravity.geohash"},
    "runner.resume.Path": {},
    "runner.models.mlp.torch.save": {"obj": 1, "f": CANARY},
    "torch.save": {"obj": 1, "f": CANARY},
    "torch.hub.load": {"repo_or_dir": "a/b", "model": "c"},
    "torch.nn.Module.torch.os.mkdir": {"path": CANARY},
    "torchvision.models.os.mkdir": {"path": CANARY},
    "torch.utils.cpp_extension.load": {"name": "x", "sources": ["x.cpp"]},
    "mine.os.mkdir": {"path": CANARY},
    "idlelib.idle.main": {},
}
ANYTHING = (
    None, -1, 10**30, "x", "../..", [], {}, [None], {"a": {}}, 0.5, float("nan"), True, b"x",
    torch.ones(3), torch.ones(0), "\x1b[31m",
)  # fmt: skip
GROUPS = ("model", "data", "task", "precision", "optimizer", "scheduler", "adapter")
WAYS = {"resume": ("checkpoint.resume={}", "train.max_steps=3"),
        "evaluate": ("mode=evaluate", "checkpoint={}")}  # fmt: skip


@pytest.fixture(scope="module")
def made(inside, tmp_path_factory):
    """(main, what a real checkpoint holds)."""
    home = tmp_path_factory.mktemp("strangers")
    (home / "mine.py").write_text("import os\n")
    with inside(home) as main:
        assert main(*QUICK).rc == 0
        (path,) = home.glob("outputs/runs/*/checkpoints/*.pt")
        content = torch.load(path, weights_only=True)
        shutil.rmtree(home / "outputs")
        yield main, lambda: deepcopy(content)


def left(content):
    """The file of a stranger's run."""
    path = Path.cwd() / "theirs" / "checkpoints" / "step-00000002.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def used(main, way, path):
    return main(*(text.format(path) for text in WAYS[way]), "tracking=none")


def harmless():
    return {p.name for p in Path.cwd().iterdir()} <= {"mine.py", "__pycache__", "theirs", "outputs"}


@cases(30)
@given(group=st.sampled_from(GROUPS), target=st.sampled_from(sorted(CALLS)),
       way=st.sampled_from(sorted(WAYS)))  # fmt: skip
def test_no_target_of_a_strangers_is_called(made, group, target, way):
    main, content = made
    theirs = content()
    theirs["spec"][group] = {"_target_": target, **CALLS[target]}
    done = used(main, way, left(theirs))
    assert harmless()
    if way == "evaluate" and group in ("optimizer", "scheduler"):
        assert done.rc == 0, done.stderr  # it has none
        return
    assert done.rc == 2, done
    assert f"names {group}._target_={target}, which is neither the runner's own" in done.stderr


def test_nor_by_init_weights(made):
    main, content = made
    theirs = content()
    theirs["spec"]["adapter"] = {"_target_": "os.mkdir", "path": CANARY}
    done = main(*QUICK, f"init.weights={left(theirs)}")
    assert done.rc == 2
    assert "names adapter._target_=os.mkdir" in done.stderr
    assert harmless()


def test_the_environment_is_not_read_for_a_stranger(made, monkeypatch):
    main, content = made
    monkeypatch.setenv("SOME_NAME", "canary-1")
    theirs = content()
    theirs["spec"]["data"]["path"] = "${oc.env:SOME_NAME}"
    for way in WAYS:
        done = used(main, way, left(theirs))
        assert done.rc == 2
        assert "holds an interpolation" in done.stderr
        assert "canary-1" not in done.stderr


def paths_of(content, prefix=()):
    """Keys of everything in nested containers."""
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in list(items)[:40]:
            yield (*prefix, key)
            yield from paths_of(value, (*prefix, key))


@cases(25)
@given(place=st.integers(0, 10**6), way=st.sampled_from(sorted(WAYS)), number=st.integers(0, 15))
def test_anything_in_its_place(made, place, way, number):
    """One item of a checkpoint is something else, or gone."""
    main, content = made
    theirs, value = content(), ANYTHING[number]
    places = sorted(paths_of(theirs), key=str)
    *path, last = places[place % len(places)]
    holder = theirs
    for key in path:
        holder = holder[key]
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    done = used(main, way, left(theirs))
    assert harmless()
    # State of other shapes or kinds than its owner's fails in a step: status 1, with a traceback.
    owned = {"optimizers", "schedulers", "observers"} & {*path[:1]}
    if not (owned and done.rc == 1):
        ended_well(done)


@cases(60)
@given(data=st.data())
def test_bytes_that_changed_or_are_gone(made, data):
    _, content = made
    path = left(content())
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    with suppress(ConfigError):
        assert set(checkpoint.load(path)) == set(content())


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path(CANARY),)


@pytest.mark.parametrize("wrap", [
    lambda path: torch.save(Bomb(), path),
    lambda path: torch.save({"format": 1, "spec": Bomb()}, path),
    lambda path: torch.save([Bomb()], path, _use_new_zipfile_serialization=False),
    lambda path: path.write_bytes(pickle.dumps(Bomb())),
])  # fmt: skip
@pytest.mark.parametrize("typed", ["checkpoint.resume={}", "mode=evaluate checkpoint={}",
                                   "init.weights={}"])  # fmt: skip
def test_a_pickle_is_not_executed(made, wrap, typed):
    main, content = made
    path = left(content())
    wrap(path)
    done = main(*QUICK, *typed.format(path).split())
    assert done.rc == 2
    ended_well(done)
    assert harmless()
