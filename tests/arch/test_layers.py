"""The layers of docs/design.md: a module imports from its own layer and from lower ones only."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = (
    {
        "errors",
        "files",
        "quiet",
        "records",
        "secrets",
        "shown",
        "spec",
        "origin",
        "spec_advise",
        "argv",
        "alone",
        "stop",
        "torchrun",
        "signature",
    },
    {"config", "explain", "manifest", "plugins", "precision_keys", "usage"},
    {
        "strategy",
        "precision",
        "tasks",
        "data",
        "tracking",
        "accelerator",
        "tpu",
        "isolation",
        "result",
        "console",
        "optimizers",
        "sparse",
        "adapter",
        "pretrained",
        "ledger",
        "workspace",
    },
    {
        "state",
        "build",
        "examples",
        "lazy_layers",
        "checkpoint",
        "saving",
        "saving_parts",
        "shards",
        "model",
        "artifacts",
        "export",
        "notes",
        "trust",
        "run_store",
    },
    {"step", "blocks", "loop"},
    {"observers"},
    {"resume", "restore"},
    {
        "batch_errors",
        "precision_errors",
        "context",
        "describe",
        "evaluate",
        "room",
        "again",
        "kept",
        "guards",
        "shape",
        "course",
        "replay",
        "leave",
        "numerics",
        "memory_error",
        "train",
        "trial",
        "run",
        "plan",
        "memory_plan",
        "report",
        "sweep",
        "unfinished",
        "sync",
        "doctor",
        "ui",
    },
    {"hooks", "cli", "launcher", "advise", "__main__", "__init__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "runner").rglob("*.py")
    if "__pycache__" not in path.parts
)


def unit(path):
    """The name in LAYERS of a file of the runner: its own, or its package's."""
    return path.parts[1].removesuffix(".py")


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


def within(names):
    """The runner's units among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("runner.")} - {"conf", "models"}


def tops(names):
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)


def test_every_module_has_a_layer():
    found = {unit(path) for path in FILES}
    assert found == set(LEVEL) & found
    assert found - set(LEVEL) == set()
    assert set(LEVEL) - found == set(), "the table names modules that are gone"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_import_goes_upward(path):
    mine = LEVEL[unit(path)]
    upward = {name for name in within(imports(path)) if LEVEL[name] > mine}
    assert not upward, f"{path} (layer {mine}) imports from above: {sorted(upward)}"


@pytest.mark.parametrize("name", ["cli", "hooks", "__main__", "__init__"])
def test_the_command_line_imports_little_at_its_top(name):
    """Else --help and tab completion would wait for torch."""
    names = set(imports(Path(f"runner/{name}.py"), top_only=True))
    allowed = LAYERS[0] | LAYERS[1] | {"cli"}
    assert within(names) <= allowed
    assert tops(names) <= {"hydra", "omegaconf", "runner", "yaml"}  # OmegaConf reads with yaml


@pytest.mark.parametrize("path", [p for p in FILES if LEVEL.get(unit(p)) == 0], ids=str)
def test_the_lowest_layer_needs_nothing(path):
    late = {"torch"} if path.name == "torchrun.py" else set()  # in the processes that it started
    assert tops(imports(path)) <= {"runner"} | late
    assert tops(imports(path, top_only=True)) <= {"runner"}


@pytest.mark.parametrize("path", [p for p in FILES if LEVEL.get(unit(p)) == 1], ids=str)
def test_the_config_layer_needs_hydra_only(path):
    assert tops(imports(path)) <= {"runner", "hydra", "omegaconf", "yaml"}


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda p: p.name)
def test_models_are_plain(path):
    assert tops(imports(path.relative_to(ROOT))) <= {"torch", "torchvision"}


def test_mlflow_is_imported_where_it_is_spoken_to_only():
    users = {str(path) for path in FILES if "mlflow" in tops(imports(path))}
    others = {name for name in users if not name.startswith("runner/tracking/")}
    assert others <= {"runner/checkpoint.py"}
    of_the_writer = {
        "runner/tracking/store.py",
        "runner/tracking/answers.py",
        "runner/tracking/names.py",
    }
    for path in FILES:
        if str(path) not in of_the_writer:
            assert "mlflow" not in tops(imports(path, top_only=True)), path


def test_config_objects_stop_at_the_config_layer():
    """Below it nothing sees a DictConfig."""
    users = {str(path) for path in FILES if any(".DictConfig" in name for name in imports(path))}
    plugins = ("runner/launcher/", "runner/advise/")  # Hydra calls them with its own objects
    of_hydra = {path for path in users if path.startswith(plugins)}
    names = ("cli", "config", "explain", "hooks", "precision_keys")
    assert users - of_hydra == {f"runner/{name}.py" for name in names}


def test_there_is_no_cycle():
    known = {dotted(path) for path in FILES}
    graph = {}
    for path in FILES:
        names = set(imports(path, top_only=True))
        owners = {name if name in known else name.rpartition(".")[0] for name in names}
        graph[dotted(path)] = {name for name in owners if name in known and name != dotted(path)}
    list(TopologicalSorter(graph).static_order())  # raises CycleError
