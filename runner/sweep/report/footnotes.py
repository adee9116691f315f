"""How a report compared, said under it."""

from collections.abc import Iterator, Sequence

from runner.config.precision_keys import left_out_messages
from runner.sweep.report.compare import SURE_SEEDS, SURE_SINGLE, Comparison

TESTS = {
    "paired t": "paired t, Student 1908, over equal seeds",
    "Welch": "Welch 1947; paired t where the seeds of both are the same",
}
QUALITY = """the last evaluation's, mean ± sample standard deviation (number of seeds); diverged
jobs are not in the mean. Seeds: {seeds}."""
CHANGE = "against what the checkpoint reached in the precision it was trained in."
VERDICT = """difference of the means with its 95 % interval ({test}). An interval that holds 0 is no
measurable difference, which is not equality: more seeds narrow it. Each is judged on its own: of 20
equal precisions one falls outside by chance."""
SPEED = """examples/s of training, without the first block of steps and without evaluations (in
mode=evaluate, of the evaluation); the median of the seeds' ratios where the seeds match, else of
the medians; the range beside it. Called faster or slower where the range leaves out 1 and the
median is more than {several:.0%} from it ({single:.0%} with one seed)."""
CPU = """weights plus optimizer state, without activations. The process's resident set is not
compared: it holds what earlier jobs left."""
GPU = "peak of allocated device memory."


def footnotes(compared: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """(what, how) of everything that the report compares."""
    done = [c.group for c in compared if c.group.finished]
    seeds = sorted({j.seed for g in done for j in g.jobs if j.seed is not None})
    if any(g.quality for g in done):
        yield "Quality", QUALITY.format(seeds=", ".join(map(str, seeds)) or "unknown")
    if any(g.change for g in done):
        yield "Change", CHANGE
    tests = {c.quality.test for c in compared if c.quality and c.quality.test}
    if tests:
        yield "Verdict", VERDICT.format(test=TESTS["Welch" if "Welch" in tests else "paired t"])
    if any(c.speed and not c.is_base for c in compared):
        yield "Speed", SPEED.format(several=SURE_SEEDS, single=SURE_SINGLE)
    if left := _left_out(compared):
        yield "Keys", left
    if any(g.on_cpu for g in done):
        yield "Memory on a CPU", CPU
    if any(not g.on_cpu and g.peak_mib for g in done):
        yield "Memory on a GPU", GPU


def _left_out(compared: Sequence[Comparison]) -> str:
    """Return which keys of the command which precisions ran without; empty for none."""
    jobs = [job for c in compared for job in c.group.jobs]
    pairs = [f"{job.precision} {key}" for job in jobs for key in job.left_out]
    return " ".join(left_out_messages(list(dict.fromkeys(pairs))))
