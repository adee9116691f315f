"""Omit keys under `precision` from those jobs of a sweep whose precision does not have them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.config.hydra_plugins import REMOTE
from runner.config.invocation import override_texts
from runner.config.messages import has_key, precisions_with_key
from runner.utils.errors import ConfigError

KEY_PREFIX = "precision."
_EMULATE = "precision.emulate"
_PRECISION_GROUPS = ("precision", "experiment")
"""Groups whose options decide a job's precision."""


def omitted_key_pairs(config: DictConfig, runs_as_it_is: Callable[[DictConfig], bool]) -> list[str]:
    """Return `<precision> <key>` for each key that a precision of a sweep does not take.

    Args:
        config: config of the sweep. Keys of its preset are marked as new ones in place, so that
            jobs compose.
        runs_as_it_is: returns whether the precision of a job's config runs on this machine's device
            and cannot be emulated there.

    Raises:
        ConfigError: no precision of the sweep takes a key.
    """
    overrides = _overrides(config)
    by_key = {}
    for override in overrides:
        key = _key(override)
        if key.startswith(KEY_PREFIX):
            by_key[key] = override
    if not by_key:
        return []
    _mark_preset_keys(config)
    jobs = _jobs_by_precision(config, overrides)
    omitted = []
    problems = []
    for key, override in by_key.items():
        lacking = [name for name, job in jobs.items() if not has_key(job, key)]
        # Without a job that composes nothing is known: each job reports its own error.
        if jobs and len(lacking) == len(jobs):
            problems.append(_unknown_key_message(override, [*jobs]))
        omitted += [f"{name} {key}" for name in lacking]
    if problems:
        raise ConfigError(*problems)
    # Another machine may lack the hardware, so that its jobs need the emulation.
    if _EMULATE in by_key and _wants(by_key[_EMULATE]) and not _is_remote(config):
        for name, job in jobs.items():
            if has_key(job, _EMULATE) and runs_as_it_is(job):
                omitted.append(f"{name} {_EMULATE}")
    return omitted


def _jobs_by_precision(config: DictConfig, overrides: Sequence[Override]) -> dict[str, DictConfig]:
    """Return a job's config for each precision of a sweep."""
    jobs = {}
    for words in _combinations(overrides):
        job = _compose(config, words)
        if job is not None:
            jobs[_option(job)] = job
    return jobs


def omitted_key_messages(pairs: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each key that some precisions run without.

    Args:
        pairs: from omitted_key_pairs.
    """
    names_by_key: dict[str, list[str]] = {}
    for pair in pairs:
        name, _, key = pair.partition(" ")
        names_by_key.setdefault(key, []).append(name)
    for key, names in names_by_key.items():
        listed = ", ".join(names)
        yield f"{key} is left out for {listed}: it has no such key, or runs here without it."


def remove_keys(config: DictConfig, keys: Sequence[str]) -> None:
    """Remove keys that a job's precision does not take from the job's config."""
    with read_write(config), open_dict(config):
        for key in keys:
            *path, last = key.split(".")
            node = OmegaConf.select(config, ".".join(path))
            if isinstance(node, DictConfig):
                node.pop(last, None)
            # Also remove each mapping that the removal has emptied, from the innermost outwards:
            # the precision would refuse it as an argument.
            for depth in range(len(path), 1, -1):
                node = OmegaConf.select(config, ".".join(path[:depth]))
                if isinstance(node, DictConfig) and not node:
                    parent = OmegaConf.select(config, ".".join(path[: depth - 1]))
                    parent.pop(path[depth - 1])


def without_keys(overrides: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """Return a job's overrides without these keys, and without `++` before precision's other keys.

    Args:
        overrides: of the job.
        keys: that the job's precision does not take.
    """
    remaining = []
    for text in overrides:
        unmarked = text.lstrip("+")
        override = unmarked if unmarked.startswith(KEY_PREFIX) else text
        if override.partition("=")[0] not in keys:
            remaining.append(override)
    return tuple(remaining)


def _overrides(config: DictConfig) -> list[Override]:
    """Return a preset's overrides and those of the command, which come last."""
    params = config.hydra.sweeper.get("params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    words += override_texts(config.hydra.overrides.task)
    return OverridesParser.create(config_loader=_loader()).parse_overrides(words)


def _mark_preset_keys(config: DictConfig) -> None:
    """Mark a preset's keys under precision as new ones, as the command line's are.

    Hydra refuses an override of a key that one of the sweep's precisions does not have.
    """
    params = config.hydra.sweeper.get("params") or {}
    if not any(str(key).startswith(KEY_PREFIX) for key in params):
        return
    marked = {}
    for key, value in params.items():
        is_extra = str(key).startswith(KEY_PREFIX)
        marked[f"++{key}" if is_extra else key] = value
    with read_write(config), open_dict(config):
        config.hydra.sweeper.params = marked


def _combinations(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield the overrides of one job for each choice of what decides a precision.

    They hold neither keys under precision nor other keys that the sweep varies.
    """
    # The command's overrides come after the preset's, and Hydra takes the last one of a key.
    last_by_key = {_key(override): override for override in overrides}
    fixed = []
    choices = []
    for key, override in last_by_key.items():
        if key.startswith(KEY_PREFIX):
            continue
        if not override.is_sweep_override():
            fixed.append(str(override.input_line))
        elif override.is_discrete_sweep() and key in _PRECISION_GROUPS:
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    for choice in product(*choices):
        yield [*fixed, *choice]


def _compose(config: DictConfig, words: Sequence[str]) -> DictConfig | None:
    """Return a job's config; None if it does not compose, which that job reports when it runs."""
    hydra_overrides = override_texts(config.hydra.overrides.hydra)
    with suppress(HydraException, OmegaConfBaseException):
        return _loader().load_configuration(
            config.hydra.job.config_name, [*hydra_overrides, *words], RunMode.RUN
        )
    return None


def _unknown_key_message(override: Override, names: Sequence[str]) -> str:
    key = _key(override)
    others = precisions_with_key(key.removeprefix(KEY_PREFIX))
    hint = f" Of the built-in ones, {', '.join(others)} have it." if others else ""
    return (
        f"{str(override.input_line).lstrip('+')}: no precision of this sweep ({', '.join(names)}) "
        f"takes {key}.{hint} Leave it out, or add a precision that it is for."
    )


def _wants(override: Override) -> bool:
    """Return whether an override sets a key to true in any job."""
    if override.is_discrete_sweep():
        return any(value.lower() == "true" for value in override.sweep_string_iterator())
    return override.value() is True


def _is_remote(config: DictConfig) -> bool:
    """Return whether the jobs may run on other devices than this machine's."""
    return config.hydra.launcher.get("_target_") == REMOTE


def _option(config: DictConfig) -> str:
    return str(config.hydra.runtime.choices.get("precision"))


def _key(override: Override) -> str:
    return override.get_key_element().lstrip("+~")


def _loader() -> ConfigLoader:
    return GlobalHydra.instance().config_loader()
