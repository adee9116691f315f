"""A model, data and configs of one's own, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUNNER = Path(sys.executable).with_name("runner")
needs_script = pytest.mark.skipif(
    not RUNNER.exists(), reason="the console script `runner` is not installed"
)


def script(*args, root, cwd, **env):
    return subprocess.run(
        [str(RUNNER), *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_model_and_data_of_ones_own(own, lab, result):
    done = own("data=mine", "precision=16-mixed", "precision.keep_fp32=[head]")
    assert done.rc == 0, done.stderr
    assert "16-mixed net mine" in done.stdout
    assert result(lab)["step_ms"] > 0


def test_a_model_of_ones_own_with_built_in_data(own):
    assert own("data=digits", "precision=bf16-true").rc == 0


def test_a_built_in_model_with_data_of_ones_own(main, lab):
    done = main(
        "--config-dir", "lab/conf", "data=mine", "model=mlp", "train.max_steps=2", "tracking=none"
    )
    assert done.rc == 0, done.stderr


def test_without_a_config_of_its_own(main, lab):
    done = main(
        "model._target_=lab.nets.Net",
        "~model.hidden",
        "~model.input_shape",
        "model=mlp",
        "train.max_steps=2",
        "tracking=none",
    )
    assert done.rc == 0, done.stderr
    assert "mlp" in done.stdout


def test_from_a_checkpoint(own, main, lab, result):
    assert own("data=mine").rc == 0
    trained = result(lab)
    done = main("mode=evaluate", f"checkpoint={trained['folder']}", "tracking=none")
    assert done.rc == 0, done.stderr
    assert result(lab)["metrics"] == trained["metrics"]
    assert "32-true net mine" in done.stdout  # not what the command's defaults would name


def test_from_a_checkpoint_whose_code_is_away(own, main, lab, result):
    assert own("data=mine").rc == 0
    (lab / "lab" / "nets.py").rename(lab / "lab" / "nets_.py")
    for name in ("lab", "lab.nets"):
        del sys.modules[name]
    done = main("mode=evaluate", f"checkpoint={result(lab)['folder']}", "tracking=none")
    assert done.rc == 2
    assert "lab.nets.Net does not import" in done.stderr


def test_a_checkpoint_in_a_folder_with_an_odd_name(own, main, lab, result):
    assert own().rc == 0
    odd = lab / "lr=0.1, (best)"
    Path(result(lab)["folder"]).rename(odd)
    done = main("mode=evaluate", f"checkpoint={odd}", "tracking=none")
    assert done.rc == 0, done.stderr


def test_help_shows_ones_own_configs(main, lab):
    text = main("--config-dir", "lab/conf", "--help").stdout
    assert "net" in text
    assert "mine" in text


def test_the_model_is_trained_not_copied(own, lab, result):
    """The weights of a checkpoint differ from the seeded ones."""
    assert own("train.max_steps=1").rc == 0
    assert own("train.max_steps=5").rc == 0
    weights = [
        torch.load(path, weights_only=True)["model"]["head.weight"]
        for path in sorted(lab.glob("outputs/runs/*/checkpoints/*.pt"))
    ]
    assert len(weights) == 2
    assert not torch.equal(*weights)


@needs_script
def test_the_console_script_finds_code_in_the_working_directory(lab, root):
    done = script(
        "--config-dir",
        "lab/conf",
        "model=net",
        "data=mine",
        "train.max_steps=2",
        "tracking=none",
        root=root,
        cwd=lab,
    )
    assert done.returncode == 0, done.stderr
    assert "32-true net mine  finished" in done.stdout


@needs_script
def test_tab_completion(lab, root):
    def offered(line, *args):
        done = script(
            *args,
            "-sc",
            "query=bash",
            root=root,
            cwd=lab,
            COMP_LINE=f"runner {line}",
            COMP_POINT=str(len(f"runner {line}")),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert offered("model=") == [
        f"model={p.stem}" for p in sorted((root / "conf" / "model").glob("*.yaml"))
    ]
    assert offered("train.max_st") == ["train.max_steps="]
