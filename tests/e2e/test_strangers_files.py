"""Files from elsewhere that name code: each way of reading them back imports and calls nothing.

A stranger's run lies below the working directory, from where its code could be imported. Every
line of it that is executed touches a canary file.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hostile import QUICK
from safetensors import safe_open
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

CANARY = "touched"
EVIL = f"""from pathlib import Path
Path({CANARY!r}).touch()
from torch import nn
class Net(nn.Module): pass
def call(*args, **kwargs): pass
"""
BATCH = (
    '{"why": "a test", "steps": [2, 2], "micro_batches": [[0, 1]], "loss_scale": null, "begun": 0, '
    '"precision": "32-true", "model": "mlp", "data": "digits", "seed": 0}'
)
HOSTILE = {
    "a module in the folder": {"model": {"_target_": "theirs.evil.Net"}},
    "a module in a package": {"model": {"_target_": "theirs.pack.evil.Net"}},
    "one below outputs": {"model": {"_target_": "outputs.runs.now.evil.Net"}},
    "one of Python": {"model": {"_target_": "os.system", "command": f"touch {CANARY}"}},
    "a precision": {"precision": {"_target_": "theirs.evil.Net", "name": "32-true"}},
    "a nested precision": {"precision": {"name": "x", "part": [{"_target_": "theirs.evil.Net"}]}},
    "a schedule": {"scheduler": {"_target_": "theirs.evil.call"}},
    "an optimizer": {"optimizer": {"one": {"_target_": "theirs.evil.call", "match": "*"}}},
    "an adapter": {"adapter": {"_target_": "theirs.evil.Net"}},
    "a data set": {"data": {"_target_": "theirs.evil.call"}},
    "a collate": {"data": {"collate": "theirs.evil.call"}},
    "a sampler": {"data": {"sampler": {"_target_": "theirs.evil.call"}}},
    "a loss": {"task": {"loss": "theirs.evil.call"}},
    "a metric": {"task": {"metrics": {"mine": "theirs.evil.Net"}}},
    "a hook": {"task": {"after_evaluation": "theirs.evil.call"}},
    "a callback": {"callbacks": {"mine": {"_target_": "theirs.evil.Net"}}},
}
WAYS = {
    "resume": ("checkpoint.resume=theirs", "train.max_steps=3"),
    "evaluate": ("mode=evaluate", "checkpoint=theirs", "tracking=none"),
    "diff": (*QUICK, "mode=diff", "against=theirs"),
    "diff of a precision": (*QUICK, "mode=diff", "precision=bf16-mixed", "against=theirs"),
    "replay": ("debug=replay", "batch=theirs/guard/batch-000002.json", "tracking=none"),
    "replay of all": (
        *(*QUICK, "debug=replay", "batch=theirs/guard/batch-000002.json"),
        *("optimizer=adamw", "scheduler=cosine", "precision=32-true", "data=digits"),
    ),
    "weights": (*QUICK, "init.weights=theirs/checkpoints/step-00000002.pt"),
}
UNREAD = {"evaluate": ("optimizer", "scheduler", "callbacks"), "weights": None}
"""Groups that a way does not take from the file; weights bring their adapter alone."""
FEW = ("a module in the folder", "one of Python", "a precision", "an adapter", "a hook")
"""What each way meets; resume reads all groups, and meets everything."""
CASES = [pytest.param(way, HOSTILE if way == "resume" else FEW, id=way) for way in WAYS]
MORE_CASES = [
    pytest.param(way, HOSTILE.keys() - FEW, id=f"{way}, more", marks=pytest.mark.extended)
    for way in WAYS
    if way != "resume"
]


@pytest.fixture(scope="module")
def stranger(inside, tmp_path_factory):
    """(main, a function that writes a stranger's run with some settings)."""
    home = tmp_path_factory.mktemp("strangers")
    with inside(home) as main:
        assert main(*QUICK).rc == 0
        (run,) = home.glob("outputs/runs/*")
        original = home.parent / f"{home.name}-run"
        run.rename(original)

        def write(changes):
            (home / CANARY).unlink(missing_ok=True)
            for name in ("theirs", "outputs"):
                shutil.rmtree(home / name, ignore_errors=True)
            folder = home / "theirs"
            shutil.copytree(original, folder)
            for place in ("theirs/evil.py", "theirs/pack/evil.py", "outputs/runs/now/evil.py"):
                path = home / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(EVIL)
            (folder / "pack" / "__init__.py").write_text(EVIL)
            (path,) = folder.glob("checkpoints/*.pt")
            content = torch.load(path, weights_only=True)
            config = yaml.safe_load((folder / "config.yaml").read_text())
            for spec in (content["spec"], config):
                for group, node in changes.items():
                    spec[group] = {**(spec[group] or {}), **node}
            torch.save(content, path)
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            (folder / "guard").mkdir()
            (folder / "guard" / "batch-000002.json").write_text(BATCH)

        yield main, write


@pytest.mark.parametrize(("way", "names"), [*CASES, *MORE_CASES])
def test_what_a_strangers_run_names_is_not_called(stranger, way, names):
    main, write = stranger
    for name in names:
        changes = HOSTILE[name]
        write(changes)
        done = main(*WAYS[way])
        assert not Path(CANARY).exists(), (name, done)
        (group,) = changes
        unread = UNREAD.get(way, ())
        if group != "adapter" if unread is None else group in unread:
            continue
        done.check_refused(
            f"names {group}", "which is neither the runner's own nor torch's: it is not called"
        )


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith(("diff", "replay"))])
def test_no_spelling_of_an_interpolation_is_resolved(stranger, way, monkeypatch):
    main, write = stranger
    monkeypatch.setenv("SOME_NAME", "canary-1")
    for dollar in ("$", "\\x24", "\\u0024"):
        text = f'"{dollar}{{oc.env:SOME_NAME}}"'
        write({})
        path = Path("theirs/config.yaml")
        path.write_text(path.read_text().replace("vars: {}", f"vars:\n  x: {text}"))
        assert text in path.read_text()
        done = main(*WAYS[way]).check_refused(
            "holds an interpolation, which would be resolved here"
        )
        assert "canary-1" not in done.stdout + done.stderr


