"""The core of the runner: what it takes of other modules, and what those take of it, may only
shrink until it takes nothing and shows one list of names."""

from test_layers import FILES, dotted, imports

CORE = {
    "checkpoint": "checkpoint_file sharded_tensors",
    "config": "annotations instantiation invocation room schema signature targets",
    "data": "batch_layout",
    "distributed": "strategy torchrun",
    "modes": "context result run run_metadata",
    "precision": "contract conversion_report gradients loss_scale sessions",
    "tracking": "journal metric_names tracker",
    "training.callbacks": "callback",
    "training": "loop model_call records state step",
    "training.tasks": "task",
    "utils": "accelerator errors files formatting layout module_tape modules "
    "reproducibility secrets stop_signals tensors terminal tpu",
}
"""Modules of the core, by their packages."""
IMPORTS = 25
"""Pairs of a module of the core and one outside of it that it imports, anywhere in its code."""
NAMES = 322
"""Names of the core that other modules import."""


def core_modules():
    return {f"runner.{package}.{name}" for package in CORE for name in CORE[package].split()}


def module_of(name, modules):
    """Return the module that an imported dotted name is, or is in."""
    return name if name in modules else name.rpartition(".")[0]


def test_the_core_takes_ever_less_of_other_modules():
    core, modules = core_modules(), {dotted(path) for path in FILES}
    assert core <= modules
    pairs = {
        (dotted(path), module_of(name, modules))
        for path in FILES
        if dotted(path) in core
        for name in imports(path)
        if name.startswith("runner.")
    }
    outward = {pair for pair in pairs if pair[1] not in core}
    assert len(outward) == IMPORTS, f"say {len(outward)} in IMPORTS, if it is less"


def test_other_modules_take_ever_fewer_names_of_the_core():
    core, modules = core_modules(), {dotted(path) for path in FILES}
    taken = {
        name
        for path in FILES
        if dotted(path) not in core
        for name in imports(path)
        if module_of(name, modules) in core
    }
    assert len(taken) == NAMES, f"say {len(taken)} in NAMES, if it is less"
