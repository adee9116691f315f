"""Let Hydra parse a config and compose a choice of groups once in a process: it takes 0.2 s of CPU.

The values of a command are applied to a copy, by Hydra.
"""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import Overrides
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

BUILT_IN = {"hydra.conf", "runner.conf", ""}
"""Packages of Hydra's search path whose configs do not change while tests run."""


class CompositionCache:
    """What Hydra has composed in this process, by chosen groups and the texts of own configs."""

    def __init__(self):
        self.defaults_lists = {}
        self.configs = {}
        self.files = {}
        self.hydra_list = config_loader_impl.create_defaults_list
        self.hydra_compose = ConfigLoaderImpl._compose_config_from_defaults_list
        self.hydra_load = package_source().load_config

    def load_config(self, source, config_path):
        if source.path not in BUILT_IN:
            return self.hydra_load(source, config_path)
        key = (source.path, source.provider, config_path)
        if key not in self.files:
            self.files[key] = self.hydra_load(source, config_path)
        return copy.deepcopy(self.files[key])

    def create_defaults_list(self, *, repo, overrides_list, **options):
        texts = texts_of_configs(repo.get_sources())
        if texts is None:
            return self.hydra_list(repo=repo, overrides_list=overrides_list, **options)
        values = Overrides(repo, overrides_list).config_overrides
        groups = [override for override in overrides_list if override not in values]
        key = (tuple(override.input_line for override in groups), texts, *options.values())
        if key not in self.defaults_lists:
            made = self.hydra_list(repo=repo, overrides_list=groups, **options)
            self.defaults_lists[key] = made
        return replace(self.defaults_lists[key], config_overrides=values)

    def compose(self, loader, defaults, repo):
        known = self.configs.get(id(defaults))
        if known is None:
            known = self.hydra_compose(loader, defaults=defaults, repo=repo)
            # A cached list is kept, so that no other has its id.
            if not any(defaults is kept.defaults for kept in self.defaults_lists.values()):
                return known
            self.configs[id(defaults)] = known
        config = copy.deepcopy(known)
        OmegaConf.clear_cache(config)  # it keeps the time that ${now:} gave
        return config


def package_source():
    """Return the class that reads configs of a package: Hydra imports its plugins a second time."""
    Plugins.instance()
    return SourcesRegistry.instance().resolve("pkg")


def texts_of_configs(sources):
    """Return the texts of all configs outside of built-in packages; None if they are not known.

    The names of the plugins' launchers are among them: a test removes one.
    """
    texts = [*ConfigStore.instance().repo["hydra"]["launcher"]]
    for source in sources:
        if source.scheme() == "file":
            folder = Path(source.path)
            paths = sorted(folder.rglob("*.yaml"))
            texts += [(str(path.relative_to(folder)), path.read_bytes()) for path in paths]
        elif source.path not in BUILT_IN:
            return None
    return tuple(texts)


def cache_compositions(patch):
    """Put a cache before Hydra's composing in this process, with pytest's MonkeyPatch."""
    cache = CompositionCache()
    patch.setattr(config_loader_impl, "create_defaults_list", cache.create_defaults_list)
    patch.setattr(
        ConfigLoaderImpl,
        "_compose_config_from_defaults_list",
        lambda loader, defaults, repo: cache.compose(loader, defaults, repo),
    )
    patch.setattr(
        package_source(),
        "load_config",
        lambda source, config_path: cache.load_config(source, config_path),
    )
    # Hydra copies the whole store for each composition, and each config that it takes from it.
    patch.setattr(ConfigStore, "__deepcopy__", lambda store, _: store, raising=False)


@pytest.fixture(scope="session", autouse=True)
def composition_cache():
    """Cache what Hydra composes in the process of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        cache_compositions(patch)
        yield
