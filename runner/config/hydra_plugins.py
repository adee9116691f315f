"""Register our launchers and our sweeper with Hydra: their names and their config keys."""

import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra.utils
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin
from omegaconf import OmegaConf

from runner.core import files

_ROOT = "hydra_plugins"
_SPACE = f"{_ROOT}.runner"
ISOLATED = f"{_SPACE}.IsolatedLauncher"
REMOTE = f"{_SPACE}.RemoteLauncher"
ADVISE = f"{_SPACE}.AdviseSweeper"

_IS_1_3 = hydra.__version__.startswith("1.3.")
VERSION_BASE = {"version_base": "1.3"} if _IS_1_3 else {}
"""An argument that Hydra 1.3 warns about where it is not given, and Hydra 1.4 where it is."""
MAIN_ARGUMENTS: dict[str, Any] = VERSION_BASE.copy()
if not _IS_1_3:
    # Hydra 1.4 warns without a list of the targets that it may call; 1.3 calls what a command
    # names. A command and the yamls of --config-dir are the user's own.
    MAIN_ARGUMENTS["execution_whitelist"] = vars(hydra.utils)["UNSAFE_DISABLE_EXECUTION_CHECKS"]
register_resolver = getattr(OmegaConf, "register_new_resolver" if _IS_1_3 else "register_resolver")
"""OmegaConf's function that registers a resolver, whose name 2.4 changed."""


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


def set_plugin_folders(config_dir: Path | None) -> None:
    """Have Hydra import no plugins of the working directory, but of those beside one's own configs.

    Hydra imports every module in the package hydra_plugins, of which Python makes any folder of
    this name in the working directory a part: it may be a stranger's.

    Args:
        config_dir: folder of the user's own configs; None for none.
    """
    places = files.import_paths()
    if config_dir is not None:
        places.append(str(config_dir.absolute()))
    # Python's own finder is asked: only its hooks know the paths of some installed packages.
    spec = PathFinder.find_spec(_ROOT, places)
    package = sys.modules.setdefault(_ROOT, ModuleType(_ROOT))
    package.__path__ = [*((spec and spec.submodule_search_locations) or ())]


def register(plugin: type[Plugin]) -> None:
    """Register a plugin's class with Hydra."""
    # Hydra takes plugins only from the package hydra_plugins.
    sys.modules.setdefault(_SPACE, ModuleType(_SPACE))
    plugin.__module__ = _SPACE
    setattr(sys.modules[_SPACE], plugin.__name__, plugin)
    Plugins.instance().register(plugin)
