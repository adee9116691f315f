import math
import re
from dataclasses import replace

import numpy as np
import pytest
from job_results import CPU, GPU, finished, lost
from scipy import stats

from runner.core.run.run_result import RunResult
from runner.sweeps.report.columns import groups_table, jobs_table
from runner.sweeps.report.conclusion import best_group
from runner.sweeps.report.pages import summary_markdown
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.report.wording import difference_words, format_interval
from runner.sweeps.verdict.compare import compare_with_baselines, group_jobs
from runner.sweeps.verdict.statistics import Spread, Tolerance


def seeds(precision, qualities, speeds=(100.0, 100.0, 100.0, 100.0), **more):
    """Return a job of each seed from 0."""
    pairs = enumerate(zip(qualities, speeds, strict=False))
    return [finished(precision, s, q, examples_per_second=v, **more) for s, (q, v) in pairs]


def timed(precision, speeds, first=0):
    """Return a job for each speed, of equal quality."""
    jobs = enumerate(speeds, first)
    return [finished(precision, seed, examples_per_second=speed) for seed, speed in jobs]


def of(results, name, device=GPU):
    """Return the comparison of the group of a name on a device."""
    compared = compare_with_baselines(results)
    return next(c for c in compared if (c.group.name, c.group.device) == (name, device))


def test_jobs_that_differ_in_their_seeds_form_a_group():
    first = {"examples_per_second": 100.0, "loss_scale": 1024.0, "skipped_steps": 2}
    second = {"examples_per_second": 110.0, "loss_scale": 2048.0, "skipped_steps": 4}
    jobs = [
        finished("16-mixed", 0, 0.90, converted="3/4", **first),
        finished("16-mixed", 1, 0.94, converted="3/4", **second),
    ]
    (group,) = group_jobs(jobs)
    assert group.quality == Spread(pytest.approx(0.92), pytest.approx(0.0282842712), 2, 0.90, 0.94)
    assert group.speed == Spread(105.0, pytest.approx(7.0710678), 2, 100.0, 110.0)
    assert (group.loss_scale.low, group.loss_scale.high, group.skipped.mean) == (1024, 2048, 3)
    assert (group.counts, group.converted, group.is_complete) == ({"finished": 2}, "3/4", True)
    (group,) = group_jobs(jobs[:1])
    assert group.quality.sd is None


def test_a_job_that_failed_before_it_knew_its_device_counts_on_its_groups_device():
    jobs = [lost("a", seed=1), finished("a"), lost("a", error="else", seed=2)]
    (group,) = group_jobs(jobs)
    assert (group.device, group.counts) == (GPU, {"failed": 2, "finished": 1})
    assert (group.reasons, group.is_complete) == (("broke", "else"), False)


@pytest.mark.parametrize(
    "metrics",
    [
        {"val/accuracy": math.nan},
        {"val/accuracy": 0.1, "val/loss": math.nan},
        {"val/accuracy": 0.1, "val/loss": math.inf},
    ],
)
def test_a_job_whose_metrics_are_not_finite_diverged(metrics):
    job = finished("16-true", metrics=metrics)
    assert job.outcome == "diverged"
    (group,) = group_jobs([job, finished("16-true", 1, 0.8)])
    assert (group.quality.mean, group.quality.n, group.is_complete) == (0.8, 1, False)
    assert group.finished_count == 2


def test_a_run_without_evaluation_diverges_by_its_training_loss():
    assert finished("x", quality=None, train_loss=math.nan).outcome == "diverged"
    assert finished("x", quality=None, train_loss=1.0).outcome == "finished"


def test_the_difference_of_one_seed_is_shown_and_not_judged():
    c = of([finished("32-true"), finished("b", quality=0.99)], "b")
    assert (c.difference.verdict, c.difference.ci_half_width) == ("unjudged", math.inf)
    assert difference_words(c.difference) == ("not judged (one seed)", "+0.09")


@pytest.mark.parametrize(
    ("base", "speeds", "median", "verdict"),
    [
        ((100, 110, 120), (150, 160, 185), 1.5, "faster"),
        # One slow job does not change the median.
        ((20, 100, 100), (100, 103, 102), 1.03, "unclear"),
        # One seed is faster from a gain of 10 % on.
        ((100,), (109,), 1.09, "even"),
        ((100,), (111,), 1.11, "faster"),
        ((100,), (91,), 0.91, "even"),
        ((100,), (89,), 0.89, "slower"),
        # Several seeds are faster if the test says so and the median gains 5 %.
        ((100, 100), (104, 104.1), 1.0405, "even"),
        ((100, 100), (106, 107), 1.065, "faster"),
        # All above 1, which three equal precisions are in one case of eight.
        ((100, 100, 100), (101, 140, 170), 1.4, "unclear"),
        ((100, 100, 100), (96, 120, 106), 1.06, "unclear"),
        ((100, 100, 100), (99, 102, 104), 1.02, "even"),
    ],
)
def test_speed_is_tested_in_pairs_of_seeds(base, speeds, median, verdict):
    c = of([*timed("32-true", base), *timed("b", speeds)], "b")
    ratio = c.speed_ratio
    assert (ratio.value, c.speed_verdict) == (pytest.approx(median), verdict)
    logarithms = [math.log(b / a) for a, b in zip(base, speeds, strict=True)]
    interval = (median, median)
    if len(base) > 1:
        interval = stats.ttest_1samp(logarithms, 0).confidence_interval(0.95)
        interval = [math.exp(end) for end in interval]
    assert (ratio.low, ratio.high) == pytest.approx(tuple(interval))


