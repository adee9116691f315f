"""Say which package a callback needs, and how to install it."""

from runner.utils.errors import Unavailable


def missing_package(module: str, package: str, extra: str) -> Unavailable:
    """Return the error of a module whose library is not installed.

    Args:
        module: the module that was imported.
        package: the library that it needs.
        extra: of this project, that installs it.
    """
    return Unavailable(
        f"{module} needs the package {package}, which is not installed here.",
        f'Type pip install {package}; in a checkout pip install -e ".[{extra}]" does the same, '
        f"with a wheel pip install '<the wheel's path>[{extra}]'.",
    )
