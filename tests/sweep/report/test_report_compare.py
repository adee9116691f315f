import math

import pytest

from runner.modes.result import RunResult
from runner.sweeps.report.columns import sweep_table
from runner.sweeps.report.conclusion import conclusion_text, recommended_precision
from runner.sweeps.report.wording import difference_words, format_interval, format_mean_sd
from runner.sweeps.verdict.compare import compare_with_baselines, group_jobs, pareto_front
from runner.sweeps.verdict.statistics import Spread

CPU, GPU = "Some CPU (2 of 2 threads)", "NVIDIA H100"


def result(precision, seed=0, quality: float | None = 0.9, speed=100.0, **more):
    name = f"{precision} {more.pop('extra', '')}".strip()
    values = {
        "group": name,
        "seed": seed,
        "device": GPU,
        "quality": "val/accuracy",
        "steps": 10,
        "metrics": {} if quality is None else {"val/accuracy": quality, "val/loss": 1.0},
        "best": quality,
        "examples_per_second": speed,
        "peak_memory_mib": 1000.0,
        "weights_mib": 40.0,
        "optimizer_mib": 80.0,
    }
    return RunResult(precision, f"{name} seed={seed}", "/x", **(values | more))


def lost(precision, status="failed", error="broke", seed=0):
    return RunResult(
        precision, f"{precision} seed={seed}", "/x", status, error, (), precision, seed
    )


def seeds(precision, qualities, speeds=(100.0, 100.0, 100.0), **more):
    pairs = enumerate(zip(qualities, speeds, strict=False))
    return [result(precision, seed, q, s, **more) for seed, (q, s) in pairs]


def of(results, name, device=GPU):
    return next(
        c
        for c in compare_with_baselines(results)
        if c.group.name == name and c.group.device == device
    )


def test_jobs_that_differ_in_their_seeds_form_a_group():
    (group,) = group_jobs(
        [
            result("16-mixed", s, q, v, loss_scale=x, skipped_steps=k, converted="3/4")
            for s, q, v, x, k in ((0, 0.90, 100.0, 1024.0, 2), (1, 0.94, 110.0, 2048.0, 4))
        ]
    )
    assert group.quality == Spread(pytest.approx(0.92), pytest.approx(0.0282842712), 2, 0.90, 0.94)
    assert group.speed == Spread(105.0, pytest.approx(7.0710678), 2, 100.0, 110.0)
    assert (group.loss_scale.low, group.loss_scale.high, group.skipped.mean) == (1024, 2048, 3)
    assert (group.counts, group.converted, group.is_complete) == ({"finished": 2}, "3/4", True)


def test_one_seed_has_no_spread():
    (group,) = group_jobs([result("32-true")])
    assert group.quality.sd is None
    assert format_mean_sd(group.quality) == "0.9"


def test_a_job_that_failed_before_it_knew_its_device_counts_on_its_groups_device():
    found = group_jobs([lost("a", seed=1), result("a", 0), lost("a", error="else", seed=2)])
    assert [(g.device, g.counts, g.reasons) for g in found] == [
        (GPU, {"failed": 2, "finished": 1}, ("broke", "else"))
    ]
    assert not found[0].is_complete


@pytest.mark.parametrize(
    "metrics",
    [
        {"val/accuracy": math.nan},
        {"val/accuracy": 0.1, "val/loss": math.nan},
        {"val/accuracy": 0.1, "val/loss": math.inf},
    ],
)
def test_a_job_whose_metrics_are_not_finite_diverged(metrics):
    r = result("16-true", metrics=metrics)
    assert r.outcome == "diverged"
    (group,) = group_jobs([r, result("16-true", 1, 0.8)])
    assert (group.quality.mean, group.quality.n, group.is_complete) == (0.8, 1, False)
    assert group.finished_count == 2


def test_a_run_without_evaluation_diverges_by_its_training_loss():
    assert result("x", quality=None, train_loss=math.nan).outcome == "diverged"
    assert result("x", quality=None, train_loss=1.0).outcome == "finished"


def test_the_difference_of_one_seed_is_shown_and_not_judged():
    c = of([result("32-true"), result("b", quality=0.99)], "b")
    assert (c.difference.verdict, c.difference.ci_half_width) == ("unjudged", math.inf)
    assert difference_words(c.difference) == ("no verdict", "+0.09, one seed: no spread")


def test_speed_is_paired_by_seed():
    base = seeds("32-true", (0.9, 0.9), (100.0, 200.0))
    c = of([*base, *seeds("b", (0.9, 0.9), (150.0, 240.0))], "b")
    assert (c.speed_ratio.low, c.speed_ratio.value, c.speed_ratio.high) == pytest.approx(
        (1.2, 1.35, 1.5)
    )
    assert c.speed_verdict == "faster"


