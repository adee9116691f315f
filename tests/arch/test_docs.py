"""Pages say what the code does: generated tables, metrics, commands, links."""

import re
import runpy

import pytest

from runner.core import Mode
from runner.core.config.schema import RunSpec
from runner.core.record.metric_names import METRICS
from runner.precision.registry import precision_names, yaml_header


@pytest.fixture(scope="module")
def generate(root):
    return runpy.run_path(str(root / "docs" / "generate.py"))


def pages(root):
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def test_generated_tables_are_up_to_date(root, generate):
    stale = [p.name for p in pages(root) if generate["render"](p.read_text()) != p.read_text()]
    assert not stale, f"run make docs: {stale}"


def test_a_stale_table_is_noticed(generate):
    page = "<!-- table:metrics -->\n| old |\n<!-- end -->\n"
    assert "train/loss" in generate["render"](page)


def test_every_metric_that_the_code_logs_is_documented(root):
    code = "\n".join(path.read_text() for path in (root / "runner").rglob("*.py"))
    logged = set(re.findall(r'"((?:train|loss_scale|perf|memory|val|guard|numerics)/\w+)"', code))
    per_module = {f"{stem}/<module>" for stem in re.findall(r'"((?:experts|fp8)/\w+)/', code)}
    per_set = {"val/<name>/<metric>", "val/<name>", "test/<metric>", "train/<name>"}
    per_group = {f"{stem}/<group>" for stem in re.findall(r'"(lr)/', code)}
    assert logged | per_module | per_set | per_group == set(METRICS)


def test_the_text_of_mode_names_every_mode(generate):
    text = generate["attribute_texts"](RunSpec)["mode"]
    assert set(re.findall(r"\w+", text.partition(": ")[2])) - {"or"} == set(Mode.all())


def test_every_precision_says_what_and_why():
    assert all(all(yaml_header(name)) for name in precision_names())


def test_links_and_pictures_exist(root):
    for page in pages(root):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} -> {target}"
