"""Secrets that a run is given: it has them, and nothing that it leaves holds them."""

import gzip
import io
import json
import zipfile

import pytest
import torch
from run_folders import copy_files

ENVIRONMENT = {
    "SOME_TOKEN": "canary-env-token-1",
    "SOME_PASSWORD": "canaryenvpassword",
    "SOME_SECRET_THING": "canary/env secret+2",
    "SOME_API_KEY": "canary-env-key-3",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+secret4",
    "AWS_SESSION_TOKEN": "canary-aws-session-5",
}
OWN = (
    "data.api_key='canary key,6'",
    *(
        "--config-dir conf data=mine model=mlp model.hidden=[4] train.max_steps=2 "
        "train.log_every=1 accelerator=cpu checkpoint.safetensors=true"
    ).split(),
)


def unpacked(data):
    """What is inside archives, too."""
    yield data
    if data[:2] == b"\x1f\x8b":
        yield from unpacked(gzip.decompress(data))
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                yield from unpacked(archive.read(name))


def holders(home):
    """Files that were left and hold a canary, in archives, too."""
    return {
        str(path.relative_to(home))
        for path in (home / "outputs").rglob("*")
        if path.is_file() and any(b"canary" in part for part in unpacked(path.read_bytes()))
    }


@pytest.fixture
def home(tmp_path):
    return copy_files("secrets", tmp_path)


def shows_secret(done):
    return "canary" in done.stdout + done.stderr


def test_a_run_and_its_record(cli, home, empty_store):
    empty_store(home / "outputs" / "mlflow.db")
    uri = r"sqlite:///outputs/mlflow.db?password\=canary-uri-10"
    done = cli(
        *OWN,
        f"tracking.uri={uri}",
        "tracking.tags.hf_token=canary-tag-11",
        "tracking.run_name='u http://ann:canary-12@h x'",
        env=ENVIRONMENT,
    ).check_ok()
    assert not shows_secret(done)
    # Only from the journal can the writer know how to open the store; it is for its owner alone.
    (run,) = home.glob("outputs/runs/*")
    assert holders(home) <= {str((run / "journal.jsonl").relative_to(home))}
    start = json.loads((run / "journal.jsonl").read_text().splitlines()[0])
    assert "canary" in start.pop("uri")
    assert "canary" not in json.dumps(start["params"])
    assert (run / "journal.jsonl").stat().st_mode & 0o077 == 0


@pytest.fixture
def inside_home(main, home, monkeypatch):
    """A command inside this process, with the environment's secrets."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return lambda *typed: main(*typed, "tracking=none")


def test_a_run_that_fails_and_one_that_is_resumed(inside_home, home, monkeypatch):
    with monkeypatch.context() as failing:
        failing.setenv("FAIL", "1")
        done = inside_home(*OWN)
    assert done.rc == 1
    assert "ArithmeticError" in done.stderr
    assert not shows_secret(done)
    assert inside_home(*OWN).rc == 0
    (path,) = home.glob("outputs/runs/*/checkpoints/*.pt")
    assert torch.load(path, weights_only=True)["spec"]["data"]["api_key"] == "***"
    assert holders(home) == set()
    again = ("--config-dir", "conf", f"checkpoint.resume={path}", "train.max_steps=4")
    inside_home(*again).check_refused(
        "does not hold the secret data.api_key. Type data.api_key=<value>"
    )
    done = inside_home(*again, "data=mine", "data.api_key='canary key,6'").check_ok(
        "resumed at step 2 of 4"
    )
    assert not shows_secret(done)
    assert holders(home) == set()


@pytest.mark.slow
def test_a_sweep(cli, home):
    done = cli(*OWN, "-m", "seed=0,1", "tracking=none", "hydra.launcher.n_jobs=2", env=ENVIRONMENT)
    done.check_ok()
    assert not shows_secret(done)
    assert holders(home) == set()
    (folder,) = home.glob("outputs/sweeps/*")
    names = {path.name for path in folder.rglob("*")}
    assert {"sweep.json", "multirun.yaml", "overrides.yaml", "hydra.yaml", "report.html"} <= names
    assert "data.api_key=***" in (folder / "sweep.json").read_text()


@pytest.mark.parametrize(
    "typed",
    [
        "data.hf_token=canary-13",
        "+nosuch.password=canary-14",
        "seed=canary-env-token-1",
        "data.api_key=canary,15",
        "tracking.uri=foo://ann:canary-16@h",
        "+data.api_key='canary 17'",
    ],
)
def test_what_is_typed_wrongly(inside_home, home, typed):
    done = inside_home(*OWN, typed)
    assert done.rc
    assert not shows_secret(done), done
    assert holders(home) == set()