def test_the_speed_ratio_of_unpaired_seeds_is_of_the_medians_with_welchs_interval():
    c = of([*timed("32-true", (100, 200)), *timed("b", (180, 300), first=7)], "b")
    ratio = c.speed_ratio
    logarithms = ([math.log(v) for v in speeds] for speeds in ((180, 300), (100, 200)))
    interval = stats.ttest_ind(*logarithms, equal_var=False).confidence_interval(0.95)
    assert ratio.value == pytest.approx(1.6)
    assert (ratio.low, ratio.high) == pytest.approx(tuple(math.exp(end) for end in interval))
    assert c.speed_verdict == "unclear"


def test_memory_is_the_devices_peak_and_on_a_cpu_weights_plus_optimizer_state():
    for device, ratio in ((GPU, 3.0), (CPU, 0.5)):
        base = finished("32-true", device=device)
        more = {"peak_memory_mib": 3000.0, "weights_mib": 20.0, "optimizer_mib": 40.0}
        c = of([base, finished("b", device=device, **more)], "b", device)
        assert c.memory_ratio == pytest.approx(ratio)


def test_the_baseline_has_the_same_settings_and_device():
    def job(precision, settings, speed, **more):
        return finished(precision, settings=settings, examples_per_second=speed, **more)

    own_keys = [f"{sign}precision.keep_fp32=[fc]" for sign in ("", "+", "++", "~")]
    sweep = [
        job("32-true", "optimizer.lr=1", 100.0),
        job("32-true", "optimizer.lr=2", 200.0),
        job("32-true", "optimizer.lr=2", 10.0, device=CPU),
        job("b", "optimizer.lr=2", 300.0),
        job("b", "optimizer.lr=3", 300.0),
        *(job("b", f"optimizer.lr=2 {key}", 500.0) for key in own_keys),
    ]
    assert of(sweep, "b optimizer.lr=2").speed_ratio.value == pytest.approx(1.5)
    for key in own_keys:
        assert of(sweep, f"b optimizer.lr=2 {key}").speed_ratio.value == pytest.approx(2.5)
    alone = of(sweep, "b optimizer.lr=3")
    assert (alone.baseline, alone.speed_ratio) == (None, None)


FAST = (200.0, 204.0, 208.0, 212.0)
NOISY, SAME, WORSE = (0.90, 0.91, 0.92), (0.905, 0.908, 0.921), (0.70, 0.711, 0.72)


def answer_of(results):
    return SweepData([*map(Job, results)]).answer


def next_command(data):
    return str(data.answer.command or "")


def conclusion_of(*results, **fields):
    return SweepData([*map(Job, results)], **fields).answer.text


def test_the_work_that_was_not_in_the_asked_format_is_a_sentence_and_a_column():
    work = {"matrix_work": "75.0% float32, 25.0% bfloat16", "matrix_formats": ["a", "b"]}
    mixed = seeds("b", SAME, caveats=["As it is."], **work)
    plain = seeds("32-true", NOISY, matrix_work="100.0% float32")
    assert conclusion_of(*plain, *mixed).endswith(" b: As it is.")
    assert "matrix work" in groups_table(compare_with_baselines([*plain, *mixed]), None).head
    assert "matrix work" not in groups_table(compare_with_baselines(plain), None).head


def test_weights_that_did_not_move_are_a_reservation():
    shares = (None, 0.2, 0.004)
    jobs = [*seeds("32-true", NOISY), *seeds("b", SAME), *seeds("c", SAME)]
    jobs[3:6] = [replace(job, stagnant_share=s) for job, s in zip(jobs[3:6], shares, strict=True)]
    jobs[6] = replace(jobs[6], stagnant_share=0.004)
    assert "Weights that the last step did not move: b 20% (" in conclusion_of(*jobs)
    assert "did not move" not in conclusion_of(*jobs[:3], *jobs[6:])


