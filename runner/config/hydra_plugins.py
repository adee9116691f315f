"""Register our launchers and our sweeper with Hydra: their names and their config keys."""

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
    """Keys of hydra/launcher=isolated; n_jobs is the number of jobs that run at once."""

    _target_: str = ISOLATED
    n_jobs: int = 1


@dataclass
class AdviseConf:
    """Keys of hydra/sweeper=advise: none, its settings are the keys under advise."""

    _target_: str = ADVISE


def register_plugins() -> None:
    """Store the plugins' configs; each plugin's class is registered when its module is imported."""
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="isolated", node=IsolatedConf, provider="runner")
    store.store(group="hydra/sweeper", name="advise", node=AdviseConf, provider="runner")


def register(plugin: type[Plugin]) -> None:
    """Register a plugin's class with Hydra."""
    # Hydra takes plugins only from the namespace hydra_plugins, which may not exist here.
    for name in (_SPACE.partition(".")[0], _SPACE):
        sys.modules.setdefault(name, ModuleType(name))
    plugin.__module__ = _SPACE
    setattr(sys.modules[_SPACE], plugin.__name__, plugin)
    Plugins.instance().register(plugin)
