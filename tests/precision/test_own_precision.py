"""A precision of the user's own: one class in a folder of his, one yaml in its config folder."""

import pytest
import torch
from run_folders import copy_files, read_json

from runner.precision import registry

CONFIGS = ("--config-dir", "conf")
DIGITS = (*CONFIGS, "data=digits", "tracking=none", "seed=0")
# Adam's eps is 0 in float16, in which a kernel that is not fused adds it to a root of 0.
DIVIDES_BY_ZERO = ("optimizer=adamw", "+optimizer.fused=false")


@pytest.fixture
def own(main, tmp_path, monkeypatch):
    """`python -m runner <args>` with a module and two yamls of the user's."""
    monkeypatch.syspath_prepend(copy_files("own_precision", tmp_path))
    return main


def in_order(text, *words):
    places = [text.index(word) for word in words]
    return places == sorted(places)


def test_doctor_lists_an_own_precision_by_its_width(own, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = own("doctor", *CONFIGS).check_ok()
    row = next(line for line in done.stdout.splitlines() if "own-half" in line)
    cells = [cell.strip() for cell in row.split("│")[1:4]]
    assert cells == ["own-half", "yes", "float16 of my own"]
    assert in_order(done.stdout, "32-true", "own-single", "16-true", "own-half", "float8")


def test_doctor_shows_why_one_does_not_load(own, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "conf" / "precision" / "own-half.yaml").write_text("name: x\n_target_: mine.No\n")
    done = own("doctor", *CONFIGS).check_ok()
    row = next(line for line in done.stdout.splitlines() if "own-half" in line)
    assert "no" in row.split("│")[2]
    assert "mine.No" in row


def test_doctor_names_a_folder_that_is_not_there(own):
    own("doctor", "--config-dir=nowhere").check_refused("--config-dir=nowhere is no folder")


def test_a_built_in_yaml_is_the_base_of_one(own, tmp_path):
    folder = tmp_path / "conf"
    (folder / "precision" / "own-16.yaml").write_text(
        "defaults:\n  - 16-mixed\n  - _self_\n\nname: own-16\nloss_scale:\n  init_scale: 256.0\n"
    )
    precision = registry.load_precision("own-16", folder)
    assert precision.name == "own-16"
    assert precision.scale(torch.device("cpu")).value == 256.0
    names = registry.precision_names(folder)
    assert names[names.index("16-mixed") :][:2] == ["16-mixed", "own-16"]


def test_the_later_of_two_bases_wins(own, tmp_path):
    folder = tmp_path / "conf"
    (folder / "precision" / "own-both.yaml").write_text(
        "defaults:\n  - 32-true\n  - bf16-true\n  - _self_\n\nname: own-both\n"
    )
    assert registry.load_precision("own-both", folder).compute is torch.bfloat16


def test_advice_for_an_own_precision_follows_from_its_dtypes(own, tmp_path):
    half, single = (
        registry.load_precision(name, tmp_path / "conf") for name in ("own-half", "own-single")
    )
    assert (half.wider_precision, half.narrower_precision) == ("bf16-mixed", "")
    assert (single.wider_precision, single.narrower_precision) == ("", "bf16-true")
    assert (half.has_limited_range, single.has_limited_range) == (True, False)
    assert half.formats == {"float16": ["activations", "weights", "gradients", "updates"]}
    assert single.formats == {}
    assert not half.converts_layers


def test_plan_shows_an_own_precision(own):
    own(*DIGITS, "model=mlp", "precision=own-half", "mode=plan").check_ok("own-half")


def test_a_failing_run_gets_the_remedy_of_its_range(own):
    done = own(*DIGITS, "model=mlp", "precision=own-half", "train.max_steps=3", *DIVIDES_BY_ZERO)
    done.check_refused("Try precision=bf16-mixed or precision.keep_fp32=[<module>]", status=1)


def test_a_sweep_reports_an_own_precision(own, tmp_path):
    words = ("model=mlp", "train.max_steps=3", "optimizer=sgd", "optimizer.lr=0.01")
    sweep = ("-m", "hydra/launcher=basic", "precision=32-true,own-half")
    own(*DIGITS, *words, *sweep).check_ok()
    (page,) = tmp_path.glob("outputs/sweeps/*/report.md")
    assert "own-half" in page.read_text()
    results = [read_json(p) for p in tmp_path.glob("outputs/sweeps/*/*/result.json")]
    assert {r["precision"] for r in results} == {"32-true", "own-half"}
    assert {r["status"] for r in results} == {"finished"}


@pytest.mark.slow
def test_advice_names_the_cause_of_its_failure(own, tmp_path):
    words = ("model=loud", "mode=advise", "precision=own-half,own-single", "optimizer=sgd")
    lengths = ("advise.steps=10", "advise.seeds=3", "advise.budget=3m")
    own(*DIGITS, *words, *lengths, "advise.objective=quality", "advise.islands=false").check_ok()
    (page,) = tmp_path.glob("outputs/sweeps/*/report.md")
    text = page.read_text()
    assert "own-half | diverged" in text
    assert "short of float16's range" in text
    assert "own-single" in text
