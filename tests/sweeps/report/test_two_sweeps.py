"""`report A B`: the report over the jobs of two sweeps, with what differs between them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from job_results import CPU, finished
from run_folders import read_json

from runner.core.base.errors import ConfigError
from runner.core.run.run_result import RunResult
from runner.sweeps.report.charts import group_styles
from runner.sweeps.report.load import LoadedSweep, join_sweeps, load_from_folder
from runner.sweeps.report.pages import write_report
from runner.sweeps.report.sweep_data import Job, JobSettings, SweepData
from runner.sweeps.verdict.compare import compare_with_baselines
from runner.sweeps.verdict.statistics import Verdict

SETTINGS = JobSettings(
    {"model.hidden": "[16]", "optimizer.lr": "0.1", "tracking.uri": "x"},
    {"torch": "2.14", "git_commit": "0123"},
)


def sweep(name, results, settings=SETTINGS, date="2026-11-20 10:00"):
    jobs = [Job(result, read_settings=lambda: settings) for result in results]
    return LoadedSweep(name, date, SweepData(jobs, ["python -m runner -m"], name))


FIRST = [
    *(finished("32-true", s, 0.90 + s / 100) for s in range(3)),
    *(finished("16-mixed", s, 0.90 + s / 100, skipped_steps=2) for s in range(3)),
]
SECOND = [
    *(finished("32-true", s, 0.901 + s / 90, examples_per_second=101.0) for s in range(3)),
    *(
        finished("16-mixed", s, 0.80 + s / 100 + s**2 / 1000, examples_per_second=130.0)
        for s in range(3)
    ),
]


def compared(first, second):
    data = join_sweeps(sweep("one", first), sweep("two", second))
    groups = compare_with_baselines([each.result for each in data.jobs])
    return {comparison.group.name: comparison for comparison in groups}


def test_jobs_of_both_are_compared_with_32_true_of_the_first(tmp_path):
    groups = compared(FIRST, SECOND)
    assert groups["32-true sweep=A"].is_baseline
    assert {one.baseline.name for one in groups.values()} == {"32-true sweep=A"}
    verdicts = {name: one.difference and one.difference.verdict for name, one in groups.items()}
    assert verdicts == {
        "32-true sweep=A": None,
        "16-mixed sweep=A": Verdict.INDISTINGUISHABLE,
        "32-true sweep=B": Verdict.INDISTINGUISHABLE,
        "16-mixed sweep=B": Verdict.WORSE,
    }
    assert groups["16-mixed sweep=B"].difference.test == "paired t"
    data = join_sweeps(sweep("one", FIRST), sweep("two", SECOND))
    page = write_report(data, tmp_path)[0].read_text()
    assert page.startswith("# Sweep over precision × seed × sweep: mlp\n")
    assert "A is one, 2026-11-20 10:00; B is two, 2026-11-20 10:00." in page
    assert "No setting, version or commit that A and B recorded differs." in page
    assert (
        "**B against 32-true of A: 1 worse, 1 within tolerance.**\n\n"
        "16-mixed sweep=A: within tolerance, about as fast. "
        "32-true sweep=B: within tolerance, about as fast. 16-mixed sweep=B: worse, faster."
    ) in page
    assert "| job | sweep | " in page
    assert "| 16-mixed | B | " in page
    assert "| 32-true seed=0 | A | " in page
    assert "B's seeds are paired with A's where both are the same" in page
    assert {"report.csv", "report.html", "report.png"} < {path.name for path in tmp_path.iterdir()}


def test_without_equal_seeds_nothing_is_paired():
    second = [replace(result, seed=result.seed + 10) for result in SECOND]
    tests = {name: one.difference for name, one in compared(FIRST, second).items()}
    assert tests["16-mixed sweep=A"].test == "paired t"
    assert {tests["32-true sweep=B"].test, tests["16-mixed sweep=B"].test} == {"Welch"}


def test_what_differs_is_one_line():
    other = JobSettings(
        {"model.hidden": "[32]", "optimizer.lr": "0.2", "tracking.uri": "y"},
        {"torch": "2.15", "git_commit": "0123"},
    )
    second = [*SECOND, finished("bf16-mixed", 0, 0.5)]
    data = join_sweeps(sweep("one", FIRST), sweep("two", second, other))
    assert data.notes[1:] == [
        "What differs (in A, in B): model.hidden ([16], [32]), optimizer.lr (0.1, 0.2), torch "
        "(2.14, 2.15).",
        "The qualities of A and B are of other models, tasks or data (model.hidden): their "
        "difference is not that of the precisions.",
    ]
    unknown = join_sweeps(sweep("one", FIRST), sweep("two", SECOND, JobSettings()))
    assert "is not known" in unknown.notes[1]


def test_another_machine_is_compared_and_another_model_is_not():
    second = [replace(result, device="Other GPU") for result in SECOND]
    assert compared(FIRST, second)["16-mixed sweep=B"].speed_verdict == "faster"
    second = [replace(result, model="vit") for result in SECOND]
    group = compared(FIRST, second)["16-mixed sweep=B"]
    assert (group.difference, group.speed_verdict) == (None, "faster")
    on_cpu = [replace(result, device=CPU, device_type="cpu") for result in SECOND]
    assert compared(FIRST, on_cpu)["16-mixed sweep=B"].memory_ratio is None


def test_without_a_baseline_in_the_first_sweep_nothing_is_compared(tmp_path):
    data = join_sweeps(sweep("one", FIRST[3:]), sweep("two", SECOND))
    page = write_report(data, tmp_path)[0].read_text()
    assert "Nothing is compared: A has no 32-true job" in page


def test_what_other_programs_kept_busy_in_either_judges_no_speed_of_both():
    loaded = [sweep("one", FIRST), sweep("two", SECOND)]
    loaded[1] = replace(loaded[1], data=replace(loaded[1].data, busy=0.6))
    assert join_sweeps(*loaded).busy == 0.6


def test_a_precision_has_one_colour_in_both_sweeps():
    named = [("32-true", "A"), ("16-mixed", "A"), ("16-mixed", "B")]
    styles = group_styles([finished(name, sweep=letter) for name, letter in named])
    assert styles["32-true sweep=A"] == ("black", 0)
    assert styles["16-mixed sweep=A"][0] == styles["16-mixed sweep=B"][0]
    assert styles["16-mixed sweep=A"] != styles["16-mixed sweep=B"]


def test_a_sweep_without_jobs_is_refused():
    with pytest.raises(ConfigError, match=r"two has no job that wrote a result"):
        join_sweeps(sweep("one", FIRST), sweep("two", []))


def test_settings_are_read_from_whatever_a_folder_holds(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({"id": "s", "command": ["x"]}))
    for number, config in enumerate(["a: {b: [1, x], c: {}}\n", "{damaged"]):
        folder = RunResult(
            precision="32-true", label="a", folder=str(tmp_path / str(number))
        ).write(tmp_path / str(number))
        (folder.parent / "config.yaml").write_text(config)
    (tmp_path / "0" / "environment.json").write_text(
        '{"packages": {"torch": "2"}, "git_commit": "c"}'
    )
    (tmp_path / "1" / "environment.json").write_text("[1]")
    first, second = (each.read_settings() for each in load_from_folder(tmp_path).jobs)
    assert first.config == {"a.b": "[1, x]", "a.c": "{}"}
    assert first.environment == {"torch": "2", "git_commit": "c"}
    assert second == JobSettings()


@pytest.fixture(scope="module")
def two_swept(tmp_path_factory, inside, empty_store):
    """Two sweeps of one folder, the second one with another rate; (folder, sweeps, store)."""
    home = tmp_path_factory.mktemp("two")
    uri = empty_store(home / "mlflow.db")
    command = (
        "-m precision=32-true model=mlp model.hidden=[16] train.max_steps=2 "
        f"tracking.log_model=false tracking.uri={uri} hydra/launcher=basic"
    )
    with inside(home) as main:
        for rate in ("0.01", "0.02"):
            main(*command.split(), f"optimizer.lr={rate}").check_ok()
    return home, sorted(home.glob("outputs/sweeps/*")), uri


def test_two_folders_or_two_ids_are_reported(two_swept, main, tmp_path):
    _, (one, two), uri = two_swept
    done = main("report", one, two, "--out", "both").check_ok()
    differs = "What differs (in A, in B): optimizer.lr (0.01, 0.02)."
    assert differs in done.stdout.replace("\\", "")
    assert "B against 32-true of A: 1 not judged" in done.stdout
    assert (tmp_path / "both" / "report.html").exists()
    ids = [read_json(folder / "sweep.json")["id"] for folder in (one, two)]
    stored = main("report", *ids, f"tracking.uri={uri}").check_ok()
    assert differs in stored.stdout.replace("\\", "")
    folder = Path("outputs/reports") / f"{ids[0]}-and-{ids[1]}"
    assert f"{folder}/report.md" in stored.stdout


def test_one_sweeps_report_goes_to_another_folder(two_swept, main, tmp_path):
    _, (one, _), _ = two_swept
    assert main("report", one, "--out", "else/where").rc == 0
    assert (tmp_path / "else" / "where" / "report.csv").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{one}", "{one}"], "are the same sweep. Type report <A> <B> with two sweeps."),
        (["{one}", "nosuch"], "nosuch is no sweep here"),
        (["{one}", "."], "is not a sweep: it holds no sweep.json"),
        (["."], "is not a sweep: it holds no sweep.json"),
        (["{one}", "{two}", "out=x"], "report does not take out=x"),
        (["{one}", "{two}", "--out", "{one}/sweep.json"], "The report cannot be written"),
    ],
)
def test_wrong_sweeps_are_refused(two_swept, main, words, message):
    _, (one, two), _ = two_swept
    main("report", *(word.format(one=one, two=two) for word in words)).check_refused(message)
