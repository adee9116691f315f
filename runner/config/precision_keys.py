"""Leave out keys under `precision` in those jobs of a sweep whose precision does not have them."""

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
from runner.config.messages import has_key, precisions_with_key
from runner.utils.errors import ConfigError

KEY_PREFIX = "precision."
_EMULATE = "precision.emulate"
_PRECISION_GROUPS = ("precision", "experiment")  # groups whose options decide a job's precision


def omitted_keys(config: DictConfig, runs_as_it_is: Callable[[DictConfig], bool]) -> list[str]:
    """Return `<precision> <key>` for each key that a precision of a sweep does not take.

    Args:
        config: the sweep's. Keys of its preset are marked as new ones, so that jobs compose.
        runs_as_it_is: whether the precision of a job's config runs on this machine's device and
            cannot be emulated there.

    Raises:
        ConfigError: no precision of the sweep takes a key.
    """
    typed = _overrides(config)
    extras = {_key(o): o for o in typed if _key(o).startswith(KEY_PREFIX)}
    if not extras:
        return []
    _mark_preset_keys(config)
    jobs = [job for words in _combinations(typed) if (job := _compose(config, words)) is not None]
    rows = {_option(job): job for job in jobs}
    taken = {key: [name for name, job in rows.items() if has_key(job, key)] for key in extras}
    unknown = [key for key in extras if not taken[key]]
    if rows and unknown:
        raise ConfigError(*(_unknown_key_message(extras[key], [*rows]) for key in unknown))
    pairs = [(name, key) for key in extras for name in rows if name not in taken[key]]
    if _EMULATE in extras and _wants(extras[_EMULATE]) and not _is_remote(config):
        running = [name for name in taken[_EMULATE] if runs_as_it_is(rows[name])]
        pairs += [(name, _EMULATE) for name in running]
    return [f"{name} {key}" for name, key in pairs]


def omitted_key_messages(pairs: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each key that some precisions run without."""
    found: dict[str, list[str]] = {}
    for pair in pairs:
        name, _, key = pair.partition(" ")
        found.setdefault(key, []).append(name)
    for key, names in found.items():
        whom = ", ".join(names)
        yield f"{key} is left out for {whom}: it has no such key, or runs here without it."


def remove_keys(config: DictConfig, keys: Sequence[str]) -> None:
    """Remove keys that a job's precision does not take from the job's config."""
    with read_write(config), open_dict(config):
        for key in keys:
            *path, last = key.split(".")
            node = OmegaConf.select(config, ".".join(path))
            if isinstance(node, DictConfig):
                node.pop(last, None)
            for end in range(len(path), 1, -1):  # a mapping that held nothing else
                node = OmegaConf.select(config, ".".join(path[:end]))
                if isinstance(node, DictConfig) and not node:
                    OmegaConf.select(config, ".".join(path[: end - 1])).pop(path[end - 1])


def without_keys(overrides: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """Return a job's overrides without keys that its precision does not take, and without the
    marks of those that it takes."""
    bare = (
        text.lstrip("+") if text.lstrip("+").startswith(KEY_PREFIX) else text for text in overrides
    )
    return tuple(text for text in bare if text.partition("=")[0] not in keys)


def _overrides(config: DictConfig) -> list[Override]:
    """Return a preset's overrides and those of the command, which come last."""
    params = config.hydra.sweeper.get("params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    words += [str(text) for text in config.hydra.overrides.task]
    return OverridesParser.create(config_loader=_loader()).parse_overrides(words)


def _mark_preset_keys(config: DictConfig) -> None:
    """Mark a preset's keys under precision as new ones, as the command line's are."""
    params = config.hydra.sweeper.get("params") or {}
    if not any(str(key).startswith(KEY_PREFIX) for key in params):
        return
    marked = {f"++{k}" if str(k).startswith(KEY_PREFIX) else k: v for k, v in params.items()}
    with read_write(config), open_dict(config):
        config.hydra.sweeper.params = marked


def _combinations(typed: Sequence[Override]) -> Iterator[list[str]]:
    """Yield overrides of one job for each choice of what decides a precision: without keys under
    precision, and without other keys that the sweep varies."""
    last = {_key(o): o for o in typed}
    kept = [o for key, o in last.items() if not key.startswith(KEY_PREFIX)]
    choosing = [o for o in kept if o.is_discrete_sweep() and _key(o) in _PRECISION_GROUPS]
    fixed = [str(o.input_line) for o in kept if not o.is_sweep_override()]
    options = ([f"{_key(o)}={v}" for v in o.sweep_string_iterator()] for o in choosing)
    for chosen in product(*options):
        yield [*fixed, *chosen]


def _compose(config: DictConfig, words: Sequence[str]) -> DictConfig | None:
    """Return a job's config; None if it does not compose, which that job reports when it runs."""
    every = [str(text) for text in config.hydra.overrides.hydra]
    with suppress(HydraException, OmegaConfBaseException):
        return _loader().load_configuration(
            config.hydra.job.config_name, [*every, *words], RunMode.RUN
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
