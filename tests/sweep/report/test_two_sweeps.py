"""`report A B`: what differs between two sweeps, and B's jobs against A's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runner.modes.result import RunResult
from runner.sweeps.report.jobs import Job, SweepData
from runner.sweeps.report.load import load_from_folder
from runner.sweeps.report.origin import JobOrigin, origins_in_folder
from runner.sweeps.report.statistics import Verdict
from runner.sweeps.report.two_sweeps import LoadedSweep, compare_sweeps
from runner.sweeps.report.two_sweeps_page import comparison_sentence, write_comparison
from runner.utils.errors import ConfigError

GPU = "Some GPU"
DATA = {"training": "aa", "validation": "bb"}
ORIGIN = JobOrigin(
    {"model.hidden": "[16]", "optimizer.lr": "0.1", "data.shuffle": "true", "tracking.uri": "x"},
    {"torch": "2.14", "threads": "2"},
    "0123456789abcdef",
    False,
    DATA,
)


def job(precision, seed, quality, speed=100.0, **more):
    values = {
        "group": precision,
        "seed": seed,
        "model": "mlp",
        "device": GPU,
        "quality": "val/accuracy",
        "metrics": {"val/accuracy": quality},
        "examples_per_second": speed,
        "peak_memory_mib": 100.0,
    }
    return RunResult(precision, f"{precision} seed={seed}", "", **(values | more))


def sweep(name, results, origin=ORIGIN, date="2026-11-20 10:00"):
    data = SweepData([Job(result) for result in results], ["python -m runner -m"], name)
    return LoadedSweep(name, date, data, [origin] * len(results))


FIRST = [
    *(job("32-true", seed, 0.90 + seed / 100) for seed in range(3)),
    *(job("16-mixed", seed, 0.90 + seed / 100, skipped_steps=2) for seed in range(3)),
]
SECOND = [
    *(job("32-true", seed, 0.901 + seed / 90, 101.0) for seed in range(3)),
    *(job("16-mixed", seed, 0.80 + seed / 100 + seed**2 / 1000, 130.0) for seed in range(3)),
]


def text_of(compared, folder):
    return write_comparison(compared, folder)[0].read_text()


def test_b_is_judged_against_a_group_by_group(tmp_path):
    compared = compare_sweeps(sweep("one", FIRST), sweep("two", SECOND))
    verdicts = {pair.second.name: pair.comparison.difference for pair in compared.pairs}
    assert verdicts["32-true"].verdict is Verdict.SAME
    assert (verdicts["16-mixed"].verdict, verdicts["16-mixed"].test) == (Verdict.WORSE, "paired t")
    assert comparison_sentence(compared) == (
        "B against A of 2026-11-20 10:00: no measurable difference in val/accuracy: 32-true; worse "
        "val/accuracy: 16-mixed; faster: 16-mixed (1.30 ×); about as fast: 32-true."
    )
    page = text_of(compared, tmp_path)
    assert "Nothing that both recorded (versions, data, config)" in page
    assert "- 16-mixed: worse by 0.0" in page
    assert "1.30 × as fast as A, with the same peak memory." in page
    assert "| 2 |" in page
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.md", "report.html", "report.png"}


def test_what_differs_comes_first(tmp_path):
    other = replace(
        ORIGIN,
        config={**ORIGIN.config, "optimizer.lr": "0.2", "tracking.uri": "y"},
        environment={"torch": "2.15", "threads": "2"},
        commit="fedcba9876543210",
        has_changes=True,
    )
    second = [replace(result, device="Other GPU") for result in SECOND]
    compared = compare_sweeps(sweep("one", FIRST), sweep("two", second, other))
    page = text_of(compared, tmp_path)
    found = [(one.name, one.first, one.second) for one in compared.differences]
    assert found == [
        ("commit", "0123456789ab", "fedcba987654 with changes that no commit holds"),
        ("torch", "2.14", "2.15"),
        ("device", "Some GPU", "Other GPU"),
        ("optimizer.lr", "0.1", "0.2"),
    ]
    assert page.index("What differs") < page.index("B against A of")
    assert "B ran with changes that no commit holds" in page


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"data": {"training": "aa", "validation": "cc"}},
            "other data (their fingerprints differ)",
        ),
        ({"config": {**ORIGIN.config, "model.hidden": "[32]"}}, "other model.hidden"),
        ({"data": {}, "config": {**ORIGIN.config, "data.n": "5"}}, "other data.n"),
    ],
)
def test_qualities_of_other_data_or_models_are_not_compared(change, reason, tmp_path):
    second = sweep("two", SECOND, replace(ORIGIN, **change))
    compared = compare_sweeps(sweep("one", FIRST), second)
    assert [pair.obstacle for pair in compared.pairs] == [reason] * 2
    assert [pair.comparison.difference for pair in compared.pairs] == [None] * 2
    page = text_of(compared, tmp_path)
    assert f"val/accuracy is not comparable ({reason})" in page.replace("\\", "")
    assert "val/accuracy not comparable: 32-true, 16-mixed; faster: 16-mixed" in page


def test_seeds_are_paired_only_where_the_batches_are_the_same():
    other = replace(ORIGIN, config={**ORIGIN.config, "train.batch_size": "32"})
    compared = compare_sweeps(sweep("one", FIRST), sweep("two", SECOND, other))
    assert {pair.comparison.difference.test for pair in compared.pairs} == {"Welch"}


def test_a_job_that_ended_in_one_sweep_alone_is_named(tmp_path):
    second = [
        *SECOND[:3],
        job("16-mixed", 0, 0.5, status="failed", error="boom", metrics={}),
        job("bf16-mixed", 0, 0.5),
    ]
    compared = compare_sweeps(sweep("one", FIRST), sweep("two", second))
    page = text_of(compared, tmp_path)
    assert "- 16-mixed: not compared: A finished; B 1/1 failed." in page
    assert "not compared, since it did not finish in both: 16-mixed." in page
    assert "Only in B: bf16-mixed." in page


def test_one_seed_gets_no_verdict():
    compared = compare_sweeps(sweep("one", FIRST[:1]), sweep("two", SECOND[:1], date=""))
    assert "no verdict on val/accuracy: 32-true" in comparison_sentence(compared)


def test_sweeps_without_a_common_job_are_refused():
    with pytest.raises(
        ConfigError, match=r"have no job in common: A has 16-mixed, 32-true; B has tf32"
    ):
        compare_sweeps(sweep("one", FIRST), sweep("two", [job("tf32", 0, 0.5)]))
    with pytest.raises(ConfigError, match=r"two \(sweep B\) has no job that wrote a result"):
        compare_sweeps(sweep("one", FIRST), sweep("two", []))


def test_an_origin_is_read_from_whatever_a_folder_holds(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({"id": "s", "command": ["x"]}))
    for number, config in enumerate(["a: {b: [1, x], c: {}}\n", "{damaged"]):
        folder = RunResult("32-true", "a", str(tmp_path / str(number))).write(
            tmp_path / str(number)
        )
        (folder.parent / "config.yaml").write_text(config)
    (tmp_path / "0" / "environment.json").write_text(
        '{"packages": {"torch": "2"}, "git_commit": "c"}'
    )
    (tmp_path / "1" / "environment.json").write_text("[1]")
    first, second = origins_in_folder(tmp_path, load_from_folder(tmp_path))
    assert first.config == {"a.b": "[1, x]", "a.c": "{}"}
    assert (first.environment, first.commit, first.has_changes) == ({"torch": "2"}, "c", None)
    assert second == JobOrigin()


@pytest.fixture(scope="module")
def two_swept(tmp_path_factory, inside, empty_store):
    """Two sweeps of one folder, the second one with another rate; (folder, sweeps, store)."""
    home = tmp_path_factory.mktemp("two")
    uri = empty_store(home / "mlflow.db")
    quick = ("model=mlp", "model.hidden=[16]", "train.max_steps=2", "tracking.log_model=false")
    with inside(home) as main:
        for rate in ("0.01", "0.02"):
            typed = (*quick, f"tracking.uri={uri}", f"optimizer.lr={rate}")
            done = main("-m", "precision=bf16-mixed", *typed, "hydra/launcher=basic")
            assert done.rc == 0, done.stderr
    return home, sorted(home.glob("outputs/sweeps/*")), uri


def test_two_folders_or_two_ids_are_compared(two_swept, main, tmp_path):
    _, (one, two), uri = two_swept
    done = main("report", one, two, "--out", "compared")
    assert done.rc == 0, done.stderr
    assert "| optimizer.lr | 0.01 | 0.02 |" in done.stdout
    assert "no verdict on val/accuracy: bf16-mixed" in done.stdout
    assert (tmp_path / "compared" / "report.html").exists()
    ids = [json.loads((folder / "sweep.json").read_text())["id"] for folder in (one, two)]
    stored = main("report", *ids, f"tracking.uri={uri}")
    assert stored.rc == 0, stored.stderr
    assert "| optimizer.lr | 0.01 | 0.02 |" in stored.stdout
    folder = Path("outputs/reports") / f"{ids[1]}-against-{ids[0]}"
    assert f"{folder}/report.md" in stored.stdout
    # The same facts from both places, but for the names of the sweeps.
    section = slice(done.stdout.index("## What differs"), done.stdout.index("## Commands"))
    assert done.stdout[section] in stored.stdout


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
        (["{one}", "{two}", "{one}"], "report takes one or two sweeps, and was given"),
        (["{one}", "{two}", "out=x"], "report does not take out=x"),
        (["{one}", "{two}", "--out", "{one}/sweep.json"], "The report cannot be written"),
    ],
)
def test_wrong_sweeps_are_refused(two_swept, main, words, message):
    _, (one, two), _ = two_swept
    done = main("report", *(word.format(one=one, two=two) for word in words))
    assert (done.rc, message in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
