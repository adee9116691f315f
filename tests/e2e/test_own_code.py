"""A model, data and configs of one's own, from any folder."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner.core import Mode

RUNNER = Path(sys.executable).with_name("runner")
OWN = "--config-dir lab/conf model=net data=mine train.max_steps=3 tracking=none"
EVALUATE = ("mode=evaluate", "tracking=none")


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (f"{OWN} precision=16-mixed precision.keep_fp32=[head]", "16-mixed net mine"),
        (f"{OWN} data=digits precision=bf16-true", "bf16-true net digits"),
        (f"{OWN} model=mlp", "32-true mlp mine"),
        (
            "model=mlp model._target_=lab.nets.Net ~model.hidden ~model.input_shape "
            "train.max_steps=3 tracking=none",
            "32-true mlp digits",
        ),
    ],
    ids=["both", "built-in data", "a built-in model", "no config"],
)
def test_own_code_trains(main, lab, result, typed, names):
    main(*typed.split()).check_ok(names)
    assert result(lab)["step_ms"] > 0


@pytest.fixture
def folder(copy_of_run):
    """The folder of a run with a checkpoint of each step, beside code of one's own."""
    return copy_of_run(*OWN.split(), "checkpoint.every_steps=1", "checkpoint.keep=9")


def test_a_checkpoint_is_evaluated_with_own_code(folder, main, tmp_path, result):
    trained = result(tmp_path)["metrics"]
    done = main(*EVALUATE, f"checkpoint={folder}").check_ok()
    assert result(tmp_path)["metrics"] == trained
    assert "32-true net mine" in done.stdout  # not what the command's defaults would name


def test_a_checkpoint_whose_code_is_away(folder, main, tmp_path):
    (tmp_path / "lab" / "nets.py").unlink()
    main(*EVALUATE, f"checkpoint={folder}").check_refused("lab.nets.Net does not import")


def test_a_checkpoint_in_a_folder_with_an_odd_name(folder, main, tmp_path):
    odd = folder.rename(tmp_path / "lr=0.1, (best)")
    main(*EVALUATE, f"checkpoint={odd}").check_ok()


def test_the_model_is_trained_not_copied(folder):
    """The weights of the last checkpoint differ from those of the first."""
    first, *_, last = (
        torch.load(path, weights_only=True)["model"]["head.weight"]
        for path in sorted(folder.glob("checkpoints/step-*.pt"))
    )
    assert not torch.equal(first, last)


def test_help_shows_ones_own_configs(main, lab):
    text = main("--config-dir", "lab/conf", "--help").stdout
    assert "net" in text
    assert "mine" in text


@pytest.mark.skipif(not RUNNER.exists(), reason="the console script `runner` is not installed")
def test_the_console_script_finds_code_in_the_working_directory(lab, clean):
    command = [str(RUNNER), *OWN.split()]
    done = subprocess.run(command, cwd=lab, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "32-true net mine  finished" in done.stdout


def test_tab_completion(main, root, monkeypatch):
    def offered(line):
        monkeypatch.setenv("COMP_LINE", f"runner {line}")
        monkeypatch.setenv("COMP_POINT", str(len(f"runner {line}")))
        done = main("-sc", "query=bash").check_ok()
        return done.stdout.split()

    models = sorted((root / "conf" / "model").glob("*.yaml"))
    assert offered("model=") == [f"model={path.stem}" for path in models]
    assert offered("train.max_st") == ["train.max_steps="]
    assert offered("doc") == ["doctor"]
    assert offered("seed=1 doc") == []
    assert set(offered("mode=")) == {f"mode={mode}" for mode in Mode.all()}
    assert offered("mode=e") == ["mode=evaluate", "mode=explain"]
