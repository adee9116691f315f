"""Checkpoints from strangers: nothing in them is called that is not known here, and what is not as
it should be is told in one message."""

import hashlib
import hmac
import pickle
import re
import shutil
import sys
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hostile import QUICK, cases, ended_well
from hypothesis import given
from hypothesis import strategies as st
from tiers import counts

from runner.core.base.errors import ConfigError
from runner.core.base.layout import SIGNATURE
from runner.core.config import signature
from runner.core.record import checkpoint_file

pytestmark = pytest.mark.slow

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
    "runner.core.config.targets.instantiate": {"node": {"_target_": "os.mkdir", "path": CANARY}},
    "runner.core.config.targets.locate": {"path": "antigravity.geohash"},
    "runner.modes.saved_run.Path": {},
    "runner.models.mlp.torch.save": {"obj": 1, "f": CANARY},
    "torch.save": {"obj": 1, "f": CANARY},
    "torch.hub.load": {"repo_or_dir": "a/b", "model": "c"},
    "torch.nn.Module.torch.os.mkdir": {"path": CANARY},
    "torchvision.models.os.mkdir": {"path": CANARY},
    "torch.utils.cpp_extension.load": {"name": "x", "sources": ["x.cpp"]},
    "mine.os.mkdir": {"path": CANARY},
    "idlelib.idle.main": {},
    "builtins.eval": {"source": f"open('{CANARY}', 'w')"},
    "pickle.loads": {"data": "x"},
    "torch.load": {"f": CANARY, "weights_only": False},
    "subprocess.Popen": {"args": ["touch", CANARY]},
    "importlib.import_module": {"name": "antigravity"},
    "runpy.run_path": {"path_name": "evil.py"},
    "hydra.utils.instantiate": {"config": {"_target_": "os.mkdir", "path": CANARY}},
    "timm.create_model": {"model_name": CANARY},
}
PLAIN = (None, -1, 10**30, "x", "../..", [], {}, [None], {"a": {}}, 0.5, float("nan"), True, b"x")
ANYTHING = (*PLAIN, torch.ones(3), torch.ones(0), "\x1b[31m")
GROUPS = ("model", "data", "task", "precision", "optimizer", "scheduler", "adapter")
WAYS = {
    "resume": ("checkpoint.resume={}", "train.max_steps=3"),
    "evaluate": ("mode=evaluate", "checkpoint={}"),
}


@pytest.fixture(scope="module")
def stranger(inside, tmp_path_factory):
    """(main, what a real checkpoint holds)."""
    home = tmp_path_factory.mktemp("strangers")
    (home / "mine.py").write_text("import os\n")
    with inside(home) as main:
        assert main(*QUICK).rc == 0
        (path,) = home.glob("outputs/runs/*/checkpoints/*.pt")
        content = torch.load(path, weights_only=True)
        shutil.rmtree(home / "outputs")
        yield main, lambda: deepcopy(content)


def write_checkpoint(content):
    """Write the checkpoint of a stranger's run and return its path."""
    path = Path.cwd() / "theirs" / "checkpoints" / "step-00000002.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def load_by(main, way, path):
    return main(*(text.format(path) for text in WAYS[way]), "tracking=none")


def nothing_was_called():
    return {p.name for p in Path.cwd().iterdir()} <= {"mine.py", "__pycache__", "theirs", "outputs"}


@counts(8, 30)
def test_no_target_of_a_strangers_is_called(stranger, count):
    main, content = stranger

    @cases(count)
    @given(st.sampled_from(GROUPS), st.sampled_from(sorted(CALLS)), st.sampled_from(sorted(WAYS)))
    def check(group, target, way):
        theirs = content()
        theirs["spec"][group] = {"_target_": target, **CALLS[target]}
        done = load_by(main, way, write_checkpoint(theirs))
        assert nothing_was_called()
        if way == "evaluate" and group in ("optimizer", "scheduler"):
            assert done.rc == 0, done.stderr  # it has none
            return
        said = f"names {group}._target_={target}, which is neither the runner's own"
        done.check_refused(said)

    check()


