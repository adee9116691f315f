"""Our plugins of Hydra's: their names, by which it finds them, and what they take."""

import sys
from dataclasses import dataclass
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin

_SPACE = "hydra_plugins.runner"
ISOLATED = f"{_SPACE}.IsolatedLauncher"
REMOTE = f"{_SPACE}.RemoteLauncher"
ADVISE = f"{_SPACE}.AdviseSweeper"


@dataclass
class IsolatedConf:
    """What hydra/launcher=isolated takes: how many jobs run at once."""

    _target_: str = ISOLATED
    n_jobs: int = 1


@dataclass
class AdviseConf:
    """What hydra/sweeper=advise takes: what it looks for are the keys under advise."""

    _target_: str = ADVISE


def register_plugins() -> None:
    """Store their configs; the plugins themselves are made known when they are needed."""
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="isolated", node=IsolatedConf, provider="runner")
    store.store(group="hydra/sweeper", name="advise", node=AdviseConf, provider="runner")


def register(plugin: type[Plugin]) -> None:
    """Makes one known to Hydra."""
    # It finds plugins in a namespace of its own only, which is empty where none is installed.
    for name in (_SPACE.partition(".")[0], _SPACE):
        sys.modules.setdefault(name, ModuleType(name))
    plugin.__module__ = _SPACE
    setattr(sys.modules[_SPACE], plugin.__name__, plugin)
    Plugins.instance().register(plugin)