def test_conclusion_of_several_seeds():
    sweep = [
        *seeds("32-true", NOISY),
        *seeds("b", SAME, (150.0, 151.0, 152.0), peak_memory_mib=600.0),
        *seeds("c", WORSE, (200.0,) * 3),
        *seeds("d", SAME, peak_memory_mib=300.0),
    ]
    text = conclusion_of(*sweep)
    assert text.startswith("Train in b: 1.51 × as fast as 32-true, val/accuracy within tolerance. ")
    assert "val/accuracy of b: within tolerance (+0.0013 ± 0.0059, 3 seeds). b is 1.51 ×" in text
    assert ", with 0.60 × 32-true's peak memory. Least memory: d with 0.30 × 32-true's" in text
    assert text.endswith("peak memory. Type precision=b.")
    assert "c" not in text.split()
    assert answer_of(sweep).pick.group.name == "b"


def test_a_difference_within_the_noise_is_no_gain():
    sweep = [*seeds("32-true", NOISY), *seeds("b", SAME, (99.0, 102.0, 115.0))]
    assert conclusion_of(*sweep).startswith(
        "Stay with 32-true: nothing as good trained faster. val/accuracy of b: within tolerance "
        "(+0.0013 ± 0.0059, 3 seeds). b is about as fast as 32-true (0.86 to 1.28 ×). "
    )
    assert answer_of(sweep).pick.group.name == "32-true"
    worse = [*seeds("32-true", NOISY), *seeds("b", WORSE, (300.0,) * 3)]
    assert conclusion_of(*worse).startswith(
        "Stay with 32-true: b is worse in val/accuracy. val/accuracy of b: worse by 0.19967 ± "
    )
    assert answer_of(worse).pick.group.name == "32-true"


def test_the_memory_of_a_job_whose_every_step_was_skipped_is_not_compared():
    whole = {"device": CPU, "optimizer_mib": 80.0}
    skipped = {"device": CPU, "optimizer_mib": 0.0, "loss_scale": 1e9, "skipped_steps": 10}
    jobs = [finished("32-true", **whole), finished("b", **skipped)]
    assert of(jobs, "b", CPU).memory_ratio is None
    jobs += [finished("b", 1, **(whole | {"skipped_steps": 9}))]
    assert of(jobs, "b", CPU).memory_ratio == 1.0


def test_jobs_that_learned_nothing_are_named():
    losses = {"32-true": [2.3, 99.0, *[2.4] * 20], "b": [2.3, 99.0, *[2.2] * 20]}
    jobs = []
    for name, values in losses.items():
        steps = [*range(1, len(values) + 1)]
        jobs.append(Job(finished(name), {"train/loss": np.array([steps, steps, values])}))
    data = SweepData(jobs)
    said = (
        "The training loss of 32-true seed=0 ended no lower than in the first step: where nothing "
        "is learned, precisions do not differ."
    )
    assert said in data.answer.text
    assert said in summary_markdown(data)
    assert not SweepData(jobs[1:]).untrained
    # A run that began with a checkpoint of another one may have learned before.
    jobs[0].curves["train/loss"][0] += 5
    assert not SweepData(jobs).untrained


def test_a_group_with_a_failed_seed_is_not_recommended():
    fast = seeds("b", (0.905, 0.908, math.nan), (200.0,) * 3)
    text = conclusion_of(*seeds("32-true", NOISY), *fast, *seeds("c", SAME, (110.0,) * 3))
    assert text.startswith("Train in c: 1.10 × as fast")
    assert text.endswith("Diverged: b (1 of 3).")


def by_loss(jobs):
    """Return jobs with their quality as the loss, of which less is better."""
    changes = {"quality": "val/loss", "direction": "min"}
    losses = [job.metrics.get("val/accuracy") for job in jobs]
    metrics = [{} if loss is None else {"val/loss": loss} for loss in losses]
    pairs = zip(jobs, metrics, strict=True)
    return [replace(job, metrics=own, **changes) for job, own in pairs]


@pytest.mark.parametrize("first", [lost("32-true"), *by_loss([finished("32-true", 0, None)])])
def test_a_first_job_without_the_metric_leaves_the_verdict_to_the_other_seeds(first):
    base = by_loss(seeds("32-true", (0.9, 0.91, 0.92, 0.93)))[1:]
    fast = by_loss(seeds("b", (0.9, 0.911, 0.919, 0.93), FAST))
    text = conclusion_of(first, *base, *fast)
    assert "val/loss of b: within tolerance (+0.0000 ± 0.0017, 3 seeds)" in text
    assert text.startswith("Train in b: 2.0")
    lowest = by_loss(seeds("c", (0.7, 0.7)))[1:]
    assert best_group(group_jobs([lost("c"), *lowest, *fast])).precision == "c"


@pytest.mark.parametrize(
    ("qualities", "answer"), [(WORSE, "c is worse in val/accuracy."), (SAME, "nothing as good")]
)
def test_a_precision_with_another_metric_is_not_compared(qualities, answer):
    other = by_loss(seeds("b", SAME, FAST))
    text = conclusion_of(*seeds("32-true", NOISY), *other, *seeds("c", qualities))
    assert text.startswith(f"Stay with 32-true: {answer}")


