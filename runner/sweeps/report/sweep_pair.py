"""Join the jobs of two sweeps, A and B, for one report that names each job after its sweep."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from runner.modes.result import RunResult
from runner.sweeps.report.load import JobSettings, SweepData
from runner.sweeps.report.wording import join_names
from runner.sweeps.verdict.compare import BASELINE, FIRST_SWEEP, SECOND_SWEEP, group_name
from runner.utils.errors import ConfigError

_IGNORED_KEYS = ("tracking.", "checkpoint.resume", "sweep.")
"""Config keys that say where a job is recorded, and not what it computes."""
_QUALITY_KEYS = ("model.", "task.", "data.", "adapter.", "mode")
"""Config keys that say of what a quality is."""
MAX_DIFFERENCES = 12
"""Settings that the line of differences names."""


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep with what its jobs ran with.

    Attributes:
        name: folder or id, as it was typed.
        date: when it began; empty if unknown.
        settings: of each job, in the order of data.jobs.
    """

    name: str
    date: str
    data: SweepData
    settings: Sequence[JobSettings]


def join_sweeps(first: LoadedSweep, second: LoadedSweep) -> SweepData:
    """Return the jobs of two sweeps as those of one, with a note on what differs between them.

    Raises:
        ConfigError: a sweep has no job.
    """
    jobs = []
    names = []
    for word, sweep in ((FIRST_SWEEP, first), (SECOND_SWEEP, second)):
        if not sweep.data.jobs:
            raise ConfigError(
                f"{sweep.name} has no job that wrote a result. Type report <A> <B> with two sweeps "
                "that ran."
            )
        jobs += [replace(job, result=_named(job.result, word)) for job in sweep.data.jobs]
        names.append(f"{word[-1]} is {', '.join(filter(None, [sweep.name, sweep.date]))}")
    both = (first.data, second.data)
    return SweepData(
        jobs,
        [command for data in both for command in data.commands],
        is_stopped=any(data.is_stopped for data in both),
        job_count=sum(max(data.job_count, len(data.jobs)) for data in both),
        fetch_failures=[failure for data in both for failure in data.fetch_failures],
        notes=[
            f"{'; '.join(names)}. Both are compared with {BASELINE} of A.",
            *_difference_notes(first, second),
        ],
    )


def _named(result: RunResult, word: str) -> RunResult:
    """Return a result whose group, label and overrides have the word of its sweep."""
    own_words = result.label.removeprefix(result.precision)
    return replace(
        result,
        group=f"{result.precision} {word} {result.settings}".rstrip(),
        label=f"{result.precision} {word} {own_words.strip()}".rstrip(),
        overrides=[*result.overrides, word],
    )


def _difference_notes(first: LoadedSweep, second: LoadedSweep) -> Iterator[str]:
    """Yield what the jobs of A and B ran with, where it differs, in one line, and a reservation."""
    settings, others = _settings_of_shared_groups(first, second)
    if not any(each.config for each in settings) or not any(each.config for each in others):
        yield "What differs between A and B is not known: the jobs of one have no config.yaml."
        return
    keys = dict.fromkeys(key for each in (*settings, *others) for key in _values(each))
    differences = []
    quality_keys = []
    for key in keys:
        values = _value_texts(key, settings)
        other_values = _value_texts(key, others)
        if values != other_values and not key.startswith(_IGNORED_KEYS):
            differences.append(f"{key} ({values or 'none'}, {other_values or 'none'})")
            quality_keys += [key] if key.startswith(_QUALITY_KEYS) else []
    if not differences:
        yield "No setting, version or commit that A and B recorded differs."
        return
    yield f"What differs (in A, in B): {join_names(differences, MAX_DIFFERENCES)}."
    if quality_keys:
        yield (
            f"The qualities of A and B are of other models, tasks or data "
            f"({join_names(quality_keys)}): their difference is not that of the precisions."
        )


def _settings_of_shared_groups(
    first: LoadedSweep, second: LoadedSweep
) -> tuple[list[JobSettings], list[JobSettings]]:
    """Return the settings of the jobs whose groups both sweeps have; of all if they share none."""
    names, other_names = (
        {group_name(job.result) for job in sweep.data.jobs} for sweep in (first, second)
    )
    shared = names & other_names

    def of_shared(sweep: LoadedSweep) -> list[JobSettings]:
        pairs = zip(sweep.data.jobs, sweep.settings, strict=True)
        return [each for job, each in pairs if not shared or group_name(job.result) in shared]

    return of_shared(first), of_shared(second)


def _values(settings: JobSettings) -> dict[str, str]:
    return {**settings.config, **settings.environment}


def _value_texts(key: str, settings: Iterable[JobSettings]) -> str:
    """Return the values that jobs have of a key; empty if none has the key."""
    values = {_values(each).get(key, "") for each in settings if each.config}
    return ", ".join(sorted(filter(None, values)))
