"""runner.sweeps.verdict.ranking and advice_page: the ranking, the recommendation, the words."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from job_results import CPU, finished

from runner.core.record.metric_names import VAL_LOSS
from runner.core.run.run_result import RunResult
from runner.output.markup import to_markdown
from runner.sweeps.report.advice_page import advice_answer, advice_blocks
from runner.sweeps.report.charts import chart_figures
from runner.sweeps.report.columns import advice_table
from runner.sweeps.report.pages import write_report
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.report.wording import health_words, reason_sentence
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.answer import Answer
from runner.sweeps.verdict.gate import gate_verdict
from runner.sweeps.verdict.ranking import Advice, rank_precisions
from runner.sweeps.verdict.statistics import Ratio

ASKED = AdviseRequest("time", 1.0, 100, 60, 5, "5m", ["python", "-m", "runner", "model=mlp"])
NOISE = (0.0, 0.01, -0.01, 0.02, -0.02)


def trials(
    precision: str,
    gap: float = 0.0,
    rate: float = 100.0,
    mib: float = 10.0,
    seeds: int = 5,
    settings: str = "",
) -> list[RunResult]:
    """Return a trial per seed, whose loss is the baseline's and a gap that hardly differs."""
    jobs = []
    for seed in range(seeds):
        loss = 1.0 + NOISE[seed] + (gap and gap + 0.0005 * (seed % 2))
        cost = {"examples_per_second": rate, "weights_mib": mib, "optimizer_mib": 0.0}
        job = finished(precision, seed, settings=settings, device=CPU, **cost)
        judged: dict = {"quality": VAL_LOSS, "direction": "min", "metrics": {VAL_LOSS: loss}}
        jobs.append(replace(job, steps=100, folder=f"{precision}-{seed}", **judged))
    return jobs


def changed(jobs: list[RunResult], **values: object) -> list[RunResult]:
    return [replace(job, **values) for job in jobs]


def asked(*groups: list[RunResult], question: AdviseRequest = ASKED) -> Advice:
    return rank_precisions([job for group in groups for job in group], question)


BASE = trials("32-true")


def answer_of(advice: Advice) -> Answer:
    return advice_answer(advice, gate_verdict(advice))


def outcomes(advice: Advice) -> dict[str, str]:
    return {line.name: line.rating for line in advice.verdicts}


@pytest.mark.parametrize("mode", ["advise", "gate"])
def test_the_answer_in_mlflow_is_the_one_that_was_judged(mode: str) -> None:
    question = replace(ASKED, mode=mode, max_gap=0.1 if mode == "gate" else None)
    jobs = [*BASE, *trials("bf16-mixed", 0.001, 150.0)]
    data = SweepData([Job(job) for job in jobs], request=question)
    metrics, tags, _ = data.answer.record
    verdicts = {name: text for name, text in tags.items() if name.startswith("verdict/")}
    assert (tags["answer"], tags["recommended"]) == (data.answer.sentence, "bf16-mixed")
    assert metrics["answer/recommended_speed_ratio"] == 1.5
    gate = gate_verdict(data.advice) if data.advice and mode == "gate" else None
    if gate is not None:
        assert verdicts == {"verdict/bf16-mixed": "accepted"}
        assert metrics["answer/gap/bf16-mixed"] == gate.looks[-1].gap
        assert metrics["answer/gap_half_width/bf16-mixed"] == gate.looks[-1].half_width
    else:
        (test,) = [verdict.test for verdict in data.advice.verdicts if verdict.test]
        assert verdicts == {"verdict/bf16-mixed": "recommended", "verdict/32-true": "baseline"}
        assert metrics["answer/gap/bf16-mixed"] == test.value
    assert metrics["answer/speed_ratio/bf16-mixed"] == 1.5


