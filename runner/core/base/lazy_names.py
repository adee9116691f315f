"""Import a package's public names when they are first asked for.

The command line answers --help without torch, and a run needs no policy for loops of one's own.
"""

import random
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its dotted name.
        homes: public names, separated by spaces, by the module below the package that has them, or
            with a dot before it by one beside the package; a module that is itself a public name is
            one of its own names.
    """

    def get(name: str) -> Any:
        home = next((home for home, names in homes.items() if name in names.split()), None)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # rich draws a random number for styles that it makes when it is imported.
        drawn = random.getstate()
        module = import_module(f".{home}", package)
        random.setstate(drawn)
        value = module if home.rpartition(".")[2] == name else getattr(module, name)
        # Python asks for a name once.
        setattr(sys.modules[package], name, value)
        return value

    return get
