import json
import time

import pytest
from omegaconf import OmegaConf

from runner.config.invocation import Invocation
from runner.config.resolve import to_dict
from runner.modes import run_metadata
from runner.utils.files import write_json
from runner.utils.formatting import now_ms


@pytest.fixture
def fake_git(tmp_path, monkeypatch):
    """A git on the path that runs a given script; the commands here must not depend on a clone."""

    def answer(script):
        program = tmp_path / "bin" / "git"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    return answer


def test_the_config_reads_back_complete(tmp_path, compose):
    spec = compose("data=text", "model=gpt")
    path = run_metadata.write_config(tmp_path, spec)
    assert path.name == "config.yaml"
    assert OmegaConf.to_container(OmegaConf.load(path)) == to_dict(spec)


def test_json_reads_back(tmp_path):
    path = write_json(tmp_path / "some.json", [{"a": 1}])
    assert json.loads(path.read_text()) == [{"a": 1}]
    assert path.read_text().endswith("\n")


def test_the_environment_names_versions_and_the_command():
    found = run_metadata.environment_facts(Invocation(overrides=("model=vit", "seed=1")))
    assert found["command"] == ["python", "-m", "runner", "model=vit", "seed=1"]
    assert found["packages"]["torch"]
    assert found["packages"]["mlflow"]
    assert found["threads"] >= 1
    json.dumps(found)


def test_a_package_that_is_not_installed_is_none(monkeypatch):
    monkeypatch.setattr(run_metadata, "PACKAGES", ("not-installed-at-all",))
    assert run_metadata.environment_facts(Invocation())["packages"] == {
        "not-installed-at-all": None
    }


@pytest.mark.parametrize(("status", "dirty"), [("", "false"), (" M runner/modes/run.py", "true")])
def test_git_tags(tmp_path, fake_git, status, dirty):
    fake_git(f'case "$1" in rev-parse) echo abc123;; status) echo "{status}";; esac')
    assert run_metadata.git_tags(tmp_path) == {"git_commit": "abc123", "git_dirty": dirty}


@pytest.mark.parametrize("script", ["exit 128", "echo abc; [ $1 = rev-parse ]"])
def test_no_git_tags_where_git_fails(tmp_path, fake_git, script):
    fake_git(script)
    assert run_metadata.git_tags(tmp_path) == {}


def test_no_git_tags_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_metadata.git_tags(tmp_path) == {}


def test_now_is_in_milliseconds():
    assert abs(now_ms() - time.time() * 1000) < 60_000