def test_the_fastest_that_is_not_worse_is_recommended() -> None:
    found = asked(
        BASE,
        trials("bf16-mixed", 0.001, 150.0),
        trials("16-mixed", 0.002, 130.0),
        trials("bf16-true", 0.5, 200.0),
    )
    assert list(outcomes(found).items()) == [
        ("bf16-mixed", "recommended"),
        ("16-mixed", "indistinguishable"),
        ("32-true", "baseline"),
        ("bf16-true", "worse"),
    ]
    assert str(answer_of(found).command) == "python -m runner model=mlp precision=bf16-mixed"
    answer = answer_of(found)
    assert answer.sentence == "Use bf16-mixed: 1.50 × as fast as 32-true, loss within tolerance."
    assert answer.remarks[0].startswith("bf16-mixed: loss +0.001")


def test_precisions_are_judged_by_the_named_quality_in_its_direction() -> None:
    def scored(jobs: list[RunResult]) -> list[RunResult]:
        # The better the score, the greater the loss, which must not count.
        found = []
        for job in jobs:
            score = 2 - job.metrics[VAL_LOSS]
            metrics = {VAL_LOSS: score, "val/f1": score}
            found.append(replace(job, quality="val/f1", direction="max", metrics=metrics))
        return found

    settings = replace(ASKED, metric="val/f1", direction="max")
    jobs = [BASE, trials("bf16-mixed", -0.1, 150.0), trials("16-mixed", 0.1, 150.0)]
    found = rank_precisions([job for some in jobs for job in scored(some)], settings)
    verdicts = {verdict.name: verdict for verdict in found.verdicts}
    assert verdicts["bf16-mixed"].rating.name == "RECOMMENDED"
    assert verdicts["16-mixed"].rating.name == "WORSE"
    assert answer_of(found).sentence.endswith("32-true, val/f1 better.")
    assert answer_of(found).remarks[0].startswith("bf16-mixed: val/f1 +0.0998")
    assert reason_sentence(verdicts["16-mixed"]).startswith("val/f1 -0.1")
    assert reason_sentence(verdicts["32-true"]).startswith("val/f1 1, seeds differ by")


def test_a_precision_on_two_devices_is_judged_on_each() -> None:
    other = changed(trials("bf16-mixed", 0.5), device="another CPU")
    verdicts = asked(BASE, trials("bf16-mixed", 0.001, 150.0), other).verdicts
    found = [(verdict.group.device, verdict.rating) for verdict in verdicts]
    assert found == [(CPU, "recommended"), (CPU, "baseline"), ("another CPU", "worse")]


def test_float32_is_recommended_if_nothing_is_faster() -> None:
    found = asked(BASE, trials("bf16-mixed", 0.001, 101.0), trials("16-mixed", 0.0, 50.0))
    assert found.recommendation is not None
    assert found.recommendation.name == "32-true"
    assert answer_of(found).sentence.startswith("Stay with 32-true")


@pytest.mark.parametrize(
    ("objective", "best"), [("time", "bf16-mixed"), ("memory", "bf16-true"), ("quality", "64-true")]
)
def test_the_objective_decides_among_the_acceptable(objective: str, best: str) -> None:
    found = asked(
        BASE,
        trials("bf16-mixed", 0.001, 150.0),
        trials("bf16-true", 0.001, 120.0, 5.0),
        trials("64-true", -0.5, 50.0, 20.0),
        question=replace(ASKED, objective=objective),
    )
    assert found.recommendation is not None
    assert found.recommendation.name == best


def test_a_diverged_precision_names_its_step() -> None:
    end = {"status": "failed", "diverged": True, "steps": 60, "diverged_step": 42}
    bad = changed(trials("16-mixed", seeds=1), metrics={}, **end)
    line = asked(BASE, bad).verdicts[-1]
    assert (line.rating, line.diverged_step, line.is_failing) == ("diverged", 42, True)
    assert "diverged at step 42" in to_markdown("", [advice_table(asked(BASE, bad))])


def test_few_seeds_are_not_enough_evidence() -> None:
    found = asked(trials("32-true", seeds=2), trials("bf16-mixed", 0.5, 200.0, seeds=2))
    assert outcomes(found)["bf16-mixed"] == "unclear"
    assert "of 3 seeds" in reason_sentence(found.verdicts[-1])


