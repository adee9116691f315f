"""Compare two sweeps, A and B: what they were computed from, then group by group B against A."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runner.modes.result import RunResult
from runner.sweeps.report.compare import (
    Comparison,
    Group,
    compare_two_groups,
    group_jobs,
    group_name,
)
from runner.sweeps.report.jobs import SweepData
from runner.sweeps.report.origin import JobOrigin
from runner.sweeps.report.statistics import Difference, SeedValues, quality_difference
from runner.utils.errors import ConfigError

_QUALITY_KEYS = ("model.", "task.", "adapter.", "mode")
"""Config keys that say what is trained: qualities of other models or tasks are not compared."""
_BATCH_KEYS = ("data.", "train.batch_size", "train.accumulate")
"""Config keys that say which batches a seed draws."""
_IGNORED_KEYS = ("tracking.", "checkpoint.resume", "sweep.")
"""Config keys that say where a job is recorded, and not what it computes."""
COMMIT_LENGTH = 12
"""Characters of a commit's hash that are shown."""


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep as it is compared with another one.

    Attributes:
        name: folder or id, as it was typed.
        date: when it began, for sentences; empty if unknown.
        origins: of each job, in the order of data.jobs.
    """

    name: str
    date: str
    data: SweepData
    origins: Sequence[JobOrigin]

    @property
    def results(self) -> list[RunResult]:
        """Return the results of the jobs, in their order."""
        return [job.result for job in self.data.jobs]

    def origins_of(self, jobs: Collection[RunResult]) -> list[JobOrigin]:
        """Return the origins of some of the sweep's jobs."""
        wanted = {id(job) for job in jobs}
        pairs = zip(self.data.jobs, self.origins, strict=True)
        return [origin for job, origin in pairs if id(job.result) in wanted]


@dataclass(frozen=True)
class PairComparison:
    """The group of B with the group of A of the same name.

    Attributes:
        comparison: B's group, with A's as the baseline of its ratios; its difference is B's quality
            minus A's.
        obstacle: why the qualities cannot be compared; empty if they can.
    """

    comparison: Comparison
    obstacle: str

    @property
    def first(self) -> Group:
        """Return the group of A."""
        assert self.comparison.baseline is not None
        return self.comparison.baseline

    @property
    def second(self) -> Group:
        """Return the group of B."""
        return self.comparison.group

    @property
    def ended_in_both(self) -> bool:
        """Return whether some job of A's and some job of B's group reached its end."""
        return bool(self.first.finished_count and self.second.finished_count)


@dataclass(frozen=True)
class OriginDifference:
    """A fact in which A and B differ: its name, and its values in both."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class SweepComparison:
    """Two sweeps, compared.

    Attributes:
        pairs: the groups that both have, in B's order.
        only_first, only_second: names of the groups that one sweep alone has.
        differences: what the jobs of these pairs were computed from, where it differs.
    """

    first: LoadedSweep
    second: LoadedSweep
    pairs: Sequence[PairComparison]
    only_first: Sequence[str]
    only_second: Sequence[str]
    differences: Sequence[OriginDifference]


def compare_sweeps(first: LoadedSweep, second: LoadedSweep) -> SweepComparison:
    """Compare sweep B (second) with sweep A (first).

    Raises:
        ConfigError: a sweep has no job, or they have no group in common.
    """
    for letter, sweep in (("A", first), ("B", second)):
        if not sweep.data.jobs:
            raise ConfigError(
                f"{sweep.name} (sweep {letter}) has no job that wrote a result. Type report <A> "
                "<B> with two sweeps that ran."
            )
    groups = group_jobs(first.results)
    others = group_jobs(second.results)
    matched = list(_match_groups(groups, others))
    names = {group.name for group in groups}
    other_names = {group.name for group in others}
    if not matched:
        raise ConfigError(
            f"{first.name} and {second.name} have no job in common: A has "
            f"{', '.join(sorted(names))}; B has {', '.join(sorted(other_names))}. Jobs are matched "
            "by their precision and the settings that their sweep varies."
        )
    return SweepComparison(
        first,
        second,
        [_compare_pair(first, second, one, other) for one, other in matched],
        sorted(names - other_names),
        sorted(other_names - names),
        list(_origin_differences(first, second, [one.name for one, _ in matched])),
    )


def _match_groups(
    groups: Sequence[Group], others: Sequence[Group]
) -> Iterator[tuple[Group, Group]]:
    """Yield each group of B with A's group of the same name, on the same device if there is one."""
    by_name: dict[str, list[Group]] = {}
    for group in groups:
        by_name.setdefault(group.name, []).append(group)
    for other in others:
        candidates = by_name.get(other.name, [])
        same_device = [group for group in candidates if group.device == other.device]
        for group in (same_device or candidates)[:1]:
            yield group, other


