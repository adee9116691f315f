"""Find the files that an installed package ships, without importing the package."""

from importlib.util import find_spec
from pathlib import Path


def package_file(package: str, inside: str) -> Path | None:
    """Return the path of a file or folder of an installed package; None where there is none.

    Args:
        package: top-level name, for example rxnmapper.
        inside: relative path in its folder.
    """
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / inside
        if path.exists():
            return path
    return None