def test_a_trial_that_ran_out_of_time_is_slow_and_not_judged() -> None:
    found = asked(BASE, changed(trials("16-true", 0.0), steps=30))
    assert outcomes(found)["16-true"] == "slow"
    assert "step 30" in reason_sentence(found.verdicts[-1])


def test_an_emulated_precision_has_a_verdict_on_quality_and_no_speed() -> None:
    name = "float8-tensorwise"
    question = replace(ASKED, emulated=[name], overrides={name: ["precision.emulate=true"]})
    found = asked(BASE, trials(name, 0.001, 900.0, 1.0), question=question)
    assert found.recommendation is not None
    assert found.recommendation.name == "32-true"
    line = next(line for line in found.verdicts if line.is_emulated)
    assert line.command[-2:] == ["precision=float8-tensorwise", "precision.emulate=true"]
    assert "unknown" in to_markdown("", [advice_table(found)])


def test_a_module_set_that_heals_has_a_row_and_a_failed_attempt_has_none() -> None:
    settings = "precision.keep_fp32=[head]"
    found = asked(
        BASE,
        trials("16-mixed", 0.5, 150.0),
        trials("16-mixed", 0.001, 140.0, settings=settings),
        trials("16-mixed", 0.4, 140.0, seeds=1, settings="precision.keep_fp32=[stem]"),
    )
    assert outcomes(found) == {
        f"16-mixed {settings}": "recommended",
        "32-true": "baseline",
        "16-mixed": "worse",
    }
    assert (
        str(answer_of(found).command)
        == f"python -m runner model=mlp precision=16-mixed '{settings}'"
    )


def test_attempted_module_sets_are_listed_if_none_heals() -> None:
    stem, head = "precision.keep_fp32=[stem]", "precision.keep_fp32=[stem,head]"
    bad = [
        trials("16-mixed", 0.5),
        *(trials("16-mixed", 0.4, seeds=1, settings=s) for s in (stem, head)),
    ]
    page = to_markdown("", [advice_table(asked(BASE, *bad))])
    attempts = f"tried on one seed: {stem} loss +0.4, {head} loss +0.4"
    assert attempts in page.replace("\\", "")
    healed = trials("16-mixed", 0.001, settings="precision.keep_fp32=[head]")
    assert "tried on" not in to_markdown("", [advice_table(asked(BASE, *bad, healed))])


GOOD = trials("bf16-mixed", 0.001, 150.0)
UNCLEAR = [
    replace(job, metrics={VAL_LOSS: 1.0 + 0.05 * (-1) ** (job.seed or 0)})
    for job in trials("bf16-mixed")
]
NOT_ENOUGH = "Not enough evidence in this budget about bf16-mixed;"
RESERVATIONS = {
    "none": (GOOD, 0.05, ""),
    "a busy machine": (
        GOOD,
        0.6,
        "Other programs kept 60% of the processors busy, so that no difference in speed counts as "
        "measured: repeat it on a quiet machine.",
    ),
    "a stop": (
        changed(trials("bf16-mixed", seeds=1), status="stopped"),
        0.0,
        "It was stopped before it could judge bf16-mixed.",
    ),
    "what was not computed as asked": (
        changed(trials("bf16-mixed", seeds=3), caveats=["Half of it in float32."]),
        0.0,
        "bf16-mixed: Half of it in float32.",
    ),
    "too few seeds for the spread": (UNCLEAR, 0.0, f"{NOT_ENOUGH} more advise.seeds may decide."),
    "a budget for two seeds": (
        UNCLEAR[:2],
        0.0,
        f"{NOT_ENOUGH} a larger advise.budget may decide.",
    ),
}


@pytest.mark.parametrize(("jobs", "busy", "text"), RESERVATIONS.values(), ids=RESERVATIONS)
def test_reservations_are_named(jobs: list[RunResult], busy: float, text: str) -> None:
    remarks = answer_of(asked(BASE, jobs, question=replace(ASKED, busy=busy))).remarks
    # First come the numbers of a precision that is recommended.
    assert " ".join(remarks).endswith(text)