def test_the_speed_ratio_of_unpaired_seeds_is_of_the_medians_with_the_widest_range():
    base = seeds("32-true", (0.9, 0.9), (100.0, 200.0))
    c = of([*base, result("b", 7, speed=180.0), result("b", 8, speed=300.0)], "b")
    assert (c.speed_ratio.low, c.speed_ratio.value, c.speed_ratio.high) == pytest.approx(
        (0.9, 1.6, 3.0)
    )
    assert c.speed_verdict == "unclear"


@pytest.mark.parametrize(
    ("speed", "pace"), [(109.0, "even"), (111.0, "faster"), (91.0, "even"), (89.0, "slower")]
)
def test_one_seed_is_faster_from_a_gain_of_ten_percent(speed, pace):
    assert of([result("32-true"), result("b", speed=speed)], "b").speed_verdict == pace


def test_several_seeds_are_faster_if_each_is_and_the_median_gains_enough():
    base = seeds("32-true", (0.9, 0.9))
    assert of([*base, *seeds("b", (0.9, 0.9), (104.0, 104.0))], "b").speed_verdict == "even"
    assert of([*base, *seeds("b", (0.9, 0.9), (106.0, 107.0))], "b").speed_verdict == "faster"
    assert of([*base, *seeds("b", (0.9, 0.9), (99.0, 150.0))], "b").speed_verdict == "unclear"
    assert of([*base, *seeds("b", (0.9, 0.9), (99.0, 140.0))], "b").speed_verdict == "even"


def test_memory_is_the_devices_peak_and_on_a_cpu_weights_plus_optimizer_state():
    for device, ratio in ((GPU, 3.0), (CPU, 0.5)):
        base = result("32-true", device=device)
        more = {"peak_memory_mib": 3000.0, "weights_mib": 20.0, "optimizer_mib": 40.0}
        c = of([base, result("b", device=device, **more)], "b", device)
        assert c.memory_ratio == pytest.approx(ratio)


def test_the_baseline_has_the_same_settings_and_device():
    sweep = [
        result("32-true", extra="optimizer.lr=1", speed=100.0),
        result("32-true", extra="optimizer.lr=2", speed=200.0),
        result("32-true", extra="optimizer.lr=2", speed=10.0, device=CPU),
        result("b", extra="optimizer.lr=2", speed=300.0),
        result("b", extra="optimizer.lr=2 precision.keep_fp32=[fc]", speed=400.0),
        result("b", extra="optimizer.lr=3", speed=300.0),
        *(
            result("b", extra=f"optimizer.lr=2 {sign}precision.keep=[fc]", speed=500.0)
            for sign in ("+", "++", "~")
        ),
    ]
    assert of(sweep, "b optimizer.lr=2").speed_ratio.value == pytest.approx(1.5)
    assert of(
        sweep, "b optimizer.lr=2 precision.keep_fp32=[fc]"
    ).speed_ratio.value == pytest.approx(2.0)
    for sign in ("+", "++", "~"):
        name = f"b optimizer.lr=2 {sign}precision.keep=[fc]"
        assert of(sweep, name).speed_ratio.value == pytest.approx(2.5)
    assert of(sweep, "b optimizer.lr=3").baseline is None
    assert of(sweep, "b optimizer.lr=3").speed_ratio is None


def test_the_pareto_front_holds_the_groups_that_none_dominates():
    sweep = [
        result("32-true", quality=0.90, speed=100.0, peak_memory_mib=10.0),
        result("fast", quality=0.80, speed=200.0, peak_memory_mib=10.0),
        result("small", quality=0.80, speed=100.0, peak_memory_mib=1.0),
        result("beaten", quality=0.80, speed=150.0, peak_memory_mib=10.0),
        result("elsewhere", quality=0.10, speed=1.0, peak_memory_mib=99.0, device=CPU),
        result("gone", quality=math.nan, speed=999.0),
    ]
    front = [c.group.name for c in pareto_front(compare_with_baselines(sweep))]
    assert front == ["32-true", "fast", "small", "elsewhere"]


def test_the_pareto_front_follows_the_direction_of_the_quality():
    sweep = [result(name, quality=q, direction="min") for name, q in (("a", 2.0), ("b", 1.0))]
    assert [c.group.name for c in pareto_front(compare_with_baselines(sweep))] == ["b"]