@pytest.mark.parametrize("fixing", ["launcher=slurm", "sweep=search"])
def test_a_sweep_whose_lists_cannot_get_longer_is_not_resumed_for_more_seeds(fixing):
    jobs = [*seeds("32-true", (0.90, 0.91, 0.92)), *seeds("b", (0.905, 0.902, 0.92), FAST)]
    command = f"python -m runner -m precision=32-true,b seed=0,1,2 {fixing}"
    data = SweepData([*map(Job, jobs)], [command], folder="s")
    assert next_command(data) == (
        f"python -m runner -m precision=32-true,b {fixing} seed=0,1,2,3,4,5"
    )


def test_a_fast_precision_of_one_seed_among_others_of_several():
    jobs = [*seeds("32-true", NOISY), *seeds("c", SAME), *seeds("b", SAME[:1], FAST)]
    assert (
        "b, 2.00 × as fast, may be worse. One seed does not show whether its val/accuracy differs. "
        "About 3 seeds would decide"
    ) in conclusion_of(*jobs)


REACHED = "It reached val/accuracy 0.9, 100 examples/s."
ONLY_BASELINE = f"Stay with 32-true: no other precision finished. {REACHED}"
FASTER = "Try b with more seeds: 1.50 × as fast as 32-true. Whether val/accuracy differs"
MORE_SEEDS = "takes more seeds to judge. Type seed=0,1,2."
B_ALONE = "reached no finite result to compare with. Fastest: b: val/accuracy 0.9, 100 examples/s."
WORSE_B = finished("b", quality=0.8, examples_per_second=150.0)
CONCLUSIONS = {
    "one seed each": ([finished("32-true"), WORSE_B], f"{FASTER} (-0.1) {MORE_SEEDS}"),
    "one seed of one group": ([*seeds("32-true", NOISY), WORSE_B], f"{FASTER} (-0.1) {MORE_SEEDS}"),
    "a baseline that diverged is not asked for again": (
        [finished("32-true", quality=math.nan), finished("b")],
        f"32-true {B_ALONE} Diverged: 32-true.",
    ),
    "a baseline that failed": (
        [lost("32-true"), finished("b"), finished("c")],
        f"32-true {B_ALONE} Failed: 32-true.",
    ),
    "only the baseline": (
        [finished("32-true"), finished("b", quality=math.nan)],
        f"{ONLY_BASELINE} Diverged: b.",
    ),
    "no baseline": (
        [finished("b"), finished("c", examples_per_second=150.0)],
        "No 32-true job to compare with; add precision=32-true. Fastest: c: val/accuracy 0.9, "
        "150 examples/s.",
    ),
    "one job": (
        [finished("b")],
        "b finished: val/accuracy 0.9, 100 examples/s. Type precision=32-true,b to compare.",
    ),
    "one job of the baseline": (
        [finished("32-true")],
        "32-true finished: val/accuracy 0.9, 100 examples/s. Type precision=32-true,bf16-mixed to "
        "compare.",
    ),
    "the only job that finished": (
        [finished("b"), lost("c", "refused")],
        "b finished: val/accuracy 0.9, 100 examples/s. Type precision=32-true,b to compare. "
        "Not tried: c.",
    ),
    "a training by another trainer": (
        [finished("32-true", overrides=[]), finished("b", overrides=[])],
        "Stay with 32-true: nothing trained faster. b is about as fast as 32-true. Whether "
        "val/accuracy differs (+0) takes more seeds to judge.",
    ),
    "no job that finished": (
        [lost("b"), lost("c", "unavailable")],
        "No job finished with a finite result. Failed: b; unavailable here: c.",
    ),
    "no job": ([], "No job wrote a result."),
    "no quality": (
        [RunResult(precision="b", label="b", folder="/x")],
        "Nothing was trained or evaluated.",
    ),
    "three names and the number of the rest": (
        [finished("32-true"), *(lost(f"p{i}") for i in range(6))],
        f"{ONLY_BASELINE} Failed: p0, p1, p2 and 3 more.",
    ),
    "a search": (
        [
            finished(p, quality=q, settings=f"optimizer.lr={q}")
            for p, q in (("32-true", 0.7), ("b", 0.9), ("b", 0.8), ("32-true", 0.75))
        ],
        "Best mean val/accuracy: b optimizer.lr=0.9 with 0.9. Best of the other precisions: "
        "32-true optimizer.lr=0.75 with 0.75. One seed each: which is best is not judged.",
    ),
}


@pytest.mark.parametrize(("jobs", "text"), CONCLUSIONS.values(), ids=CONCLUSIONS)
def test_the_conclusion_of(jobs, text):
    assert conclusion_of(*jobs) == text
    assert len(answer_of(jobs).sentence.split()) <= 15


