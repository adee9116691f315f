"""Add values to the lists of a sweep that has run: `sweep.resume=<folder> seed=0,1,2,3,4`.

Jobs that are there keep their numbers and folders; those of the new values come after them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner.config.hydra_plugins import EXTENDED, register
from runner.config.overrides import as_typed, override_key, rewrite_arguments
from runner.sweeps.manifest import Manifest
from runner.utils.errors import ConfigError
from runner.utils.files import read_text

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def is_list_of_values(word: str) -> bool:
    """Return whether a word of a command may extend a sweep's list: a key with several values."""
    if word.startswith(("-", "hydra.", "hydra/", "sweep", "tracking.")) or "=" not in word:
        return False
    return len(_values(word)) > 1


def extend_command(folder: Path, command: Sequence[str], added: Sequence[str]) -> list[str]:
    """Return the words of a sweep's command with longer lists.

    Args:
        folder: of the sweep.
        command: words of the sweep's command after `python -m runner`.
        added: words for which is_list_of_values() holds.

    Raises:
        ConfigError: the sweep does not vary a key, or its values are not all in the new list.
    """
    if not added:
        return [*command]
    params = _preset_params(folder)
    words = [*command]
    for word in rewrite_arguments(added):
        key = override_key(word)
        places = [i for i, text in enumerate(words) if override_key(text) == key]
        if places:
            known = _values(words[places[-1]])
        elif key in params:
            known = _values(f"{key}={params[key]}")
        else:
            raise ConfigError(
                f"{as_typed(word)}: the sweep's command does not set {key}. Only lists of its own "
                "may get more values; another key is a new sweep."
            )
        extended = f"{key}={','.join(_extended_values(key, known, _values(word)))}"
        if places:
            words[places[-1]] = extended
        else:
            words.append(extended)
    return words


def _extended_values(key: str, known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return a sweep's values of a key, then the new ones.

    Raises:
        ConfigError: a value of the sweep is not wanted any more.
    """
    missing = [value for value in known if value not in wanted]
    if missing:
        raise ConfigError(
            f"{key}={','.join(wanted)}: the sweep has {key}={','.join(known)}, and a list may only "
            f"get longer. Type {key}={','.join([*known, *(v for v in wanted if v not in known)])}."
        )
    return [*known, *(value for value in wanted if value not in known)]


def _values(word: str) -> list[str]:
    """Return the values that an override lists; one value, or none if it cannot be read."""
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException:
        return []
    if not override.is_sweep_override():
        return [word.partition("=")[2]]
    # A search's intervals have no list of values.
    return list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []


def _preset_params(folder: Path) -> dict[str, str]:
    """Return the lists that a preset of the sweep has, from the config that Hydra has saved.

    Raises:
        ConfigError: the sweep is a search or of mode=advise, whose jobs follow from results.
    """
    path = folder / "multirun.yaml"
    if not path.is_file():
        return {}
    try:
        content: Any = OmegaConf.to_container(OmegaConf.create(read_text(path)), resolve=False)
        # Values stay as they are written: an interpolation could read this machine's environment.
        sweeper = content["hydra"]["sweeper"]
        target, params = sweeper["_target_"], dict(sweeper.get("params") or {})
    except (OSError, ValueError, KeyError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}.") from error
    if target not in (_BASIC_SWEEPER, EXTENDED):
        raise ConfigError(
            "A search chooses its jobs as results come in: it has no lists that could get longer. "
            "Leave the values out, or start a new sweep."
        )
    return {str(key): str(value) for key, value in params.items()}


def with_new_lists(manifest: Manifest, overrides: Sequence[str]) -> Manifest:
    """Return a resumed sweep's manifest, in which lists that got longer are noted.

    Args:
        manifest: of the sweep as it was.
        overrides: words that Hydra composes the jobs from now.
    """
    old = {override_key(word): word for word in map(as_typed, manifest.overrides)}
    words = list(map(as_typed, overrides))
    longer = [word for word in words if _is_longer(old.get(override_key(word), ""), word)]
    if not longer:
        return manifest
    command = [*manifest.command]
    for word in longer:
        places = [i for i, text in enumerate(command) if override_key(text) == override_key(word)]
        if places:
            command[places[-1]] = word
        else:
            command.append(word)
    earlier = [*manifest.earlier, list(manifest.overrides)]
    extended = replace(manifest, command=command, overrides=overrides, earlier=earlier)
    return extended.signed() if manifest.is_signed_by_user else extended


def _is_longer(old: str, new: str) -> bool:
    """Return whether a word lists more values than the sweep's word of the same key."""
    return old != new and len(_values(new)) > 1 and set(_values(old)) < set(_values(new))


def use_extended_sweeper(config: DictConfig) -> None:
    """Let the jobs of a sweep whose lists got longer keep their numbers.

    Args:
        config: the sweep's; its sweeper is replaced in place.
    """
    # Not at the top: Hydra replaces the module of its sweeper when it first looks for plugins.
    from runner.sweeps.extended_sweeper import ExtendedSweeper

    register(ExtendedSweeper)
    with read_write(config), open_dict(config):
        config.hydra.sweeper._target_ = EXTENDED