NOISY, SAME, WORSE = (0.90, 0.91, 0.92), (0.905, 0.908, 0.921), (0.70, 0.711, 0.72)


def conclusion_of(*results, missing=""):
    return conclusion_text(compare_with_baselines(results), missing)


def test_conclusion_of_several_seeds():
    sweep = [
        *seeds("32-true", NOISY),
        *seeds("b", SAME, (150.0, 151.0, 152.0), peak_memory_mib=600.0),
        *seeds("c", WORSE, (200.0,) * 3),
        *seeds("d", SAME, peak_memory_mib=300.0),
    ]
    text = conclusion_of(*sweep)
    assert text.startswith(
        "b trains 1.51 × as fast as 32-true, with 0.60 × its peak memory, and no "
    )
    assert "no measurable difference in val/accuracy (+0.0013 ± " in text
    assert text.endswith("3 seeds); least memory: d with 0.30 × its peak memory.")
    assert "c" not in text.split()
    assert recommended_precision(compare_with_baselines(sweep)).group.name == "b"


def test_a_difference_within_the_noise_is_no_gain():
    sweep = [*seeds("32-true", NOISY), *seeds("b", SAME, (99.0, 120.0, 130.0))]
    assert conclusion_of(*sweep).startswith(
        "Nothing as good trained faster than 32-true: b is about as "
    )
    assert recommended_precision(compare_with_baselines(sweep)).group.name == "32-true"
    worse = [*seeds("32-true", NOISY), *seeds("b", WORSE, (300.0,) * 3)]
    assert conclusion_of(*worse).startswith("Stay with 32-true")
    assert recommended_precision(compare_with_baselines(worse)).group.name == "32-true"


def test_a_group_with_a_failed_seed_is_not_recommended():
    fast = seeds("b", (0.905, 0.908, math.nan), (200.0,) * 3)
    text = conclusion_of(*seeds("32-true", NOISY), *fast, *seeds("c", SAME, (110.0,) * 3))
    assert text.startswith("c trains 1.10 × as fast")
    assert text.endswith("Diverged: b (1 of 3).")


CONCLUSIONS = {
    "one seed each": (
        [result("32-true"), result("b", quality=0.8, speed=150.0)],
        "b trains 1.50 × as fast as 32-true, with the same peak memory; quality not judged "
        "(-0.1 val/accuracy): one seed each; add seed=0,1,2.",
    ),
    "one seed of one group": (
        [*seeds("32-true", NOISY), result("b", quality=0.8, speed=150.0)],
        "b trains 1.50 × as fast as 32-true, with the same peak memory; quality not judged "
        "(-0.11 val/accuracy): one seed of b; add seed=0,1,2.",
    ),
    "a baseline that diverged is not asked for again": (
        [result("32-true", quality=math.nan), result("b")],
        "32-true reached no finite result to compare with. Fastest: b: val/accuracy 0.9, "
        "100 examples/s. Diverged: 32-true.",
    ),
    "a baseline that failed": (
        [lost("32-true"), result("b"), result("c")],
        "32-true reached no finite result to compare with. Fastest: b: val/accuracy 0.9, "
        "100 examples/s. Failed: 32-true.",
    ),
    "only the baseline": (
        [result("32-true"), result("b", quality=math.nan)],
        "Only 32-true ended: val/accuracy 0.9, 100 examples/s. Diverged: b.",
    ),
    "no baseline": (
        [result("b"), result("c", speed=150.0)],
        "No 32-true job to compare with; add precision=32-true. Fastest: c: val/accuracy 0.9, "
        "150 examples/s.",
    ),
    "one job": (
        [result("b")],
        "Only b ended: val/accuracy 0.9, 100 examples/s; to compare, add precision=32-true.",
    ),
    "no job that finished": (
        [lost("b"), lost("c", "unavailable")],
        "No job finished with a finite result. Failed: b; unavailable here: c.",
    ),
    "no job": ([], "No job wrote a result."),
    "no quality": ([RunResult("b", "b", "/x")], "Nothing was trained or evaluated."),
    "three names and the number of the rest": (
        [result("32-true"), *(lost(f"p{i}") for i in range(6))],
        "Only 32-true ended: val/accuracy 0.9, 100 examples/s. Failed: p0, p1, p2 and 3 more.",
    ),
    "a search": (
        [
            result(p, quality=q, extra=f"optimizer.lr={q}")
            for p, q in (("32-true", 0.7), ("b", 0.9), ("b", 0.8), ("32-true", 0.75))
        ],
        "Best val/accuracy: b optimizer.lr=0.9 with 0.9; best of the other precisions: "
        "32-true optimizer.lr=0.75 with 0.75; one seed each: no verdict.",
    ),
}


