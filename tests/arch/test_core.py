"""The core of the runner takes nothing of the rooms, and rooms take what its list shows."""

from test_layers import FILES, dotted, imports, tops

NAMES = 315
"""Names of the core that other modules import."""


def is_core(name):
    """Return whether a dotted name is of the core."""
    return name.startswith("runner.core")


def test_the_core_takes_nothing_of_the_rooms():
    for path in FILES:
        if is_core(dotted(path)):
            taken = {name for name in imports(path) if name.startswith("runner.")}
            assert not {name for name in taken if not is_core(name)}, path
            # torch brings numpy along, whose generators are seeded.
            assert tops(imports(path)) <= {"runner", "torch", "omegaconf", "numpy"}, path


def test_other_modules_take_ever_fewer_names_of_the_core():
    taken = {
        name
        for path in FILES
        if not is_core(dotted(path))
        for name in imports(path)
        if is_core(name)
    }
    assert len(taken) == NAMES, f"say {len(taken)} in NAMES, if it is less"
