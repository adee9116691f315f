"""Files that another user's permissions close, and fields of a result that hold anything."""

import errno
import json
import os

import pytest
from hostile import QUICK

from runner.core.config import signature
from runner.core.record import journals as journal
from runner.core.run.run_result import RunResult


def closed(path, *_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


COMMANDS = ("sync {}", "checkpoint.resume={} train.max_steps=4 tracking=mlflow")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_journal_of_another_user_is_one_message(main, tmp_path, monkeypatch, command):
    """Tests that root runs can open any file."""
    folder = tmp_path / "run"
    assert main(*QUICK, f"hydra.run.dir={folder}").rc == 0
    (folder / "journal.jsonl").write_text('{"kind":"start","uri":"x"}\n')
    monkeypatch.setattr(journal, "read_records", closed)
    monkeypatch.setattr("runner.core.record.journals.has_live_owner", closed)
    words = [word for word in QUICK if not word.startswith("tr") and "sync" not in command]
    done = main(*command.format(folder).split(), *words)
    done.check_refused("journal.jsonl cannot be opened: Permission denied. Ask its owner")
    assert "(cp -r) and type that folder" in done.stderr


def without_links(*_, **__):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_home_without_hard_links_signs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(signature.os, "link", without_links)
    signed = signature.sign("spec", "x")
    assert signature.is_signed("spec", "x", signed)
    path = signature.key_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["key"]


def test_the_reason_of_a_key_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(signature, "_create", closed)
    assert signature.sign("spec", "x") == ""
    assert signature.describe_key_location().endswith("not used: Permission denied")


def test_a_run_that_is_not_signed_says_all_that_is_typed_again_at_once(main, tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text("from runner.models.mlp import MLP as Net\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    own = [*QUICK, "model._target_=net.Net", f"hydra.run.dir={tmp_path}/run"]
    assert main(*own).rc == 0
    signature.key_path().unlink()
    done = main(f"checkpoint.resume={tmp_path}/run", "train.max_steps=4")
    done.check_refused("type model=... yourself, and tracking.uri=<the store of its record>.")


@pytest.mark.parametrize("text", ["x", "1/y", "1/2/3", "-1/2", "²/3", "9" * 5000 + "/1", "/"])
def test_converted_weights_that_are_no_counts(tmp_path, text):
    values = {"precision": "a", "label": "a", "folder": "a", "converted": "3/4"}
    (tmp_path / "result.json").write_text(json.dumps({**values, "converted_weights": text}))
    assert RunResult.read(tmp_path).converted_share == "3/4"
    (tmp_path / "result.json").write_text(json.dumps({**values, "converted_weights": "1/2"}))
    assert RunResult.read(tmp_path).converted_share == "50 % of weights"
