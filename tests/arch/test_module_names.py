"""Names of modules that stand in strings and in configs lead to something.

A name in a string is followed by no import statement, so that a module that moves would leave it
behind without an error: `sys.modules.get("runner.sweeps.sweep")` would find no sweep.
"""

import ast
import re
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?:(?<![\w./-])|(?<=pkg://))runner(?:\.\w+)+(?::\w+)?")
"""A name, or the beginning of names, or an entry point `module:function`."""


def names_in(text):
    """Names of modules and of what is in them, anywhere in a string."""
    return [name.replace(":", ".") for name in NAME.findall(text)]


def resolves(name):
    """Whether a name is a module, an attribute in one, or the beginning of modules' names."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:cut]), parts[cut:]
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:
            continue
        if spec is None:
            continue
        found = import_module(module) if rest else None
        for part in rest:
            found = getattr(found, part, None)
        return not rest or found is not None or begins_a_module(spec, rest)
    return False


def begins_a_module(package, rest):
    """Whether modules of a package begin so: `runner.precision.bitsandbytes_`."""
    places = [Path(place) for place in package.submodule_search_locations or ()]
    beginning = rest[0] if len(rest) == 1 and rest[0].endswith("_") else None
    return beginning is not None and any(any(p.glob(f"{beginning}*.py")) for p in places)


def python_names():
    for folder in ("runner", "models", "conf"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for name in names_in(node.value):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", name


def config_names():
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in names_in(line):
                yield f"{path.relative_to(ROOT)}:{number}", name


def project_names():
    def strings(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for item in value:
                yield from strings(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from strings(key)
                yield from strings(item)

    for text in strings(tomllib.loads((ROOT / "pyproject.toml").read_text())):
        for name in names_in(text):
            yield "pyproject.toml", name


@pytest.mark.parametrize("names", [python_names, config_names, project_names])
def test_every_name_in_a_string_leads_to_something(names):
    found = list(names())
    assert found
    assert [(place, name) for place, name in found if not resolves(name)] == []


def test_a_name_that_leads_nowhere_is_seen():
    assert names_in("runner.nowhere") == ["runner.nowhere"]
    assert names_in("runner.models.") == ["runner.models"]
    assert names_in("runner.__main__:main") == ["runner.__main__.main"]
    assert names_in("import sys; from runner.cli.main import main; main()") == ["runner.cli.main"]
    assert names_in("python -m runner.cli.main --now") == ["runner.cli.main"]
    assert names_in("pkg://runner.conf") == ["runner.conf"]
    assert names_in("The tag mlflow.runner.journal is of the runner. It stays.") == []
    assert resolves("runner.cli.main.main")
    assert resolves("runner.precision.layers.bnb_")
    assert not resolves("runner.nowhere")
    assert not resolves("runner.cli.main.nowhere")
    assert not resolves("runner.precision.nowhere_")
