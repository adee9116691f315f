"""The packages of runner/ stand in one order: each imports from itself and from those below it."""

import ast
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = (
    "core",
    "output",
    "config",
    "precision",
    "data",
    "tracking",
    "training",
    "diagnostics",
    "modes",
    "mismatch",
    "sweeps",
    "planning",
    "integrations",
    "cli",
    "api",
)
# Modules that a declared distribution brings along.
BROUGHT_BY = {
    "IPython": "ipykernel",
    "markupsafe": "jinja2",
    "optuna": "hydra-optuna-sweeper",
    "ray": "hydra-ray-launcher",
    "submitit": "hydra-submitit-launcher",
}
FILES = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "runner").rglob("*.py")
    if "__pycache__" not in path.parts
)


def package(path):
    """Return the package of a file of runner/, None for the modules at its top."""
    return path.parts[1] if len(path.parts) > 2 else None


def dotted(path):
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(path, top_only=False):
    """Dotted names that a file imports, `from a import b` as a.b; top_only leaves out what runs
    later or never."""
    tree = ast.parse((ROOT / path).read_text())
    nodes = _at_import(tree.body) if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it points"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(body):
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _at_import(getattr(node, inner, None) or [])


def packages(names):
    """Return the packages of runner/ among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("runner.")} & set(ORDER)


def tops(names):
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)


def test_the_top_of_the_runner_holds_packages_and_their_table():
    found = {path.name for path in (ROOT / "runner").iterdir()} - {"__pycache__"}
    assert found == {*ORDER, "__init__.py", "__main__.py", "rooms.py", "py.typed"}


@pytest.mark.parametrize("path", [path for path in FILES if package(path)], ids=str)
def test_no_import_goes_upward(path):
    mine = ORDER.index(package(path))
    # What a room offers is imported when it is used.
    names = imports(path, top_only=path.name == "room.py")
    upward = {name for name in packages(names) if ORDER.index(name) > mine}
    assert not upward, f"{path} imports from above: {sorted(upward)}"


@pytest.mark.parametrize(
    "path", ["cli/main.py", "sweeps/hydra_callback.py", "__main__.py", "__init__.py"]
)
def test_the_command_line_imports_little_at_its_top(path):
    """Else --help and tab completion would wait for torch."""
    names = set(imports(Path("runner", path), top_only=True))
    assert packages(names) <= {"core", "output", "config", "cli", "sweeps"}
    assert tops(names) <= {"hydra", "omegaconf", "runner", "yaml"}  # OmegaConf reads with yaml


@pytest.mark.parametrize("path", [p for p in FILES if package(p) == "config"], ids=str)
def test_the_config_package_needs_hydra_only(path):
    torch_types = {"torch"} if path.name == "trusted_targets.py" else set()
    assert tops(imports(path)) <= {"runner", "hydra", "omegaconf", "yaml"} | torch_types


def is_model(name):
    """Return whether a dotted name is that of another model's module."""
    return name.startswith("runner.models.")


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda p: p.name)
def test_models_are_plain(path):
    """Libraries of extras are imported where a model of theirs is built."""
    path = path.relative_to(ROOT)
    needed = {name for name in imports(path, top_only=True) if not is_model(name)}
    assert tops(needed) <= {"torch", "torchvision"}
    assert tops(name for name in imports(path) if not is_model(name)) <= {
        "torch",
        "torchvision",
        "timm",
        "transformers",
        "yaml",
        "safetensors",
    }


def test_mlflow_is_imported_where_it_is_spoken_to_only():
    users = {str(path) for path in FILES if "mlflow" in tops(imports(path))}
    others = {name for name in users if not name.startswith("runner/tracking/")}
    assert others <= {"runner/core/record/checkpoint_file.py"}
    for path in FILES:
        if str(path) != "runner/tracking/writer/store.py":
            assert "mlflow" not in tops(imports(path, top_only=True)), path


def test_optional_libraries_are_imported_where_they_are_needed_only():
    """Else a run would wait for those that its precision and optimizer do not use."""
    optional = {"bitsandbytes", "torchao", "transformer_engine", "peft"}
    users = {path for path in FILES if optional & tops(imports(path, top_only=True))}
    assert not [path for path in users if path.parent != Path("runner/precision/layers")]


def test_each_imported_distribution_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [needs for name, needs in project["optional-dependencies"].items() if name != "dev"]
    needs = chain(project["dependencies"], *extras)
    declared = {re.match(r"[\w-]+", requirement)[0] for requirement in needs}
    installed = packages_distributions()
    models = (path.relative_to(ROOT) for path in (ROOT / "models").glob("*.py"))
    for path in (*FILES, *models):
        for module in tops(imports(path)) - {"runner"}:
            owners = installed.get(module, [module.replace("_", "-")])
            names = {BROUGHT_BY.get(module), *(name.lower() for name in owners)}
            assert names & declared, f"{path} imports {module}, which pyproject.toml does not name"


def test_config_objects_stop_at_the_config_layer():
    """Below it nothing sees a DictConfig."""
    users = {str(path) for path in FILES if any(".DictConfig" in name for name in imports(path))}
    # Hydra calls plugins and callbacks with its own objects.
    called_by_hydra = {path for path in users if path.startswith("runner/sweeps/")}
    in_config = {path for path in users if path.startswith("runner/config/")}
    assert users == called_by_hydra | in_config


@pytest.mark.parametrize(
    ("folder", "above"),
    [
        ("verdict", ("runner.sweeps.report", "runner.sweeps.advisor")),
        ("report", ("runner.sweeps.advisor",)),
    ],
)
def test_verdicts_lie_below_the_pages_and_pages_below_the_advisor(folder, above):
    for path in FILES:
        if path.parent == Path("runner/sweeps", folder):
            # The advice shows itself in a notebook by a page, which it imports then.
            names = imports(path, top_only=True)
            assert not [name for name in names if name.startswith(above)], path


def test_there_is_no_cycle():
    known = {dotted(path) for path in FILES}
    graph = {}
    for path in FILES:
        names = set(imports(path, top_only=True))
        owners = {name if name in known else name.rpartition(".")[0] for name in names}
        graph[dotted(path)] = {name for name in owners if name in known and name != dotted(path)}
    list(TopologicalSorter(graph).static_order())  # raises CycleError
