"""Every code block in a section of docs/callbacks.md runs as it stands there."""

import re
import warnings
from dataclasses import fields

import pytest

from runner.core import Room
from runner.integrations.training_source import RecordSettings

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from foreign_trainings import new_accelerate_state

PRECISIONS = {
    "transformers.Trainer": ["32-true"],
    "Lightning": ["bf16-mixed"],
    "Fabric": ["bf16-mixed"],
    "Accelerate": ["bf16-mixed"],
    "Compare several trainings": ["32-true", "bf16-mixed"],
    "A loss scale without a GPU": ["16-mixed"],
}
"""Precisions of the runs that each section records on a CPU."""


def sections(root):
    """Return the text of each section of the page that has a block of Python, by title."""
    page = (root / "docs" / "callbacks.md").read_text()
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {title: text for title, text in named.items() if "```python" in text}


@pytest.mark.parametrize("title", PRECISIONS)
def test_a_code_block_records_its_runs(lab, root, title):
    (code,) = re.findall(r"```python\n(.*?)```", sections(root)[title], re.DOTALL)
    new_accelerate_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and devices
        exec(compile(code, f"docs/callbacks.md, {title}", "exec"), {"__name__": "__main__"})
    new_accelerate_state()
    alone = lab.folder.glob("outputs/runs/*/result.json")
    grouped = lab.folder.glob("outputs/groups/*/*/result.json")
    results = [lab.result(path.parent) for path in sorted([*alone, *grouped])]
    assert [result.precision for result in results] == PRECISIONS[title]
    for result in results:
        steps = lab.points(result, "train/loss")
        assert list(steps) == list(range(1, result.steps + 1))
        assert lab.points(result, "val/loss")
        assert result.status == "finished"


def test_every_code_block_is_run(root):
    assert list(sections(root)) == list(PRECISIONS)


def test_every_command_of_the_page_exists(root):
    page = (root / "docs" / "callbacks.md").read_text()
    lines = re.findall(r"^    python -m runner (\w+)(.*)$", page, re.MULTILINE)
    assert [name for name, _ in lines] == ["ui", "report", "sync"]
    for name, words in lines:
        Room.all_commands()[name].parse(words.split())


def test_every_option_is_on_the_page(root):
    text = (root / "docs" / "callbacks.md").read_text().partition("## Options")[2]
    assert [one.name for one in fields(RecordSettings) if f"`{one.name}`" not in text] == []
