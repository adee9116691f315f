"""Read the run or sweep that advise.baseline names, and check that it can be compared with."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from runner.config.overrides import path_exists
from runner.config.schema import RunSpec
from runner.modes.result import RunResult
from runner.modes.run_metadata import config_text
from runner.sweeps.report.load import (
    Job,
    JobSettings,
    flat_config,
    load_from_folder,
    load_from_store,
    read_settings,
    result_of_run,
    stored_settings,
)
from runner.sweeps.report.rebuild import existing_store, find_parent_run
from runner.sweeps.report.wording import join_names
from runner.sweeps.verdict.compare import BASELINE
from runner.utils.errors import ConfigError
from runner.utils.formatting import first_names
from runner.utils.layout import MANIFEST

_COMPARED_SECTIONS = ("model", "adapter", "data", "task", "optimizer", "scheduler", "train", "init")
"""Sections of a config that decide what a seed trains."""
_IGNORED_KEYS = (
    *("train.epochs", "train.max_steps", "train.max_seconds", "train.eval_every"),
    *("train.early_stop", "train.log_every", "train.num_workers", "train.data_on_device"),
    *("data.root", "data.path", "data.num_workers"),
)
"""Keys in these sections that change no step, or that the advisor sets."""
_ABSENT_VALUES = ("", "null", "None", "false", "False", "[]", "{}")
"""Values of a key that mean the same as its absence in a config of another version."""
MAX_DIFFERING_KEYS = 5
"""Config keys that the message of a baseline with other settings names."""


def read_recorded_baseline(name: str, spec: RunSpec, judged: Sequence[str]) -> list[RunResult]:
    """Read a run or a sweep as the baseline of a command.

    Args:
        name: folder or MLflow id.
        spec: of the command; the runs must have trained the same but for precision and seed.
        judged: the precisions that are compared with it, whose jobs in a sweep are left out.

    Returns:
        Results of finished runs of one precision and one length, a seed each, with the precision's
        name as their group; one or more.

    Raises:
        ConfigError: there is no such run or sweep, or it is no baseline of this command.
        TrackingError: the store does not answer.
    """
    jobs = [job for job in _read_jobs(name, spec) if job.result.outcome == "finished"]
    precision = _chosen_precision(name, [job.result.precision for job in jobs], judged)
    jobs = [job for job in jobs if job.result.precision == precision]
    results = [job.result for job in jobs]
    seeds = [result.seed for result in results]
    if len(set(seeds)) < len(seeds) or None in seeds:
        raise ConfigError(
            f"advise.baseline={name} has several runs of {precision} for one seed, and runs are "
            "compared seed by seed. Name a sweep over seeds alone."
        )
    lengths = {result.steps for result in results}
    if any(result.steps < result.planned_steps for result in results):
        raise ConfigError(
            f"advise.baseline={name} has a run that ended before its last step, as with "
            "train.early_stop or train.max_seconds. Name runs that took all their steps."
        )
    if len(lengths) > 1:
        raise ConfigError(
            f"advise.baseline={name}: its runs have {join_names(map(str, sorted(lengths)))} steps, "
            "and runs of unequal lengths are no baseline. Name a sweep over seeds alone."
        )
    _check_same_settings(name, [job.read_settings() for job in jobs], spec)
    return [
        replace(result, group=precision, label=f"{precision} seed={result.seed}")
        for result in results
    ]


def _read_jobs(name: str, spec: RunSpec) -> Sequence[Job]:
    """Return the results in a folder or in the command's store, with what each ran with."""
    folder = Path(name)
    if path_exists(name) and folder.is_dir():
        if (folder / MANIFEST).is_file():
            return load_from_folder(folder).jobs
        try:
            return [Job(RunResult.read(folder), read_settings=partial(read_settings, folder))]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"advise.baseline={name}: the folder holds no finished run and no sweep. Name a "
                "precision, or the folder or MLflow id of a run or a sweep."
            ) from error
    from runner.tracking.reader import Reader  # imports mlflow

    tracking = {f"tracking.{key}": value for key, value in spec.tracking.items() if value}
    try:
        reader = Reader(existing_store(name, tracking))
        run = reader.run(name) if name.isalnum() else None
        if run is not None and run.tags.get("role") != "sweep":
            settings = partial(stored_settings, reader, run)
            return [Job(result_of_run(reader, run), read_settings=settings)]
        parent = find_parent_run(reader, name)
    except ConfigError as error:
        raise ConfigError(
            f"advise.baseline={name} is no precision, and neither a folder here nor a run or sweep "
            "of the store. Type python -m runner doctor for the precisions, or tracking.uri=... "
            "for another store."
        ) from error
    return load_from_store(reader, parent).jobs


def _chosen_precision(name: str, precisions: Sequence[str], judged: Sequence[str]) -> str:
    """Return the precision of a baseline's runs; of several the one that reports compare with."""
    distinct = dict.fromkeys(precisions)
    others = [precision for precision in distinct if precision not in judged]
    if len(others) == 1:
        return others[0]
    if BASELINE in others:
        return BASELINE
    if not distinct:
        raise ConfigError(f"advise.baseline={name}: none of its runs has finished.")
    if not others:
        raise ConfigError(
            f"advise.baseline={name} has runs of {join_names(distinct)} alone, which is what is to "
            "be judged. Name a run or sweep of another precision."
        )
    raise ConfigError(
        f"advise.baseline={name} has runs of {join_names(others)}. Name a run or sweep of one "
        "precision."
    )


def _check_same_settings(name: str, jobs: Sequence[JobSettings], spec: RunSpec) -> None:
    """Refuse runs that trained something else than the command would."""
    own = flat_config(config_text(spec))
    differing: dict[str, None] = {}
    for job in jobs:
        if not job.config:
            raise ConfigError(
                f"advise.baseline={name} has a run without its config.yaml: it cannot be known "
                "whether it trained the same. Name a run that has one."
            )
        for key in dict.fromkeys([*job.config, *own]):
            values = [each.get(key, "") for each in (job.config, own)]
            is_same = values[0] == values[1] or all(value in _ABSENT_VALUES for value in values)
            is_compared = key.partition(".")[0] in _COMPARED_SECTIONS and key not in _IGNORED_KEYS
            if is_compared and not is_same:
                differing[key] = None
    if not differing:
        return
    config = jobs[0].config
    texts = [
        f"{key} ({config.get(key, 'none')} there, {own.get(key, 'none')} here)" for key in differing
    ]
    raise ConfigError(
        f"advise.baseline={name} trained with other settings than this command: "
        f"{first_names(texts, MAX_DIFFERING_KEYS)}. Type the same settings."
    )
