import json

import pytest
import torch
from omegaconf import OmegaConf

from runner.core.config.invocation import Invocation
from runner.core.run import run_context


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
    path = run_context.write_config(tmp_path, spec)
    assert path.name == "config.yaml"
    assert OmegaConf.to_container(OmegaConf.load(path)) == spec.to_dict()


def test_the_environment_names_versions_and_the_command(monkeypatch):
    monkeypatch.setattr(run_context, "PACKAGES", ("torch", "mlflow", "not-installed-at-all"))
    found = run_context.environment_facts(Invocation(overrides=("model=vit", "seed=1")))
    assert found["command"] == ["python", "-m", "runner", "model=vit", "seed=1"]
    versions = found["packages"]
    assert torch.__version__.startswith(versions["torch"])
    assert versions["mlflow"]
    assert versions["not-installed-at-all"] is None
    assert found["threads"] >= 1
    json.dumps(found)


@pytest.mark.parametrize(
    ("status", "dirty"), [("", "false"), (" M runner/core/run/run.py", "true")]
)
def test_git_tags(tmp_path, fake_git, status, dirty):
    fake_git(f'case "$1" in rev-parse) echo abc123;; status) echo "{status}";; esac')
    assert run_context.git_tags(tmp_path) == {"git_commit": "abc123", "git_dirty": dirty}


@pytest.mark.parametrize("script", ["exit 128", "echo abc; [ $1 = rev-parse ]", None])
def test_no_git_tags_where_git_fails_or_is_missing(tmp_path, fake_git, monkeypatch, script):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        fake_git(script)
    assert run_context.git_tags(tmp_path) == {}