SWEEP = ["python", "-m", "runner", "-m", *QUICK, "seed=0,1", "hydra/launcher=basic"]
COMMANDS = {
    "a call": [*SWEEP, "~model", f"+model={{_target_: os.system, command: 'touch {CANARY}'}}"],
    "an import": [*SWEEP, "model._target_=theirs.evil.Net"],
    "a folder of configs": [*SWEEP, "--config-dir", "theirs/conf"],
    "the environment": [*SWEEP, "tracking.run_name=${oc.env:HOME}"],
    "nothing else": SWEEP,
}


def write_sweep(command, **more):
    """Write a stranger's sweep of a command into the working directory."""
    folder = Path("outputs/sweeps/theirs")
    folder.mkdir(parents=True)
    manifest = {"id": "x", "command": command, "cwd": str(Path.cwd()), **more}
    (folder / "sweep.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("signature", ["", "0" * 64])
def test_a_strangers_sweep_is_not_resumed(stranger, name, signature):
    main, write = stranger
    write({})
    folder = write_sweep(COMMANDS[name], signature=signature)
    for typed in ("sweep.resume=last", f"sweep.resume={folder}"):
        main(typed).check_refused(
            "the sweep's command is not signed with your key", "If you trust it, type it"
        )
        assert not Path(CANARY).exists()
        assert not [*folder.glob("0")]


def test_a_sweep_whose_command_is_typed_is_resumed(stranger):
    main, write = stranger
    write({})
    folder = write_sweep(SWEEP)
    main(*SWEEP[3:], f"sweep.resume={folder}").check_ok()
    assert len([*folder.glob("*/result.json")]) == 2
    assert main("sweep.resume=last").rc == 2  # finished
    assert main(f"sweep.resume={folder}").rc == 2  # a stranger's command stays one


@pytest.mark.parametrize("command", ["report", "load"])
def test_reports_call_nothing(stranger, command):
    main, write = stranger
    write(HOSTILE["a module in the folder"])
    folder = write_sweep(COMMANDS["a call"])
    shutil.copytree("theirs", folder / "0")
    if command == "report":
        main("report", str(folder))
    else:
        import runner

        runner.load("theirs")
    assert not Path(CANARY).exists()


def test_a_strangers_dump_brings_plain_values_alone(stranger, monkeypatch):
    main, write = stranger
    write({})
    monkeypatch.setenv("SOME_NAME", "canary-1")
    assert main(*QUICK, "mode=diff", "diff.dump=true").rc == 0
    (path,) = Path("outputs").rglob("diff-*.safetensors")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    precision = json.loads(metadata["precision"])
    for change, status in (
        ({"_target_": "theirs.evil.Net"}, 0),
        ({"keep_fp32": ["${oc.env:SOME_NAME}"]}, 2),
    ):
        save_file(tensors, path, {**metadata, "precision": json.dumps({**precision, **change})})
        done = main(*QUICK, "mode=diff", "precision=bf16-mixed", f"against={path}")
        assert done.rc == status, done
        assert not Path(CANARY).exists()
        assert "canary-1" not in done.stdout + done.stderr
    assert "holds an interpolation, which would be resolved here" in done.stderr