def test_what_was_not_timed_is_not_called_worse():
    """An emulated precision has no speed, and trains as well."""
    emulated = seeds("c", SAME, (None,) * 3)
    worse = seeds("b", WORSE, FAST)
    text = conclusion_of(*seeds("32-true", NOISY), *worse, *emulated)
    assert text.startswith("Stay with 32-true: b is worse in val/accuracy. ")
    assert "val/accuracy of c: within tolerance (" in text
    failed = [replace(worse[0], status="failed", metrics={}), *worse[1:]]
    text = conclusion_of(*seeds("32-true", NOISY), *failed, *emulated)
    assert text.startswith("Stay with 32-true: no other precision was timed. ")


def test_what_to_type_has_the_own_keys_of_the_precision():
    keys = "precision.keep_fp32=[head]"
    base = seeds("32-true", NOISY, settings="")
    kept = seeds("b", SAME, FAST, settings=keys)
    data = SweepData(
        [*map(Job, [*base, *kept])], [f"python -m runner -m precision=32-true,b {keys}"]
    )
    assert data.answer.sentence.startswith(f"Train in b {keys}: 2.04")
    assert next_command(data) == f"python -m runner precision=b '{keys}'"


def test_devices_agree_where_their_settings_do():
    jobs = []
    for device in (CPU, GPU):
        for lr in ("lr=1", "lr=2"):
            shared = {"device": device, "settings": lr}
            jobs += [*seeds("32-true", NOISY, **shared), *seeds("b", SAME, FAST, **shared)]
    assert answer_of(jobs).sentence == "Train in b in each of 2 devices."


def test_the_conclusion_names_the_jobs_that_did_not_begin():
    swept = {"job_count": 12, "swept_precisions": ["b", "c", "d"]}
    assert conclusion_of(lost("b"), **swept) == (
        "No answer yet: 0 of 12 jobs finished. Resume the sweep. 11 of the sweep's 12 jobs had not "
        "begun, among them all of c, d; failed: b."
    )


def test_a_long_table_is_sorted_and_folds_what_has_no_result():
    refused = [lost(f"r{i}", "refused", "eps is 0") for i in range(4)]
    slow, fast = (finished(p, examples_per_second=v) for p, v in (("slow", 90.0), ("fast", 200.0)))
    poor, good = (finished(p, quality=q) for p, q in (("poor", 0.1), ("good", 0.95)))
    sweep = [*refused, slow, poor, good, finished("32-true"), fast]
    table = groups_table(compare_with_baselines(sweep), None)
    names = ["32-true", "fast", "good", "poor", "slow", "r0", "r1", "r2", "r3"]
    assert [row[0].text for row in table.rows] == names
    assert (table.folded, table.fold_title) == (4, "4 without a result")
    cells = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    # A sentence under the table says for all rows that one seed is not judged.
    assert [row["against 32-true"].text for row in cells[:3]] == ["baseline", "+0", "+0.05"]
    assert cells[-1]["status"].text == "not tried"
    few = groups_table(compare_with_baselines(sweep[3:]), None)
    assert few.folded == 0


def test_a_job_that_a_stop_kept_from_ending_leaves_no_answer():
    jobs = [*seeds("32-true", SAME), *seeds("b", SAME), lost("c", "stopped")]
    text = conclusion_of(*jobs, is_stopped=True, job_count=7)
    assert text == "No answer yet: 6 of 7 jobs finished. Resume the sweep. Stopped: c."


COMMAND = "python -m runner -m model=mlp precision=32-true,b {} launcher=isolated ++precision.x=2"
COMMANDS = {
    "the precision": (3, COMMAND, "python -m runner model=mlp ++precision.x=2 precision=b"),
    "more seeds": (
        1,
        COMMAND,
        "python -m runner -m model=mlp precision=32-true,b launcher=isolated ++precision.x=2 "
        "seed=0,1,2",
    ),
    "none of another program": (3, "rm -rf / precision=32-true,b {}", ""),
    "none that is no command": (3, "python -m runner 'precision=32-true,b {}", ""),
}


@pytest.mark.parametrize(("count", "typed", "wanted"), COMMANDS.values(), ids=COMMANDS)
def test_the_command_that_follows_an_answer_is(count, typed, wanted):
    jobs = [*seeds("32-true", SAME[:count]), *seeds("b", SAME[:count], (200.0, 200.0, 200.0))]
    data = SweepData([*map(Job, jobs)], [typed.format(f"seed={','.join('012'[:count])}")])
    assert next_command(data) == wanted


def test_a_command_of_more_steps_follows_jobs_that_were_too_short():
    jobs = [*seeds("32-true", SAME), *seeds("b", SAME, (None,) * 3)]
    data = SweepData([*map(Job, jobs)], [COMMAND.format("seed=0,1,2")])
    assert next_command(data).endswith(" ++precision.x=2 train.max_steps=40")
    assert data.answer.pick is None
    took = [replace(job, step_ms=2.0) for job in jobs]
    assert "Type train.max_steps=500." in answer_of(took).text


