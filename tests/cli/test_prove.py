"""runner prove: its lines, its files, its exit status, and what it refuses."""

import json
from dataclasses import replace

import pytest

from runner.claims.catalogue import CLAIMS
from runner.claims.claim import Bound, Measurement
from runner.cli import prove as command

QUICK = ["lost-updates", "fp8-range"]


def test_claims_that_hold(main, tmp_path):
    done = main("prove", *QUICK, "--out", "here")
    assert done.rc == 0
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["ok", name] for name in QUICK]
    assert "2048; bfloat16 256 " in lines[1]
    assert " float16 2048, bfloat16 256 (" in lines[1]
    assert lines[3].startswith("2 of 2 claims hold")
    record = json.loads((tmp_path / "here" / "prove.json").read_text())
    assert record["command"] == "python -m runner prove lost-updates fp8-range --out here"
    assert record["passed"] is True
    first = record["claims"][0]
    assert (first["name"], first["passed"], first["problems"]) == ("lost-updates", True, [])
    assert first["values"] == {"float16": 2048.0, "bfloat16": 256.0}
    assert first["bounds"] == {"float16": [2048, 2048], "bfloat16": [256, 256]}
    page = (tmp_path / "here" / "prove.html").read_text()
    assert "2 of 2 claims hold" in page
    assert "arXiv:2209.05433" in page
    assert "<script" not in page


def test_a_claim_that_does_not_hold(main, tmp_path, monkeypatch):
    wrong = replace(
        CLAIMS[0],
        measure=lambda: Measurement({"float16": 1024.0, "bfloat16": 256.0}),
        bounds={"float16": Bound(2048, 2048), "bfloat16": Bound(least=0)},
    )
    monkeypatch.setattr(command, "CLAIMS", (wrong, CLAIMS[3]))
    done = main("prove")
    assert done.rc == 1
    lines = done.stdout.splitlines()
    assert lines[1].startswith("FAILED  lost-updates")
    assert lines[2].strip() == "float16 is 1024, and has to be 2048"
    assert lines[3].startswith("ok ")
    folder = tmp_path / "outputs" / "prove"
    record = json.loads((folder / "prove.json").read_text())
    assert record["passed"] is False
    assert record["claims"][0]["bounds"] == {"float16": [2048, 2048], "bfloat16": [0, None]}
    page = (folder / "prove.html").read_text()
    assert '<span class="bad">NO</span>' in page
    assert "float16 is 1024" in page


def test_the_list_measures_nothing(main, tmp_path):
    done = main("prove", "--list")
    assert done.rc == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [c.name for c in CLAIMS]
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["hopper"],
            "prove knows no claim hopper. Nearest: hopper-sums, ",
        ),
        (
            ["lost-updates", "--output=x"],
            "prove does not take --output=x. Allowed: names of claims, --out=..., --list; "
            "type prove --help.",
        ),
        (["--out"], "prove does not take --out. Allowed: "),
        (["--list=all"], "prove does not take --list=all. Allowed: "),
        (
            ["--out", "file/deep"],
            "--out=file/deep cannot be made: Not a directory. Allowed: a folder that exists or can "
            "be made. Type --out outputs/prove.",
        ),
    ],
)
def test_wrong_input(main, tmp_path, words, message):
    (tmp_path / "file").touch()
    done = main("prove", *words)
    assert done.rc == 2
    assert message in done.stderr
    assert not (tmp_path / "outputs").exists()
