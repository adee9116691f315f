"""Explain, under a report, how its numbers were compared.

A report gets the note of a number only if it shows such a number.
"""

from collections.abc import Iterator, Sequence

from runner.config.precision_keys import omitted_key_messages
from runner.sweeps.verdict.compare import (
    BASELINE,
    MIN_GAIN_ONE_SEED,
    MIN_GAIN_SEEDS,
    Comparison,
    Group,
    sweep_letter,
)

TEST_SOURCES = {
    "paired t": "paired t, Student 1908, over equal seeds",
    "Welch": "Welch 1947; paired t where the seeds of both are the same",
}
QUALITY_NOTE = """the last evaluation's, mean ± sample standard deviation (number of seeds);
diverged jobs are not in the mean. Seeds: {seeds}."""
CHANGE_NOTE = "against what the checkpoint reached in the precision it was trained in."
VERDICT_NOTE = """difference of the means with its 95 % interval ({test}). An interval that contains
0 is no measurable difference, which is not equality: more seeds narrow it. Each is judged on its
own: of 20 equal precisions one falls outside by chance."""
SPEED_NOTE = """examples/s of training, without the first block of steps and without evaluations (in
mode=evaluate, of the evaluation); the median of the seeds' ratios where the seeds match, else of
the medians, with the range over seeds. Called faster or slower where the range excludes 1 and the
median is more than {several:.0%} from it ({single:.0%} with one seed)."""
TWO_SWEEPS_NOTE = f"""the jobs of A and of B are compared with {BASELINE} of A. B's seeds are paired
with A's where both are the same. Whatever differs between A and B may be the cause of a verdict on
B."""
ROUNDING_NOTE = """Compiled code with train.compile_rounding=fused leaves out the roundings of half
precision between the operations that it fuses; eager rounds after each one, as uncompiled."""
CPU_MEMORY_NOTE = """weights plus optimizer state, without activations. The process's resident set
is not compared: it includes the memory of earlier jobs."""
GPU_MEMORY_NOTE = "peak of allocated device memory."


def report_footnotes(compared: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """Yield (term, explanation) for every kind of number that the report compares."""
    finished = [comparison.group for comparison in compared if comparison.group.finished_count]
    yield from _quality_notes(finished)
    yield from _verdict_and_speed_notes(compared)
    if any(sweep_letter(group.name) for group in finished):
        yield "Two sweeps", TWO_SWEEPS_NOTE
    rounding = _rounding_message(finished)
    if rounding:
        yield "Rounding between fused operations", rounding
    left_out = _left_out_messages(compared)
    if left_out:
        yield "Keys", left_out
    yield from _memory_notes(finished)


def _quality_notes(finished: Sequence[Group]) -> Iterator[tuple[str, str]]:
    if any(group.quality for group in finished):
        jobs = [job for group in finished for job in group.jobs]
        seeds = sorted({job.seed for job in jobs if job.seed is not None})
        seed_list = ", ".join(map(str, seeds)) or "unknown"
        yield "Quality", QUALITY_NOTE.format(seeds=seed_list)
    if any(group.change for group in finished):
        yield "Change", CHANGE_NOTE


def _verdict_and_speed_notes(compared: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    differences = [comparison.difference for comparison in compared if comparison.difference]
    tests = {difference.test for difference in differences if difference.test}
    if tests:
        # Welch's note names the paired test, too: groups of one report can need either.
        source = TEST_SOURCES["Welch" if "Welch" in tests else "paired t"]
        yield "Verdict", VERDICT_NOTE.format(test=source)
    others = [comparison for comparison in compared if not comparison.is_baseline]
    if any(comparison.speed_ratio for comparison in others):
        note = SPEED_NOTE.format(several=MIN_GAIN_SEEDS, single=MIN_GAIN_ONE_SEED)
        yield "Speed", note


def _rounding_message(finished: Sequence[Group]) -> str:
    """Return which groups compiled with which rounding; empty where none compiled."""
    names: dict[str, list[str]] = {}
    for group in finished:
        for rounding in sorted({job.fused_rounding or "uncompiled" for job in group.jobs}):
            names.setdefault(rounding, []).append(group.name)
    if [*names] == ["uncompiled"]:
        return ""
    parts = [f"{rounding}: {', '.join(groups)}" for rounding, groups in names.items()]
    return f"{'; '.join(parts)}. {ROUNDING_NOTE}" if parts else ""


def _memory_notes(finished: Sequence[Group]) -> Iterator[tuple[str, str]]:
    if any(group.is_on_cpu for group in finished):
        yield "Memory on a CPU", CPU_MEMORY_NOTE
    if any(group.peak_mib for group in finished if not group.is_on_cpu):
        yield "Memory on a GPU", GPU_MEMORY_NOTE


def _left_out_messages(compared: Sequence[Comparison]) -> str:
    """Return which keys of the command which precisions ran without; empty for none."""
    jobs = [job for comparison in compared for job in comparison.group.jobs]
    pairs = dict.fromkeys(f"{job.precision} {key}" for job in jobs for key in job.left_out)
    return " ".join(omitted_key_messages(list(pairs)))