def test_nor_by_init_weights(stranger):
    main, content = stranger
    theirs = content()
    theirs["spec"]["adapter"] = {"_target_": "os.mkdir", "path": CANARY}
    done = main(*QUICK, f"init.weights={write_checkpoint(theirs)}")
    done.check_refused("names adapter._target_=os.mkdir")
    assert nothing_was_called()


def test_the_environment_is_not_read_for_a_stranger(stranger, monkeypatch):
    main, content = stranger
    monkeypatch.setenv("SOME_NAME", "canary-1")
    theirs = content()
    theirs["spec"]["data"]["path"] = "${oc.env:SOME_NAME}"
    for way in WAYS:
        done = load_by(main, way, write_checkpoint(theirs)).check_refused("holds an interpolation")
        assert "canary-1" not in done.stderr


def paths_of(content, prefix=()):
    """Keys of everything in nested containers."""
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in list(items)[:40]:
            yield (*prefix, key)
            yield from paths_of(value, (*prefix, key))


@counts(6, 25)
def test_anything_in_its_place(stranger, count):
    """One item of a checkpoint is something else, or missing."""
    main, content = stranger

    @cases(count)
    @given(st.integers(0, 10**6), st.sampled_from(sorted(WAYS)), st.sampled_from(ANYTHING))
    def check(place, way, value):
        theirs = content()
        places = sorted(paths_of(theirs), key=str)
        *path, last = places[place % len(places)]
        holder = theirs
        for key in path:
            holder = holder[key]
        if value is None:
            del holder[last]
        else:
            holder[last] = value
        done = load_by(main, way, write_checkpoint(theirs))
        assert nothing_was_called()
        # State of other shapes or kinds than its owner's fails in a step, with a traceback.
        owned = {"optimizers", "schedulers", "callbacks"} & {*path[:1]}
        if not (owned and done.rc == 1):
            ended_well(done)

    check()


@cases(60)
@given(data=st.data())
def test_bytes_that_changed_or_are_gone(stranger, data):
    _, content = stranger
    path = write_checkpoint(content())
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    with suppress(ConfigError):
        assert set(checkpoint_file.load(path)) == set(content())


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path(CANARY),)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda path: torch.save(Bomb(), path),
        lambda path: torch.save({"format": 2, "spec": Bomb()}, path),
        lambda path: torch.save([Bomb()], path, _use_new_zipfile_serialization=False),
        lambda path: path.write_bytes(pickle.dumps(Bomb())),
    ],
)
@pytest.mark.parametrize(
    "typed", ["checkpoint.resume={}", "mode=evaluate checkpoint={}", "init.weights={}"]
)
def test_a_pickle_is_not_executed(stranger, wrap, typed):
    main, content = stranger
    path = write_checkpoint(content())
    wrap(path)
    done = main(*QUICK, *typed.format(path).split()).check_refused()
    ended_well(done)
    assert nothing_was_called()


# Files that pretend to be one's own


FORGERIES = {
    "as it was": lambda content: content["signature"],
    "none": lambda content: None,
    "another user's": lambda content: hmac_of(b"k" * 32, content),
    "without a key": lambda content: hmac_of(b"", content),
    "of zeros": lambda content: hmac_of(bytes(32), content),
    "a hash": lambda content: hashlib.sha256(repr(content["spec"]).encode()).hexdigest(),
    "of the config": lambda content: signature.sign("config.yaml", repr(content["spec"])),
    "of a store": lambda content: signature.sign("store", repr(content["spec"])),
    "something else": lambda content: {"signature": [1, torch.ones(1)]},
    "long": lambda content: "é" * 10**6,
}


def hmac_of(key, content):
    return hmac.new(key, f"spec\0{content['spec']!r}".encode(), "sha256").hexdigest()


def nested(group, call, depth):
    """A node of a group in which the call stands as deep as asked."""
    for _ in range(depth):
        call = (
            {"_target_": "mine.Net", "argument": [{"deeper": call}]}
            if depth % 2
            else {"part": call, "_target_": "runner.models.mlp.MLP"}
        )
    return call


