"""Commands and yamls of docs/training.md, which run as they stand there."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

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