def test_float32_that_diverges_leaves_no_advice() -> None:
    found = asked(changed(BASE, diverged=True, status="failed"), trials("bf16-mixed"))
    assert found.recommendation is None
    assert answer_of(found).sentence.startswith("No advice")


def test_health_names_overflows_the_loss_scale_and_stagnant_weights() -> None:
    jobs = changed(trials("16-mixed"), skipped_steps=3, loss_scale=1024.0, stagnant_share=0.25)
    line = next(line for line in asked(BASE, jobs).verdicts if line.name == "16-mixed")
    assert health_words(line) == (
        "3.0% of steps overflowed; loss scale 1024 at the end; 25% of the weights did not move"
    )


def test_the_report_has_the_next_command_and_the_method(tmp_path: Path) -> None:
    jobs = [Job(job) for job in [*BASE, *trials("bf16-mixed", 0.001, 150.0)]]
    paths = write_report(SweepData(jobs, ["mode=advise"], request=ASKED), tmp_path)
    text = paths[0].read_text()
    assert text.startswith("# Which precision for mlp?")
    assert "python -m runner model=mlp precision=bf16-mixed" in text
    assert text.index("## Every job") < text.index("## How this was judged")
    assert "Student 1908" in text
    assert "not a whole training" in paths[1].read_text()
    assert len(list(advice_blocks(rank_precisions([j.result for j in jobs], ASKED), None))) == 3


def test_settings_read_back_from_their_file_and_a_damaged_file_has_none(tmp_path: Path) -> None:
    question = replace(
        ASKED,
        emulated=["a"],
        overrides={"a": ["b=1", "c=2"]},
        unavailable={"tf32": "needs: a GPU"},
        diagnoses={"a": "short of range"},
        memory={"a": {"peak_mib": 12.5, "largest_batch": 64}},
    )
    question.write(tmp_path)
    assert AdviseRequest.read(tmp_path) == question
    (tmp_path / "advise.json").write_text("{]")
    assert AdviseRequest.read(tmp_path) is None
    assert AdviseRequest.read(tmp_path / "none") is None
    assert AdviseRequest.from_json({"objective": 3}) is None
    assert AdviseRequest.from_json({**asdict(ASKED), "memory": {"a": "12.5 64"}}) is None


def test_no_speed_is_compared_where_one_trial_was_too_short_for_it() -> None:
    slow = [replace(job, examples_per_second=10.0 * (job.seed or 1)) for job in BASE]
    half = [replace(j, examples_per_second=5.0 * (j.seed or 1)) for j in trials("bf16-mixed")]

    def speed(*without: int) -> Ratio | None:
        some = [replace(j, examples_per_second=None) if j.seed in without else j for j in slow]
        line = next(n for n in asked(some, half).verdicts if n.name == "bf16-mixed")
        return line.comparison.speed_ratio

    assert speed() == Ratio(0.5, 5, pytest.approx(0.5), pytest.approx(0.5))
    assert speed(1) is None
    none = [replace(j, examples_per_second=None) for j in BASE]
    found = asked(none, trials("bf16-mixed"))
    assert answer_of(found).sentence.startswith(
        "Stay with 32-true for now: no trial was long enough"
    )


def test_precisions_of_equal_speed_rank_by_memory() -> None:
    """Ranges that overlap are no order: the lighter one is the better."""
    fast = changed(trials("bf16-mixed"), examples_per_second=200.0)
    light = trials("bf16-true", mib=5.0)
    noisy = [replace(j, examples_per_second=195.0 + 5 * (j.seed or 0)) for j in light]
    assert asked(BASE, fast, noisy).verdicts[0].name == "bf16-true"
    distinct = changed(trials("bf16-true", mib=5.0), examples_per_second=150.0)
    assert asked(BASE, fast, distinct).verdicts[0].name == "bf16-mixed"