@pytest.mark.parametrize("forgery", FORGERIES)
@counts(1, 3)
def test_no_forged_signature_has_a_target_called(stranger, forgery, count):
    """Other targets with each, nested up to three deep, by both commands."""
    main, content = stranger
    calls = sorted(CALLS.items()) * 2
    first = 3 * [*FORGERIES].index(forgery)
    for number, (target, arguments) in enumerate(calls[first : first + count], first):
        theirs = content()
        assert checkpoint_file.is_signed_by_user(theirs)  # before it was changed
        group, way = GROUPS[number % 5], ("resume", "evaluate")[number // 5 % 2]
        if way == "evaluate" and group in ("optimizer", "scheduler"):
            group = "model"
        theirs["spec"][group] = nested(group, {"_target_": target, **arguments}, number % 4)
        theirs["signature"] = FORGERIES[forgery](theirs)
        done = load_by(main, way, write_checkpoint(theirs))
        assert nothing_was_called(), (target, forgery)
        done.check_refused("not signed with your key")
        said = rf"names {group}[\w.\[\]]*\._target_={re.escape(target)}"
        assert re.search(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["strategy"].update({"_target_": "idlelib.idle.main"}),
        lambda spec: spec.update(tracking={"_target_": "os.mkdir", "path": CANARY}),
        lambda spec: spec["train"].update({"_target_": "os.mkdir", "path": CANARY}),
        lambda spec: spec.update(launcher={"_target_": "os.mkdir", "path": CANARY}),
        lambda spec: spec["checkpoint"].update({"_target_": "os.mkdir", "path": CANARY}),
    ],
)
def test_nor_one_outside_the_groups(stranger, change):
    main, content = stranger
    theirs = content()
    change(theirs["spec"])
    for way in WAYS:
        ended_well(load_by(main, way, write_checkpoint(theirs)))
        assert nothing_was_called()
    assert "idlelib" not in sys.modules


def test_a_folder_brings_no_proof_of_its_own(stranger):
    """A hostile checkpoint next to the config, journal and signatures of one's own run."""
    main, content = stranger
    assert main(*QUICK).rc == 0
    own = max(Path.cwd().glob("outputs/runs/*/checkpoints")).parent
    whole = {p.name: p.read_bytes() for p in own.iterdir() if p.is_file()}
    theirs = content()
    theirs["spec"]["model"] = {"_target_": "os.mkdir", "path": CANARY}
    path = write_checkpoint(theirs)
    for name, text in whole.items():
        (path.parents[1] / name).write_bytes(text)
    (path.parents[1] / "key").write_bytes(b"k" * 32)
    for way in WAYS:
        done = load_by(main, way, path)
        assert (done.rc, nothing_was_called()) == (2, True)
    linked = path.with_name("step-00000009.pt")
    linked.symlink_to(path)
    assert load_by(main, "resume", linked).rc == 2
    assert nothing_was_called()
    shutil.rmtree(path.parents[1])
    shutil.rmtree(Path.cwd() / "outputs")


@counts(6, len(CALLS))
def test_a_replay_calls_nothing_of_a_hostile_config(stranger, compose, count, monkeypatch):
    """debug=replay reads the config in the folder of the batch."""
    from types import SimpleNamespace

    from runner.core.config.invocation import Invocation
    from runner.core.run import run_context
    from runner.core.run.run_context import PlannedRun
    from runner.modes import replay

    batch_of_run = SimpleNamespace(names={})
    monkeypatch.setattr(replay.saved_batch, "read_saved_batch", lambda path: batch_of_run)
    folder = Path.cwd() / "theirs"
    spec = compose("model=mlp", "tracking=none")
    calls = sorted(CALLS.items())
    for number, (target, arguments) in enumerate(calls[:count]):
        group = ("model", "data", "task", "precision", "optimizer")[number % 5]
        hostile = replace(spec, **{group: {"_target_": target, **arguments}})
        run_context.write_config(folder, spec)  # one's own signature, of another text
        kept = (folder / SIGNATURE).read_text()
        run_context.write_config(folder, hostile, sign=False)
        (folder / SIGNATURE).write_text(kept)
        batch = folder / "guard" / "batch-000001.json"
        with pytest.raises(ConfigError, match=f"names {group}._target_={target}"):
            replay.plan_replay(
                PlannedRun(folder, None, spec.with_value("batch", str(batch)), Invocation())
            )
        assert nothing_was_called()
    shutil.rmtree(folder)