@pytest.mark.parametrize(("jobs", "text"), CONCLUSIONS.values(), ids=CONCLUSIONS)
def test_the_conclusion_of(jobs, text):
    assert conclusion_of(*jobs) == text


def test_the_conclusion_names_the_jobs_that_did_not_begin():
    text = conclusion_of(lost("b"), missing="only 9 of 12 began")
    assert text == "No job finished with a finite result. Only 9 of 12 began; failed: b."


def test_one_seed_recommends_nothing():
    jobs = [result("32-true"), result("b", speed=200.0)]
    assert recommended_precision(compare_with_baselines(jobs)) is None


def evaluated(precision, quality, weights, **more):
    return result(
        precision,
        quality=quality,
        weights_mib=weights,
        optimizer_mib=None,
        trained_in="32-true",
        **more,
    )


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
        "val/accuracy was 0.9 as trained in 32-true: bnb-nf4 (13 MiB of weights) changes it by "
        "-0.05; 16-true (50 MiB of weights) changes it by -0.001."
    )


@pytest.mark.parametrize("noted", [True, False])
def test_a_checkpoint_is_compared_with_itself(noted):
    sweep = [
        evaluated(
            precision,
            quality,
            50.0,
            extra=f"checkpoint={name}{more}",
            as_trained={"val/accuracy": own} if noted else {},
        )
        for name, own, low in (("a", 0.9, 0.85), ("b", 0.5, 0.48))
        for precision, quality, more in (
            ("32-true", own, ""),
            ("16-true", low, ""),
            ("tf32", low, " ++precision.x=1"),
        )
    ]
    assert of(sweep, "32-true checkpoint=b").group.change.mean == 0
    assert of(sweep, "16-true checkpoint=b").group.change.mean == pytest.approx(-0.02)
    assert of(sweep, "tf32 checkpoint=b ++precision.x=1").group.change.mean == pytest.approx(-0.02)
    assert conclusion_of(*sweep) == (
        "val/accuracy was 0.9 as trained in 32-true: 16-true checkpoint=a (50 MiB of weights) "
        "changes it by -0.05. val/accuracy was 0.5 as trained in 32-true: 16-true checkpoint=b "
        "(50 MiB of weights) changes it by -0.02."
    )
    table = sweep_table(sweep)
    changes = list(table.columns[[c.header for c in table.columns].index("change")].cells)
    assert changes == ["+0", "-0.05", "-0.05", "+0", "-0.02", "-0.02"]


def test_a_checkpoint_is_compared_on_its_own_device():
    sweep = [
        evaluated("32-true", 0.9, 9.0),
        evaluated("32-true", 0.8, 9.0, device=CPU),
        evaluated("16-true", 0.7, 9.0, device=CPU),
    ]
    assert of(sweep, "16-true", CPU).group.change.mean == pytest.approx(-0.1)


def test_many_checkpoints_are_summarised_by_the_best():
    sweep = [
        evaluated(p, 0.9, 9.0, extra=f"checkpoint={i}")
        for i in range(4)
        for p in ("32-true", "16-true")
    ]
    assert conclusion_of(*sweep).startswith(
        "Evaluated, nothing trained: best 32-true checkpoint=0 with "
    )


def test_each_device_has_its_own_conclusion():
    bases = [result("32-true", device=device) for device in (CPU, GPU)]
    text = conclusion_of(*bases, result("b", speed=50.0, device=CPU), result("b", speed=200.0))
    assert text.startswith(f"On {CPU}: Nothing trained faster than 32-true: b is 0.50 × ")
    assert f"On {GPU}: b trains 2.00 × " in text


def test_jobs_too_short_for_a_speed_are_compared_by_quality():
    groups = {"32-true": (0.90, 0.91), "bf16-mixed": (0.90, 0.91)}
    jobs = [job for name, q in groups.items() for job in seeds(name, q, (None, None))]
    for some in (jobs, jobs[::2]):
        text = conclusion_of(*some)
        assert text.startswith("Too short for a comparison of speed; train for more steps. ")
        assert "val/accuracy against 32-true: bf16-mixed 0.9" in text
        assert "nothing compares" not in text


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


def test_one_slow_job_does_not_change_the_median():
    base = seeds("32-true", (0.9, 0.9, 0.9), (20.0, 100.0, 100.0))
    c = of([*base, *seeds("b", (0.9, 0.9, 0.9), (100.0, 103.0, 102.0))], "b")
    assert c.speed_ratio.value == pytest.approx(1.03)
    assert c.speed_verdict == "unclear"