def test_a_loss_scale_that_begins_too_high_has_a_remedy() -> None:
    jobs = changed(trials("16-mixed", 0.5), skipped_steps=7, loss_scale=512.0)
    made = advice_table(asked(BASE, jobs))
    assert "try precision.loss_scale.init_scale=512" in str(made.rows)


def test_advise_and_gate_draw_the_intervals_of_their_tests() -> None:
    jobs = [*BASE, *trials("bf16-mixed", 0.001)]
    advise = SweepData([Job(job) for job in jobs], request=ASKED)
    (test,) = (verdict.test for verdict in advise.advice.verdicts if verdict.test)
    gate = replace(advise, request=replace(ASKED, mode="gate", max_gap=0.0001))
    looks = gate_verdict(gate.advice).looks
    for data, rows in (
        (advise, {"bf16-mixed": (test.value, test.ci_half_width)}),
        (gate, {f"{look.seeds} seeds": (look.gap, look.half_width) for look in looks}),
    ):
        axes = chart_figures(data)[0].axes[0]
        assert axes.get_title(loc="right").endswith("interval of the test; shaded: tolerated")
        assert [tick.get_text() for tick in axes.get_yticklabels()] == [*rows]
        # What is better by any amount is tolerated: the shade begins at the axis' end.
        (shade,) = axes.patches
        assert shade.get_x() == axes.get_xlim()[0]
        assert shade.get_x() + shade.get_width() == pytest.approx(
            data.advice.request.accepted.certain_gap(data.advice.baseline_spread, 5)
        )
        ends = [bars.get_segments()[0][:, 0].tolist() for bars in axes.collections]
        assert ends == [pytest.approx([gap - half, gap + half]) for gap, half in rows.values()]


def test_a_precision_whose_weights_no_longer_move_is_not_recommended() -> None:
    """Its loss is as good, and the next steps would change nothing."""
    stalled = changed(trials("bf16-true", 0.001, 200.0), stagnant_share=0.92)
    advice = asked(BASE, stalled, trials("bf16-mixed", 0.001, 150.0))
    assert outcomes(advice) == {
        "bf16-mixed": "recommended",
        "32-true": "baseline",
        "bf16-true": "stalled",
    }
    # A rule that keeps its updates is searched for, as for one that is worse.
    assert advice.verdicts[-1].is_failing
    gate = gate_verdict(asked(BASE, stalled, question=replace(ASKED, mode="gate", max_gap=0.1)))
    assert gate is not None
    assert (gate.decision, gate.exit_status) == ("undecided", 3)
    assert gate.reason == "the last step moved none of 92.0% of its weights"


def test_nothing_is_judged_where_nothing_was_learned() -> None:
    jobs = [*BASE, *trials("bf16-mixed", 0.001, 150.0)]
    advice = rank_precisions(jobs, ASKED, untrained=BASE[:1])
    assert answer_of(advice).sentence == "Stay with 32-true for now: nothing could be judged."


@pytest.mark.parametrize("mode", ["advise", "gate"])
def test_python_gets_the_answer_that_the_command_prints(mode: str) -> None:
    question = replace(ASKED, mode=mode, max_gap=0.1)
    jobs = [*BASE, *trials("bf16-mixed", 0.001, 150.0)]
    text = SweepData([Job(job) for job in jobs], request=question).answer.text
    start = {"advise": "Use bf16-mixed: 1.50 × as fast as", "gate": "bf16-mixed is accepted. Its "}
    assert text.startswith(start[mode])


def test_a_gate_whose_bar_is_measured_by_few_seeds_accepts_below_its_lower_bound() -> None:
    """The bar is the deviation of five seeds: 0.0158, surely 0.0103."""
    for gap, decision in ((0.0095, "accepted"), (0.012, "undecided")):
        jobs = [*BASE, *trials("b", gap)]
        gate = gate_verdict(rank_precisions(jobs, replace(ASKED, mode="gate")))
        assert gate is not None
        assert gate.decision == decision
        assert gate.bar == pytest.approx(0.0158, abs=1e-4)
        assert gate.to_json()["bar_lower_bound"] == pytest.approx(0.01026, abs=1e-4)