@pytest.mark.parametrize("count", [1, 3])
def test_on_a_busy_machine_nothing_that_trained_on_its_processors_is_faster(count):
    jobs = [*seeds("32-true", SAME[:count]), *seeds("b", SAME[:count], (200.0, 210.0, 220.0))]
    on_cpu = [replace(job, device=CPU, device_type="cpu") for job in jobs]
    range_words = " as 32-true (95 % interval 1.86 to 2.36)" if count > 1 else ""
    for busy, found in ((0.6, on_cpu), (0.2, on_cpu), (0.6, jobs)):
        text = conclusion_of(*found, busy=busy)
        is_doubtful = busy > 0.25 and found is on_cpu
        assert ("Other programs kept 60% of the processors busy, so that" in text) is is_doubtful
        assert text.startswith("Stay with 32-true: nothing") is is_doubtful
        assert ("was measurably faster." in text) is is_doubtful
        assert (f"b is 2.{10 * (count > 1):02d} × as fast{range_words}" in text) or not is_doubtful


def test_no_speed_is_compared_where_a_job_of_either_was_too_short():
    """The fastest jobs are the shortest ones."""
    for short in ("32-true", "b"):
        jobs = [*seeds("32-true", SAME), *seeds("b", SAME, (50.0, 60.0, 70.0))]
        cut = next(job for job in jobs if job.precision == short)
        jobs[jobs.index(cut)] = replace(cut, examples_per_second=None)
        assert conclusion_of(*jobs).startswith("Too short for a comparison of speed")
        table = groups_table(compare_with_baselines(jobs), None)
        column = table.head.index("speed × 32-true")
        assert [row[column].text for row in table.rows][1] == "not timed"


def test_one_seed_recommends_nothing():
    jobs = [finished("32-true"), finished("b", examples_per_second=200.0)]
    assert answer_of(jobs).pick is None


def evaluated(precision, quality, weights=9.0, **more):
    memory = {"weights_mib": weights, "optimizer_mib": None}
    return finished(precision, quality=quality, trained_in="32-true", **memory, **more)


@pytest.mark.parametrize("noted", [{"val/accuracy": 0.9}, {}])
def test_evaluations_are_concluded_by_their_change(noted):
    sweep = [
        evaluated("32-true", 0.9, 100.0, as_trained=noted),
        evaluated("bnb-nf4", 0.85, 13.0, as_trained=noted),
        evaluated("16-true", 0.899, 50.0, as_trained=noted),
    ]
    assert of(sweep, "bnb-nf4").group.change.mean == pytest.approx(-0.05)
    assert of(sweep, "bnb-nf4").difference is None
    assert conclusion_of(*sweep) == (
        "bnb-nf4 changes val/accuracy by -0.05, with 13 MiB of weights. 16-true changes "
        "val/accuracy by -0.001, with 50 MiB of weights. val/accuracy was 0.9 as trained in "
        "32-true."
    )


@pytest.mark.parametrize("noted", [True, False])
def test_a_checkpoint_is_compared_with_itself(noted):
    sweep = []
    for name, own, low in (("a", 0.9, 0.85), ("b", 0.5, 0.48)):
        more = {"settings": f"checkpoint={name}", "as_trained": {}}
        if noted:
            more["as_trained"] = {"val/accuracy": own}
        with_key = {**more, "settings": f"checkpoint={name} ++precision.x=1"}
        sweep += [
            evaluated("32-true", own, 50.0, **more),
            evaluated("16-true", low, 50.0, **more),
            evaluated("tf32", low, 50.0, **with_key),
        ]
    changes = [c.group.change.mean for c in compare_with_baselines(sweep)]
    assert changes == pytest.approx([0, -0.05, -0.05, 0, -0.02, -0.02])
    assert conclusion_of(*sweep) == (
        "16-true checkpoint=a changes val/accuracy by -0.05, with 50 MiB of weights. val/accuracy "
        "was 0.9 as trained in 32-true. 16-true checkpoint=b changes val/accuracy by -0.02, with "
        "50 MiB of weights. val/accuracy was 0.5 as trained in 32-true."
    )
    table = jobs_table(sweep)
    column = table.head.index("change")
    cells = [row[column].text for row in table.rows]
    assert cells == ["+0", "-0.05", "-0.05", "+0", "-0.02", "-0.02"]


def test_a_checkpoint_is_compared_on_its_own_device():
    on_cpu = [evaluated(p, q, device=CPU) for p, q in (("32-true", 0.8), ("16-true", 0.7))]
    sweep = [evaluated("32-true", 0.9), *on_cpu]
    assert of(sweep, "16-true", CPU).group.change.mean == pytest.approx(-0.1)


def test_many_checkpoints_are_summarised_by_the_best():
    pairs = [(i, p) for i in range(4) for p in ("32-true", "16-true")]
    sweep = [evaluated(p, 0.9, settings=f"checkpoint={i}") for i, p in pairs]
    assert conclusion_of(*sweep).startswith(
        "Evaluated, nothing trained: best 32-true checkpoint=0 with "
    )


