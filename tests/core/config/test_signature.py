"""Signatures distinguish this user's configs from a stranger's."""

import hmac
import os
import stat
import threading

import pytest

from runner.config.trusted_targets import folder_config
from runner.core.base.layout import SIGNATURE
from runner.core.config import signature
from runner.core.config.signature import is_signed, key_path, sign
from runner.core.run import run_context


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def test_a_text_is_known_again_and_nothing_else_is():
    signed = sign("spec", "a text")
    assert is_signed("spec", "a text", signed)
    for purpose, text, other in [
        ("spec", "a text ", signed),
        ("store", "a text", signed),
        ("spec", "a text", signed[:-1]),
        ("spec", "a text", signed.upper()),
        ("spec", "a text", ""),
        ("spec", "a text", None),
        ("spec", "a text", 1),
        ("spec", "a text", [signed]),
        ("spec", "a text", signed.encode()),
        ("spec", "a text", "é" * 64),
        ("spec", "a text", "\ud800"),
        ("spec", "a text", "0" * 64),
        ("spec", "a text", hmac.new(b"", b"spec\0a text", "sha256").hexdigest()),
    ]:
        assert not is_signed(purpose, text, other)


def test_the_key_is_random_and_its_owners_alone(home):
    sign("spec", "x")
    path = key_path()
    assert path == home / "data" / "precision-runner" / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    first = path.read_bytes()
    path.unlink()
    sign("spec", "x")
    assert len(first) == len(path.read_bytes()) == 32
    assert first != path.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["key"]


def test_one_key_stays_where_many_are_made_at_once():
    found = []
    threads = [threading.Thread(target=lambda: found.append(sign("a", "b"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 20


def empty(path):
    path.write_bytes(b"")


def long(path):
    path.write_bytes(b"x" * 33)


def link(path):
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def folder(path):
    path.unlink()
    path.mkdir()


def readable(path):
    path.chmod(0o640)


def writable(path):
    path.chmod(0o602)


@pytest.mark.parametrize("change", [empty, long, link, pipe, folder, readable, writable])
def test_a_key_that_others_may_know_signs_and_checks_nothing(change):
    signed, path = sign("spec", "x"), key_path()
    change(path)
    assert not is_signed("spec", "x", signed)
    assert sign("spec", "x") == ""
    assert str(path) in signature.describe_key_location()


def test_without_a_home_nothing_is_signed(monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null/nowhere")
    assert sign("spec", "x") == ""
    assert not is_signed("spec", "x", "")
    assert "is not used" in signature.describe_key_location()


def test_checking_makes_no_key():
    assert not is_signed("spec", "x", "0" * 64)
    assert not key_path().parent.exists()


def test_a_config_is_taken_as_long_as_nothing_in_it_changes(compose, tmp_path):
    spec = compose("model=mlp", "tracking.uri=http://ann:secret@host:1")
    run_context.write_config(tmp_path, spec)
    config = tmp_path / "config.yaml"
    text = config.read_text()
    found = folder_config(tmp_path, "against")
    assert found.is_signed
    assert found.values["model"]["_target_"] == "runner.models.mlp.MLP"
    assert "secret" not in text
    config.write_text(text.replace("mlp.MLP", "mlp.MLp"))
    assert not folder_config(tmp_path, "against").is_signed
    run_context.write_config(tmp_path, spec, sign=False)
    assert not folder_config(tmp_path, "against").is_signed
    (tmp_path / SIGNATURE).write_text("[" * 100_000)
    assert not folder_config(tmp_path, "against").is_signed
