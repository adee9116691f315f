"""Commands and yamls of docs/training.md, which run as they stand there and have their effect."""

import re
import shlex

import pytest
from run_folders import DOCS, job_results, write_page
from typed_runs import TypedRuns

PAGE = (DOCS / "training.md").read_text()
COMMANDS = re.findall(r"^    python -m runner (.*)$", PAGE, re.MULTILINE)
YAMLS = re.findall(r"```yaml\n# lab/conf/(\w+)/(\w+)\.yaml\n", PAGE)
SHORT = "train.max_steps=20 train.batch_size=4 debug.overfit=4 tracking=none"
SAID = {
    "optimizer.groups": "heads: 2 at lr 0.01",
    "no_decay_on": "no weight decay on ",
    "scheduler.warmup": "the learning rate warms up for ",
    "train.freeze": "frozen: ",
}
"""By a word of a command: what the run says of it."""
SAID_OF_YAMLS = {
    "tuned": "heads: 2 at lr 0.003, embeddings: 2 at lr 0.0003",
    "two": "at lr 0.001, body: ",
    "hold_then_cosine": "",
    "plateau": "ReduceLROnPlateau follows val/accuracy (max) in the evaluations",
}


@pytest.fixture
def runs(main, tmp_path):
    return TypedRuns(main, tmp_path, SHORT)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_have_their_effect(runs, command):
    runs.words += shlex.split(command)
    run = runs.train()
    assert [text for word, text in SAID.items() if word in command and text not in run.stdout] == []
    content = run.content()
    assert ("train.ema" in command) == ("average" in content)
    assert ("clip_value" in command) == (content["spec"]["train"]["clip_value"] == 0.5)


@pytest.mark.parametrize(("group", "name"), YAMLS)
def test_the_yamls_of_the_page_have_their_effect(runs, tmp_path, group, name):
    write_page("training.md", tmp_path)
    run = runs.train(f"--config-dir lab/conf {group}={name} model=vit")
    assert SAID_OF_YAMLS[name] in run.stdout


def test_a_sweep_over_a_recipe_names_its_jobs_as_they_were_typed(runs, tmp_path):
    swept = "optimizer.no_decay_on=norms_and_biases,null"
    done = runs(f"-m hydra/launcher=basic {swept} model=mlp model.hidden=[8]").check_ok()
    overrides = [result["overrides"] for result in job_results(tmp_path)]
    assert "optimizer.no_decay_on=norms_and_biases" in overrides[0]
    assert "optimizer.no_decay_on=null" in overrides[1]
    assert "++" not in done.stdout
