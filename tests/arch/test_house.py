"""House rules: sizes, docstrings, and configs that say what they are and work."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runner.config.hydra_plugins import VERSION_BASE
from runner.config.resolve import register_schema
from runner.core.config.targets import check_targets, locate

ROOT = Path(__file__).parents[2]
CODE = sorted(
    path.relative_to(ROOT)
    for folder in ("runner", "models", "conf", "bench", "docs")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
PUBLIC = [path for path in CODE if path.parts[0] in ("runner", "models")]
YAMLS = sorted(path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml"))
OPTIONS = [path for path in YAMLS if len(path.parts) == 2]
# What an option asks of the command in addition to its own name.
WITH = {
    "data=hf": ["data.path=rows.csv", "data.meta.input=[1,8,8]", "data.meta.classes=2"],
    "data=imagefolder": ["data.meta.classes=2"],
    "data=npz": ["data.path=data.npz", "data.meta.input=[1,8,8]", "data.meta.classes=2"],
    "data=parquet": ["data.path=rows", "data.meta.input=[1,8,8]", "data.meta.classes=2"],
    "debug=replay": ["batch=b.json"],
    "model=hf": ["model.kind=causal_lm"],
    "task=hf": ["model=hf", "model.kind=causal_lm"],
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path):
    return ast.parse((ROOT / path).read_text())


@pytest.mark.parametrize("path", [p for p in CODE if p.parts[0] != "tests"], ids=str)
def test_a_file_has_600_lines_at_most(path):
    assert len((ROOT / path).read_text().splitlines()) <= 600


def length(function):
    """Lines of a function without its docstring, which says what it has to."""
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    docstring_lines = first.end_lineno - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


@pytest.mark.parametrize("path", PUBLIC, ids=str)
def test_a_function_has_60_lines_at_most(path):
    """The step has 90: what happens between a backward and the next batch is read in one place."""
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, FUNCTION)]
    most = {"train_step": 90}
    assert not {f.name: length(f) for f in functions if length(f) > most.get(f.name, 60)}


@pytest.mark.parametrize("path", PUBLIC, ids=str)
def test_what_is_public_has_a_docstring(path):
    """Modules, and their public functions and classes."""
    module = tree(path)
    public = [n for n in module.body if isinstance(n, FUNCTION | ast.ClassDef) and n.name[0] != "_"]
    assert not [node.name for node in public if not ast.get_docstring(node)]
    assert ast.get_docstring(module) or not module.body


@pytest.mark.parametrize("path", YAMLS, ids=str)
def test_a_config_begins_with_what_it_is(path):
    lines = (ROOT / "conf" / path).read_text().splitlines()
    first = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert first.startswith("# ")
    assert len(first) > 10


def paths_in(node):
    if isinstance(node, dict):
        if node.get("_target_"):
            yield node["_target_"]
        for value in node.values():
            yield from paths_in(value)


@pytest.mark.parametrize("path", YAMLS, ids=str)
def test_every_target_imports(path):
    content = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / path))
    for target in paths_in(content):
        assert callable(locate(target)), target


@pytest.mark.parametrize("path", OPTIONS, ids=str)
def test_every_option_composes_and_its_keywords_bind(path, compose):
    group, option = path.parts[0], path.stem
    if group == "sweep":
        return
    if option == "ray" and not find_spec("ray"):
        pytest.skip("Ray is not installed here")
    choice = f"{group}={option}"
    more = ["mode=plan"] if group == "device" else []
    spec = compose(choice, *WITH.get(choice, more))
    assert check_targets(spec) == []
    assert [p for p in spec.problems() if "checkpoint" not in p] == []


@pytest.mark.parametrize("path", [p for p in OPTIONS if p.parts[0] == "sweep"], ids=str)
def test_every_sweep_has_its_grid(path, compose):
    """Its overrides must compose one by one; a sweeper finds a typing error in the last job."""
    register_schema()
    with initialize_config_module("runner.conf", **VERSION_BASE):
        config = hydra_compose("config", [f"sweep={path.stem}"], return_hydra_config=True)
    assert config.hydra.mode.name == "MULTIRUN"
    for key, values in config.hydra.sweeper.params.items():
        for value in _grid(key, values):
            assert check_targets(compose(f"{key}={value}")) == []


def _grid(key, values):
    """Every choice, or both ends of an interval."""
    override = OverridesParser.create().parse_override(f"{key}={values}")
    if override.is_interval_sweep():
        return [override.value().start, override.value().end]
    return list(override.sweep_string_iterator())