def test_each_device_has_its_own_conclusion():
    bases = [finished("32-true", device=device) for device in (CPU, GPU)]
    slow = finished("b", examples_per_second=50.0, device=CPU)
    text = conclusion_of(*bases, slow, finished("b", examples_per_second=200.0))
    assert text.startswith(
        f"None of 2 devices is decided yet. On {CPU}: Stay with 32-true: nothing trained faster. b "
        "is 0.50 × "
    )
    assert f"On {GPU}: Try b with more seeds: 2.00 × " in text


def test_jobs_too_short_for_a_speed_are_compared_by_quality():
    groups = {"32-true": (0.90, 0.91), "bf16-mixed": (0.90, 0.91)}
    jobs = [job for name, q in groups.items() for job in seeds(name, q, (None, None))]
    for some in (jobs, jobs[::2]):
        text = conclusion_of(*some)
        assert text.startswith("Too short for a comparison of speed; train for more steps. ")
        # Without a standard deviation beside the half-width of an interval.
        assert re.search(r"val/accuracy against 32-true: bf16-mixed 0\.9(05)? \(", text)
    # The last text is of one seed each.
    assert text.endswith(
        "bf16-mixed 0.9 (+0). Type train.max_steps=40 seed=0,1,2 to judge the differences."
    )


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.97123, 0.0034, "0.9712 ± 0.0034"),
        (123.4, 12.0, "123 ± 12"),
        (1.5, 1e-12, "1.5 ± 1e-12"),
        (12345.0, 4000.0, "12345 ± 4000"),
    ],
)
def test_an_interval_shows_two_digits_of_its_error(value, error, text):
    assert format_interval(value, error) == text


LOSSES = {"train/loss": np.array([range(1, 31), range(30), [2.3] * 30])}
UNPROVEN = {
    "two seeds that lose 10 and 6 points": (
        {"32-true": (0.95, 0.94), "b": (0.85, 0.88)},
        {},
        "may be worse. Its val/accuracy may be 0.21 worse (-0.08 ± 0.13, 2 seeds, tolerated "
        "0.0036). About 3 seeds would decide, 5 s more.",
        "sweep.resume=s seed=0,1,2",
    ),
    "three seeds that lose 10, 6 and 2 points": (
        {"32-true": (0.95, 0.93, 0.93), "b": (0.85, 0.87, 0.91)},
        {},
        "may be worse. Its val/accuracy may be 0.13 worse (-0.060 ± 0.067, 3 seeds, tolerated "
        "0.0067). At this difference 50 seeds would not show that it is not.",
        "",
    ),
    "a difference that more seeds would judge": (
        {"32-true": (0.90, 0.91, 0.92), "b": (0.905, 0.902, 0.92)},
        {},
        "may be worse. Its val/accuracy may be 0.012 worse (-0.001 ± 0.011, 3 seeds, tolerated "
        "0.0058). About 6 seeds would decide, 15 s more.",
        "sweep.resume=s seed=0,1,2,3,4,5",
    ),
    "weights that no longer move": (
        {"32-true": NOISY, "b": SAME},
        {"stagnant_share": 0.92},
        "loses its updates. The last step moved none of 92.0% of its weights.",
        "Type precision=32-true,b precision.update=kahan to keep such updates.",
    ),
    "a seed that diverged": (
        {"32-true": (0.90, 0.91, 0.92), "b": (0.905, 0.91)},
        {},
        "may be worse. Its val/accuracy may be 0.013 worse (+0.003 ± 0.016, 2 seeds, tolerated "
        "0.0058). About 3 seeds would decide, 5 s more.",
        "sweep.resume=s seed=0,1,2,3",
    ),
    "an accuracy of 1 in every seed": (
        {"32-true": (1.0,) * 3, "b": (1.0,) * 3},
        {},
        "may be worse. The seeds of 32-true do not differ, so that no tolerance is known.",
        "Type sweep.resume=s advise.max_gap=0.01 to accept a difference of 0.01.",
    ),
}


