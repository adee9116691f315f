"""Explain under a report how its numbers were compared; only what the report shows."""

from collections.abc import Iterator, Sequence

from runner.config.precision_keys import omitted_key_messages
from runner.sweep.report.compare import MIN_GAIN_ONE_SEED, MIN_GAIN_SEEDS, Comparison, Group

TESTS = {
    "paired t": "paired t, Student 1908, over equal seeds",
    "Welch": "Welch 1947; paired t where the seeds of both are the same",
}
QUALITY = """the last evaluation's, mean ± sample standard deviation (number of seeds); diverged
jobs are not in the mean. Seeds: {seeds}."""
CHANGE = "against what the checkpoint reached in the precision it was trained in."
VERDICT = """difference of the means with its 95 % interval ({test}). An interval that contains 0 is
no measurable difference, which is not equality: more seeds narrow it. Each is judged on its own: of
20 equal precisions one falls outside by chance."""
SPEED = """examples/s of training, without the first block of steps and without evaluations (in
mode=evaluate, of the evaluation); the median of the seeds' ratios where the seeds match, else of
the medians, with the range over seeds. Called faster or slower where the range excludes 1 and the
median is more than {several:.0%} from it ({single:.0%} with one seed)."""
CPU = """weights plus optimizer state, without activations. The process's resident set is not
compared: it includes what earlier jobs left."""
GPU = "peak of allocated device memory."


def footnotes(compared: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """Yield (term, explanation) of everything that the report compares."""
    finished = [c.group for c in compared if c.group.finished_count]
    yield from _quality_notes(finished)
    yield from _comparison_notes(compared)
    if messages := _left_out_messages(compared):
        yield "Keys", messages
    if any(group.is_on_cpu for group in finished):
        yield "Memory on a CPU", CPU
    if any(not group.is_on_cpu and group.peak_mib for group in finished):
        yield "Memory on a GPU", GPU


def _quality_notes(finished: Sequence[Group]) -> Iterator[tuple[str, str]]:
    if any(group.quality for group in finished):
        jobs = [job for group in finished for job in group.jobs]
        seeds = sorted({job.seed for job in jobs if job.seed is not None})
        yield "Quality", QUALITY.format(seeds=", ".join(map(str, seeds)) or "unknown")
    if any(group.change for group in finished):
        yield "Change", CHANGE


def _comparison_notes(compared: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    differences = [c.difference for c in compared if c.difference]
    tests = {difference.test for difference in differences if difference.test}
    if tests:
        yield "Verdict", VERDICT.format(test=TESTS["Welch" if "Welch" in tests else "paired t"])
    if any(c.speed_ratio and not c.is_baseline for c in compared):
        yield "Speed", SPEED.format(several=MIN_GAIN_SEEDS, single=MIN_GAIN_ONE_SEED)


def _left_out_messages(compared: Sequence[Comparison]) -> str:
    """Return which keys of the command which precisions ran without; empty for none."""
    jobs = [job for c in compared for job in c.group.jobs]
    pairs = [f"{job.precision} {key}" for job in jobs for key in job.left_out]
    return " ".join(omitted_key_messages(list(dict.fromkeys(pairs))))