def _compare_pair(
    first: LoadedSweep, second: LoadedSweep, group: Group, other: Group
) -> PairComparison:
    """Compare a group of B with A's group of the same name."""
    origins, other_origins = _origins_of_shared_seeds(first, second, group, other)
    comparison = compare_two_groups(other, group)
    # A process's memory on a CPU and a device's memory are different numbers.
    if group.is_on_cpu != other.is_on_cpu:
        comparison = replace(comparison, memory_ratio=None)
    obstacle = _quality_obstacle(group, other, origins, other_origins)
    difference = None
    if not obstacle:
        facts = _batch_facts(origins)
        has_same_batches = bool(facts) and facts == _batch_facts(other_origins)
        difference = _quality_difference(group, other, has_same_batches)
    return PairComparison(replace(comparison, difference=difference), obstacle)


def _origins_of_shared_seeds(
    first: LoadedSweep, second: LoadedSweep, group: Group, other: Group
) -> tuple[list[JobOrigin], list[JobOrigin]]:
    """Return the origins of both groups' jobs; of the seeds that both have, if there are any."""
    shared = {job.seed for job in group.jobs} & {job.seed for job in other.jobs}
    jobs = [job for job in group.jobs if job.seed in shared] or group.jobs
    other_jobs = [job for job in other.jobs if job.seed in shared] or other.jobs
    return first.origins_of(jobs), second.origins_of(other_jobs)


def _quality_difference(group: Group, other: Group, has_same_batches: bool) -> Difference | None:
    """Return B's quality minus A's, None without both; paired by seed where batches are equal."""
    values = _quality_values(group, has_same_batches)
    other_values = _quality_values(other, has_same_batches)
    if not values or not other_values:
        return None
    return quality_difference(other_values, values, group.jobs[0].direction)


def _quality_values(group: Group, has_seeds: bool) -> SeedValues:
    """Return (seed, quality) of each complete job; the seeds are None if they pair nothing."""
    complete = [job for job in group.jobs if job.outcome == "finished"]
    known = [job for job in complete if job.quality in job.metrics]
    return [(job.seed if has_seeds else None, job.metrics[job.quality]) for job in known]


def _quality_obstacle(
    group: Group,
    other: Group,
    origins: Sequence[JobOrigin],
    other_origins: Sequence[JobOrigin],
) -> str:
    """Return why the qualities of two groups cannot be compared, empty if they can."""
    obstacles = []
    for noun, attribute in (("quality", "quality"), ("model", "model")):
        values = _known(getattr(job, attribute) for job in group.jobs)
        other_values = _known(getattr(job, attribute) for job in other.jobs)
        if values and other_values and values != other_values:
            obstacles.append(f"another {noun} ({_words(values)}, {_words(other_values)})")
    data = _known(_data_text(origin) for origin in origins)
    other_data = _known(_data_text(origin) for origin in other_origins)
    has_digests = bool(data and other_data)
    if has_digests and data != other_data:
        obstacles.append("other data (their fingerprints differ)")
    keys = _QUALITY_KEYS if has_digests else (*_QUALITY_KEYS, "data.")
    differing = [
        key
        for key, _, _ in _differing_keys(origins, other_origins)
        if key.startswith(keys) and not key.startswith("data.shuffle")
    ]
    if differing:
        obstacles.append(f"other {', '.join(differing)}")
    return "; ".join(obstacles)