@pytest.mark.parametrize(("qualities", "more", "reason", "typed"), UNPROVEN.values(), ids=UNPROVEN)
def test_a_fast_precision_is_not_recommended_without_evidence(qualities, more, reason, typed):
    base = seeds("32-true", qualities["32-true"], seconds=2.0)
    jobs = [*base, *seeds("b", qualities["b"], FAST, seconds=3.0, **more)]
    text = conclusion_of(*jobs, folder="s")
    gains = "2.04 × as fast" if len(qualities["b"]) > 2 else "2.02 × as fast"
    assert text.startswith(f"Stay with 32-true for now: b, {gains}, {reason}")
    assert typed in f"{text} {next_command(SweepData([*map(Job, jobs)], folder='s'))}"
    assert answer_of(jobs).pick is None


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((0.3, 0.2, 0.1), "within tolerance (identical in every seed, 3 seeds)"),
        ((0.3, 0.2, 0.11), "may be 0.0028 worse (+0.0000 ± 0.0028, 3 seeds, tolerated 0.0016)"),
    ],
    ids=["all is the same", "accuracies alone are the same"],
)
def test_equal_accuracies_of_few_seeds_are_no_equal_trainings(losses, words):
    """Of 357 examples, one more or less in the next seed is as likely as not."""
    accuracies = (0.98, 0.98 - 1 / 357, 0.98 + 1 / 357)
    jobs = []
    for name, own, speeds in (("32-true", (0.3, 0.2, 0.1), (100.0,) * 3), ("b", losses, FAST)):
        for job, loss in zip(seeds(name, accuracies, speeds), own, strict=True):
            jobs.append(replace(job, metrics={**job.metrics, "val/loss": loss}))
    assert words in conclusion_of(*jobs)


def test_equal_accuracies_do_not_hide_a_collapse_beside_them():
    """The only step between two of the values is the collapse itself."""
    jobs = []
    for name, accuracy, loss in (("32-true", 1.0, 0.1), ("b", 1.0, 0.2), ("c", 0.1, 0.3)):
        own = seeds(name, (accuracy,) * 3)
        jobs += [replace(j, metrics={**j.metrics, "val/loss": loss}) for j in own]
    assert of(jobs, "c").verdict == "worse"


def test_the_table_says_that_weights_no_longer_move():
    jobs = [*seeds("32-true", NOISY), *seeds("b", SAME, FAST, stagnant_share=0.92)]
    table = groups_table(compare_with_baselines(jobs), None)
    cell = dict(zip(table.head, table.rows[1], strict=True))["against 32-true"]
    assert (cell.text, cell.tone) == ("weights no longer move", "bad")
    # What is worse is that, whether it moves or not.
    worse = [*seeds("32-true", NOISY), *seeds("b", WORSE, FAST, stagnant_share=0.92)]
    assert of(worse, "b").verdict == "worse"


def test_one_seed_of_weights_that_no_longer_move_asks_for_no_more_seeds():
    stalled = finished("b", examples_per_second=200.0, stagnant_share=0.92)
    text = conclusion_of(finished("32-true"), stalled)
    assert text.startswith(
        "Stay with 32-true for now: b, 2.00 × as fast, loses its updates. The last"
    )
    assert "Type precision=32-true,b precision.update=kahan to keep such updates." in text


def test_a_sweep_of_another_trainer_is_not_resumed():
    jobs = [*seeds("32-true", (0.90, 0.91, 0.92)), *seeds("b", (0.905, 0.902, 0.92), FAST)]
    data = SweepData([*map(Job, jobs)], ["python train.py"], folder="s")
    assert next_command(data) == ""
    assert "sweep.resume" not in data.answer.text


def test_what_the_user_tolerates_decides():
    jobs = [*seeds("32-true", (0.90, 0.91, 0.92)), *seeds("b", (0.905, 0.902, 0.92), FAST)]
    text = conclusion_of(*jobs, tolerance=Tolerance(max_gap=0.02))
    assert text.startswith("Train in b: 2.04 × as fast as 32-true, val/accuracy within tolerance.")


def test_nothing_is_recommended_where_nothing_was_learned():
    jobs = [Job(job) for job in seeds("32-true", NOISY)]
    jobs += [Job(job, LOSSES) for job in seeds("b", SAME, FAST)]
    text = SweepData(jobs).answer.text
    assert "b, 2.04 × as fast, cannot be judged. Where nothing is learned nothing" in text
    assert "The training loss of b" in text


def test_precisions_that_train_few_weights_are_not_compared():
    """`sweep=every_precision` has bnb-nf4, which freezes what 32-true trains."""
    jobs = [*seeds("32-true", NOISY), *seeds("b", (0.1, 0.1, 0.1), FAST, trains=0.017)]
    text = conclusion_of(*jobs, *seeds("c", WORSE, FAST))
    assert text.startswith(
        "Stay with 32-true: c is worse in val/accuracy. val/accuracy of c: worse"
    )
    assert "few of the weights train and the rest is frozen: b 1.7%." in text
    table = groups_table(compare_with_baselines(jobs), None)
    cell = dict(zip(table.head, table.rows[1], strict=True))["against 32-true"]
    assert (cell.text, cell.note) == ("trains 1.7%", "not compared")


def test_of_many_precisions_without_a_speed_those_that_do_harm_are_named():
    equal = [finished(name, examples_per_second=None) for name in ("32-true", "a", "b", "c")]
    text = conclusion_of(*equal, finished("d", 0, 0.1, examples_per_second=None))
    assert "val/accuracy against 32-true: d 0.1 (-0.8), a 0.9 (+0), b 0.9 (+0) and 1 more." in text
