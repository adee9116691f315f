"""Docstrings and public names of runner/ read as CONTRIBUTING.md asks; ruff cannot check these."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
FORBIDDEN_STARTS = ("The ", "What ", "Whether ", "Of ", "Where ", "As ", "Its ", "That ")
"""A function's docstring begins with an imperative; a property's may begin with a noun phrase, too,
but not with an article."""
FORBIDDEN_NAMES = re.compile(
    "absent|afresh|again|apart|asked|at_once|before|began|begun|beside|came|cut|"
    "done|few|found|given|gone|half_way|here|inside|kept|least|left|lent|made|"
    "mend|most|near|nearby|nursery|own|parted|reached|seen|sound|taken|there|"
    "told|under_way|what|which|within|yardstick"
)
"""Words that name no thing and no action: a reader has to look up what they stand for."""
EXCEPTIONS: dict[str, str] = {}
"""Names that stay, as `<module>.<name>` or `<module>.<Class>.<name>`, and why: keys of files that
are read back by name, or names that another library calls."""
PATHS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "runner").rglob("*.py")
    if "__pycache__" not in path.parts
)


def docstring_offenders(tree):
    """Yield (line, name, first line) of functions whose docstring begins with a forbidden word."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION):
            docstring = ast.get_docstring(node) or ""
            if docstring.startswith(FORBIDDEN_STARTS):
                yield node.lineno, node.name, docstring.splitlines()[0]


def public_names(tree):
    """Yield (line, name) of what a module and its classes define, but for private names."""
    for scope, body in [("", tree.body), *class_bodies(tree)]:
        for node in body:
            for name in defined_names(node, is_module=not scope):
                if not name.startswith("_"):
                    yield node.lineno, f"{scope}{name}"


def class_bodies(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{node.name}.", node.body


def defined_names(node, is_module):
    """Names of functions and classes; of a module, variables as well.

    Fields of a class are left out: many are keys of files.
    """
    if isinstance(node, FUNCTION | ast.ClassDef):
        return [node.name]
    if not is_module:
        return []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def name_offenders(path, tree):
    """Yield (line, name) of public names that are among the forbidden ones."""
    module = ".".join(path.with_suffix("").parts)
    for line, name in public_names(tree):
        is_forbidden = FORBIDDEN_NAMES.fullmatch(name.rpartition(".")[2].lower())
        if is_forbidden and f"{module}.{name}" not in EXCEPTIONS:
            yield line, name


def parsed(path):
    return ast.parse((ROOT / path).read_text())


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_docstrings_begin_with_an_imperative_and_public_names_say_what_they_name(path):
    tree = parsed(path)
    assert [*docstring_offenders(tree)] == [*name_offenders(path, tree)] == []


def test_exceptions_name_what_exists():
    defined = {
        f"{'.'.join(path.with_suffix('').parts)}.{name}"
        for path in PATHS
        for _, name in public_names(parsed(path))
    }
    assert set(EXCEPTIONS) <= defined


def test_offenders_are_found():
    source = '''
FEW, LIMIT = 3, 4
kept: int = 0
def told():
    """Whether it was told."""
class Door:
    found: int = 0  # a field
    @property
    def left(self):
        """The seconds that are left."""
    def close(self):
        """Close the door."""
    def _cut(self):
        """What is private needs a docstring that reads alone, too."""
'''
    tree = ast.parse(source)
    names = [name for _, name in name_offenders(Path("runner/door.py"), tree)]
    assert sorted(names) == ["Door.left", "FEW", "kept", "told"]
    assert sorted(name for _, name, _ in docstring_offenders(tree)) == ["_cut", "left", "told"]
