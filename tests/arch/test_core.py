"""The core of the runner takes nothing of the rooms, and rooms take what its list shows."""

import ast
from importlib import import_module
from inspect import ismodule
from pathlib import Path

import pytest
from test_layers import FILES, ROOT, dotted, imports, tops

import runner.core
import runner.precision

MODULE_NAMES = 266
"""Names that rooms take of the modules of the list; may only fall."""


def is_core(name):
    """Return whether a dotted name is of the core."""
    return name == "runner.core" or name.startswith("runner.core.")


def taken_by_rooms():
    """Return the dotted names of the core that rooms import, with the rooms that do."""
    taken = {}
    for path in FILES:
        if not is_core(dotted(path)):
            for name in imports(path):
                if name.startswith("runner.core."):
                    taken.setdefault(name, set()).add(path.parts[1])
    return taken


def test_the_core_takes_nothing_of_the_rooms():
    for path in FILES:
        if is_core(dotted(path)):
            taken = {name for name in imports(path) if name.startswith("runner.")}
            assert not {name for name in taken if not is_core(name)}, path
            # torch brings numpy along, whose generators are seeded.
            assert tops(imports(path)) <= {"runner", "torch", "omegaconf", "numpy"}, path


def test_rooms_take_nothing_of_the_core_past_its_list():
    assert not taken_by_rooms().keys() - {f"runner.core.{name}" for name in runner.core.__all__}


def test_rooms_take_ever_fewer_names_of_the_modules_of_the_list():
    modules = {name for name in runner.core.__all__ if ismodule(getattr(runner.core, name))}
    taken = set()
    for path in FILES:
        if not is_core(dotted(path)):
            shown = {name for name in modules if f"runner.core.{name}" in imports(path)}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in shown:
                    taken.add((node.value.id, node.attr))
    assert len(taken) <= MODULE_NAMES
    assert len(taken) == MODULE_NAMES, f"say {len(taken)} in MODULE_NAMES"


def test_the_list_is_of_at_most_sixty_names_that_are_there():
    assert len(runner.core.__all__) <= 60
    for name in runner.core.__all__:
        assert getattr(runner.core, name).__doc__, name


def test_each_name_of_the_list_is_used_by_two_rooms_or_told_to_users():
    pages = "\n".join(
        page.read_text() for page in (ROOT / "docs").glob("*.md") if page.name != "design.md"
    )
    taken = taken_by_rooms()
    for name in runner.core.__all__:
        rooms = taken.get(f"runner.core.{name}", set())
        assert len(rooms) >= 2 or f"`{name}`" in pages, (name, rooms)


@pytest.mark.parametrize("package", [runner, runner.core, runner.precision])
def test_type_checkers_see_what_is_imported(package):
    tree = ast.parse(Path(package.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: import_module(node.module) for node in block.body for alias in node.names}
    assert seen.keys() == {*getattr(package, "__all__", seen)}
    for name, home in seen.items():
        assert getattr(package, name) is getattr(home, name), name
