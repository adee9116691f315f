"""Networks of one expression, for a test that needs no class."""

from torch import nn


def net(forward, **parts):
    """Return a module that holds parts by their names; `forward` is given it and the inputs."""
    module = type("Net", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module
