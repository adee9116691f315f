"""Commands and yamls of docs/training.md, which run as they stand there."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from run_folders import job_results

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
COMMANDS = re.findall(r"^    python -m runner (.*)$", PAGE, re.MULTILINE)
YAMLS = re.findall(r"```yaml\n# lab/conf/(\w+)/(\w+)\.yaml\n(.*?)```", PAGE, re.DOTALL)
SHORT = ("train.max_steps=2", "train.batch_size=8", "debug.overfit=16", "tracking=none")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run(main, command):
    done = main(*shlex.split(command), *SHORT)
    assert done.rc == 0, done.stderr


@pytest.mark.parametrize(("group", "name", "text"), YAMLS)
def test_the_yamls_of_the_page_run(main, tmp_path, group, name, text):
    assert yaml.safe_load(text)
    path = tmp_path / "lab" / "conf" / group / f"{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    done = main("--config-dir", "lab/conf", f"{group}={name}", "model=vit", *SHORT)
    assert done.rc == 0, done.stderr


def test_a_sweep_over_a_recipe_names_its_jobs_as_they_were_typed(main, tmp_path):
    swept = "optimizer.no_decay_on=norms_and_biases,null"
    done = main("-m", "hydra/launcher=basic", swept, "model=mlp", "model.hidden=[8]", *SHORT)
    assert done.rc == 0, done.stderr
    overrides = [result["overrides"] for result in job_results(tmp_path)]
    assert "optimizer.no_decay_on=norms_and_biases" in overrides[0]
    assert "optimizer.no_decay_on=null" in overrides[1]
    assert "++" not in done.stdout
