"""Compose run specs from Python as the command line does, beside a program's own use of Hydra."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict, read_write

from runner.config.hydra_plugins import VERSION_BASE
from runner.config.messages import COMPOSE_ERRORS, explain
from runner.config.overrides import as_typed, check_config_dir, rewrite_arguments
from runner.config.resolve import check_run_keys, register_schema, resolve_spec
from runner.core import ConfigError, Invocation, Mode, RunSpec, errors, fmt, secrets, torchrun
from runner.rooms import install_rooms

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def check_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a function that raises ConfigError for an argument that it does not take."""
    known = [*signature(function).parameters]

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for name in kwargs.keys() - known:
            near = "".join(f" Type {each}=." for each in errors.nearest_names(name, known))
            allowed = ", ".join(known)
            raise ConfigError(f"{function.__name__} takes no {name}=.{near} Allowed: {allowed}.")
        return function(*args, **kwargs)

    return call


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> RunSpec:
    """Return the run spec that a command's overrides compose to.

    Args:
        overrides: words of a command, as in ["precision=16-mixed", "train.max_steps=100"].
        config_dir: folder of configs of one's own, as after --config-dir.

    Returns:
        A frozen dataclass of plain values, to read, to change with dataclasses.replace, and to give
        to runner.run.

    Raises:
        ConfigError: the overrides do not compose, or describe several runs.
    """
    spec, _, _ = compose_run(overrides, config_dir)
    return spec


def compose_run(
    overrides: Sequence[str], config_dir: str | Path | None = None, out: str | Path | None = None
) -> tuple[RunSpec, Path, Invocation]:
    """Compose the overrides of one run; return its spec, its folder and what was typed.

    Args:
        overrides: words of a command.
        config_dir: folder of configs of one's own.
        out: the run's folder; None takes that of the config, which is named by the time.

    Raises:
        ConfigError: the overrides do not compose, or describe several runs.
    """
    words = check_texts(overrides)
    for word in words:
        key, _, value = word.partition("=")
        advises = key == "mode" and Mode.named(value).chooses_jobs
        if advises or key == "hydra.mode" or key.partition(".")[0] == "sweep":
            function = "advise" if value == "advise" else "sweep"
            raise ConfigError(f"{word} describes several runs. Call runner.{function}([...]).")
    words = [*torchrun.command_of_rank(rewrite_arguments(words))]
    if out is not None:
        words.append(f"hydra.run.dir={fmt.quote_value(str(out))}")
    folder = check_config_dir(config_dir)
    search_path = []
    if folder is not None:
        search_path.append(f"hydra.searchpath=[{fmt.quote_value(f'file://{folder.absolute()}')}]")
    install_rooms()
    register_schema()
    try:
        with separate_hydra(), hydra.initialize_config_module("runner.conf", **VERSION_BASE):
            composed = hydra.compose("config", [*words, *search_path], return_hydra_config=True)
            HydraConfig.instance().set_config(composed)
            check_run_keys(composed)
            run_folder = str(composed.hydra.run.dir)
            choices = {str(k): str(v) for k, v in composed.hydra.runtime.choices.items() if v}
            with read_write(composed), open_dict(composed):
                del composed["hydra"]
            # Values of a checkpoint replace groups, whose interpolations may not resolve without
            # them.
            reads_checkpoint = bool(composed.checkpoint.path or composed.checkpoint.resume)
            spec = resolve_spec(composed, allow_unresolved=reads_checkpoint)
    except COMPOSE_ERRORS as error:
        text = explain(error, words)
        several = re.match("(.+) is a list of values, ", text)
        if several:
            text = (
                f"{several[1]} lists several values. Call runner.sweep([...]) for a run of each; "
                "for a value that is a list type [a,b]."
            )
        raise ConfigError(text) from error
    content: Any = OmegaConf.to_container(composed)
    typed = tuple(secrets.redact_override(as_typed(word)) for word in words)
    invocation = Invocation(
        choices,
        # The second is torchrun.command_of_rank's.
        tuple(w for w in typed if not w.startswith(("hydra.run.dir=", "hydra.output_subdir="))),
        config_dir=None if folder is None else str(folder),
        composed_config=content,
    )
    return spec, Path(run_folder), invocation


def check_texts(overrides: Sequence[str]) -> list[str]:
    """Return the words of a command, of one run or several: of those of a key the last one.

    Raises:
        ConfigError: they are no list of texts, or hold a flag.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"{overrides!r} is one text. Give a list of overrides, as in {overrides.split()!r}."
        )
    for word in overrides:
        if not isinstance(word, str):
            raise ConfigError(
                f"{word!r} is of type {type(word).__name__}. Give overrides as texts, as in "
                "'precision=16-mixed'."
            )
        if word.startswith("-"):
            raise ConfigError(
                f"{word} is an option of the command line. Give overrides only (key=value); "
                "config_dir= stands for --config-dir, and runner.sweep for --multirun."
            )
    # A command's keys are typed once, but a program adds words to a list of its own.
    return [*{word.partition("=")[0]: word for word in overrides}.values()]


@contextmanager
def separate_hydra() -> Iterator[None]:
    """Context without the state of Hydra that the calling program may have."""
    previous = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        # Hydra replaces its instances by copies when a context of its own ends.
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = previous