def _known(values: Iterable[str]) -> set[str]:
    return set(filter(None, values))


def _words(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))


def _data_text(origin: JobOrigin) -> str:
    return ", ".join(f"{use} {digest}" for use, digest in sorted(origin.data.items()))


def _batch_facts(origins: Sequence[JobOrigin]) -> set[tuple[str, ...]]:
    """Return what decides which batches a seed draws, of each job; empty if a job has no config."""
    facts = set()
    for origin in origins:
        if not origin.config:
            return set()
        values = [f"{key}={origin.config[key]}" for key in origin.config if _is_batch_key(key)]
        facts.add((_data_text(origin), *sorted(values)))
    return facts


def _is_batch_key(key: str) -> bool:
    # Where the data are stored changes no batch.
    return key.startswith(_BATCH_KEYS) and key not in ("data.root", "data.path")


def _differing_keys(
    origins: Sequence[JobOrigin], others: Sequence[JobOrigin]
) -> list[tuple[str, str, str]]:
    """Return (key, values of A, values of B) for each config key whose values differ.

    Jobs without a config are left out; if one sweep has none, nothing can be compared.
    """
    configs = [origin.config for origin in origins if origin.config]
    other_configs = [origin.config for origin in others if origin.config]
    if not configs or not other_configs:
        return []
    keys = dict.fromkeys(key for config in (*configs, *other_configs) for key in config)
    differing = []
    for key in keys:
        if key.startswith(_IGNORED_KEYS):
            continue
        values = {config.get(key, "") for config in configs}
        other_values = {config.get(key, "") for config in other_configs}
        if values != other_values:
            differing.append((key, _words(values), _words(other_values)))
    return differing


def _origin_differences(
    first: LoadedSweep, second: LoadedSweep, names: Collection[str]
) -> Iterator[OriginDifference]:
    """Yield what the jobs of some groups were computed from, where A and B differ."""
    jobs = [job for job in first.results if group_name(job) in names]
    other_jobs = [job for job in second.results if group_name(job) in names]
    origins = first.origins_of(jobs)
    others = second.origins_of(other_jobs)

    def differing(
        name: str, value: Callable[[JobOrigin], str], missing: str = "not recorded"
    ) -> Iterator[OriginDifference]:
        values = _known(map(value, origins))
        other_values = _known(map(value, others))
        if values != other_values:
            yield OriginDifference(name, _words(values) or missing, _words(other_values) or missing)

    yield from differing("commit", _commit_text)
    for name in _fact_names(origins, others, "environment"):
        yield from differing(name, lambda origin, name=name: origin.environment.get(name, ""))
    for attribute in ("device", "model", "data", "quality"):
        values = _known(getattr(job, attribute) for job in jobs)
        other_values = _known(getattr(job, attribute) for job in other_jobs)
        if values != other_values:
            yield OriginDifference(attribute, _words(values), _words(other_values))
    for use in _fact_names(origins, others, "data"):
        yield from differing(f"{use} data", lambda origin, use=use: origin.data.get(use, ""))
    for key, values, other_values in _differing_keys(origins, others):
        yield OriginDifference(key, values, other_values)


def _fact_names(
    origins: Sequence[JobOrigin],
    others: Sequence[JobOrigin],
    attribute: Literal["environment", "data"],
) -> list[str]:
    """Return the names of the facts that any job has, each once."""
    facts: list[Mapping[str, str]] = [getattr(each, attribute) for each in (*origins, *others)]
    return list(dict.fromkeys(name for each in facts for name in each))


def _commit_text(origin: JobOrigin) -> str:
    if not origin.commit:
        return ""
    changes = " with changes that no commit holds" if origin.has_changes else ""
    return f"{origin.commit[:COMMIT_LENGTH]}{changes}"
