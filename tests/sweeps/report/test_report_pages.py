import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from job_results import CPU, finished
from job_results import lost as lost_result

from runner.output.markup import (
    Cell,
    Commands,
    Items,
    Table,
    Text,
    markdown,
    markdown_code,
    markdown_text,
    to_html,
)
from runner.sweeps.report.pages import summary_markdown, swept_keys, write_report
from runner.sweeps.report.sweep_data import Job, JobSettings, SweepData

HOSTILE = (
    "<script>alert(1)</script> | `x` <img src=x onerror=y> [a](javascript:1) ![b](http://h/p.png)"
    "\" '\n# head &amp; <b>"
)


def job(precision, seed=0, quality=0.9, **more):
    """Return a job whose loss is as finite as its quality from step 4 on."""
    values = {"data": "digits", "device": CPU, "step_ms": 12.5, "peak_memory_mib": 1234.0}
    steps = np.arange(1, 6)
    loss = np.where(steps > 3, 1.0 if math.isfinite(quality) else math.nan, 2.0)
    curves = {"train/loss": np.array([steps, steps, loss])}
    return Job(finished(precision, seed, quality, **(values | more)), curves)


def lost(precision, status, error):
    return Job(replace(lost_result(precision, status, error), label=precision))


@pytest.fixture
def sweep():
    jobs = [
        *(job("32-true", s, q) for s, q in enumerate((0.90, 0.91, 0.92))),
        *(
            job("bf16-mixed", s, q, examples_per_second=150.0)
            for s, q in enumerate((0.905, 0.908, 0.921))
        ),
        job("16-mixed", loss_scale=16384.0, skipped_steps=2, converted="53/54"),
        job("16-true", quality=math.nan),
        lost("tf32", "unavailable", "tf32 needs a GPU. Type precision=32-true."),
        lost("64-true", "failed", "a | b\nsecond"),
    ]
    return SweepData(jobs, ["python -m runner -m precision=32-true,bf16-mixed"], "abc123")


class Page(HTMLParser):
    """Tags, attributes and what a reader sees."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.shown, self.open = set(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" not in self.open:
            self.shown.append(data)


def pages(data, folder):
    found = {path.suffix: path for path in write_report(data, folder)}
    return found[".md"].read_text(), found[".html"].read_text(), found


def test_a_key_that_a_precision_does_not_take_is_not_swept():
    key = "precision.loss_scale.fixed"
    scaled = finished("16-mixed", overrides=["precision=16-mixed", "seed=0", f"{key}=1e9"])
    assert swept_keys([finished("32-true", left_out=[key]), scaled]) == ["precision"]
    assert swept_keys([finished("32-true"), scaled]) == ["precision", key]


def test_markdown_and_html_say_the_same(sweep, tmp_path):
    text, html, found = pages(sweep, tmp_path)
    shown = " ".join(" ".join(Page(html).shown).split())
    assert found[".png"].read_bytes().startswith(b"\x89PNG")
    for cell in (
        "Sweep over precision × seed: mlp on digits",
        "7 of 10 jobs finished",
        CPU,
        "abc123",
        "Train in bf16-mixed: 1.50 × as fast as 32-true, val/accuracy within tolerance.",
        "precision=bf16-mixed",
        "+0.0013 ± 0.0059",
        "Without a result",
        "tf32 needs a GPU. Type precision=32-true.",
        "val/loss 1, val/accuracy nan",
        "training loss first not finite at step 4",
        "01 January 1970, 00:00 UTC",
        "Every job",
        "python -m runner -m precision=32-true,bf16-mixed",
        "paired t, Student 1908",
        "Seeds: 0, 1, 2",
        "resident set is not compared",
    ):
        assert cell in shown, cell
        assert cell in text, cell
    # A text of several lines is a block of code.
    assert "- 64-true:\n\n      failed: a | b\n      second\n" in text
    assert "<pre>failed: a | b\nsecond</pre>" in html


def test_the_markdown_is_tables(sweep, tmp_path):
    text, _, _ = pages(sweep, tmp_path)
    assert "| **bf16-mixed (recommended)** | 3/3 finished |" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2
    for table in tables:
        lines = table.splitlines()
        assert re.fullmatch(r"\|( -+:? \|)+", lines[1])
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {lines[1].count("|")}


def test_the_page_needs_nothing_and_runs_nothing(sweep, tmp_path):
    _, html, _ = pages(sweep, tmp_path)
    page = Page(html)
    assert not page.tags & {"script", "img", "link", "iframe", "image", "base", "form", "object"}
    names = {name for _, name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} | {"src"} & names
    for _, name, value in page.attributes:
        if name in ("href", "xlink:href"):
            assert value.startswith("#")
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0
    assert "default-src 'none'" in html
    assert ("meta", "name", "viewport") in page.attributes
    assert not re.search(r"@import|url\((?!#)", html)


def hostile():
    odd = dict.fromkeys(("group", "model", "data", "device", "converted"), HOSTILE)
    overrides = (f"precision={HOSTILE}", HOSTILE)
    first = job(HOSTILE, **odd, overrides=overrides, metrics={HOSTILE: 0.5})
    curves = {HOSTILE: np.array([[1.0, 2.0], [1.0, 2.0], [0.1, 0.5]])}
    first = Job(replace(first.result, quality=HOSTILE), {**first.curves, **curves})
    jobs = [
        first,
        job("32-true", device=HOSTILE),
        lost(HOSTILE, "unavailable", HOSTILE),
        lost(f"{HOSTILE}2", "failed", HOSTILE),
    ]
    return SweepData(jobs, [HOSTILE], HOSTILE)


def test_nothing_gets_into_the_page(tmp_path):
    _, html, _ = pages(hostile(), tmp_path)
    page = Page(html)
    assert not page.tags & {"script", "img", "a"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "".join(page.shown).count("<script>alert(1)</script>") > 10


def test_nothing_gets_into_the_markdown(tmp_path):
    text, _, _ = pages(hostile(), tmp_path)
    for whole in (text, summary_markdown(hostile())):
        outside = re.sub(r"(?m)^(?:- )?(`+) .*? \1(?= ·|$)|^ {6}.*$", "", whole)
        assert (whole != outside) == (whole is text), "the note has no command"
        assert "<" not in outside
        assert not re.search(r"(?<!\\)\]\(", outside)
        assert not re.search(r"(?<!\\)`", outside)
        assert not re.search(r"(?m)^# head", whole)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b\nc", "a\\|b c"),
        ("<i>&", "&lt;i&gt;&amp;"),
        ("*a* ~b~", "\\*a\\* \\~b\\~"),
        ("loss_scale __x__", "loss_scale \\_\\_x\\_\\_"),
        ("keep_fp32=[fc]", "keep_fp32=[fc]"),
        ("[a](b)", "[a\\](b)"),
        ("[a]: b", "[a\\]: b"),
        ("a\\|", "a\\\\\\|"),
        ("-0.5", "-0.5"),
    ],
)
def test_markdown_is_escaped(text, expected):
    assert markdown_text(text) == expected


@pytest.mark.parametrize("text", ["# a", "- a", "+ a", "1. a", "1) a", "=== a", "---"])
def test_no_text_begins_a_block(text):
    assert re.search(r"^\d*\\", markdown(Text(text)))
    assert re.search(r"^- \d*\\", markdown(Items([(text, "x")])))


def test_code_is_fenced_by_more_than_it_holds():
    assert markdown_code("a b") == "`a b`"
    assert markdown_code("a `` b\n`") == "``` a `` b ` ```"
    assert markdown(Commands(["x"])) == "- `x`"


def test_a_cell():
    table = to_html("", [Table(["a"], [[Cell("<b>", "bad", "<i>", 2.0)], [Cell("")]])])
    assert "&lt;b&gt;" in table
    assert "<small>&lt;i&gt;</small>" in table
    assert "width:100%" in table
    assert '<td class="word"></td>' in table


def test_evaluations_have_their_change_and_no_picture(tmp_path):
    own = {
        "as_trained": {"val/accuracy": 0.9, "val/loss": 1.5},
        "plain_weights_mib": 100.0,
        "optimizer_mib": None,
        "device": CPU,
        "trained_in": "32-true",
    }
    jobs = [
        Job(finished(precision, 0, quality, weights_mib=mib, **own))
        for precision, quality, mib in (("32-true", 0.9, 100.0), ("nf4", 0.85, 13.0))
    ]
    text, html, found = pages(SweepData(jobs), tmp_path)
    assert ".png" not in found
    assert "<figure>" not in html
    head, _, *rows = next(b for b in text.split("\n\n") if b.startswith("|")).splitlines()
    assert "| change |" in head
    assert "| best |" not in head
    assert "| -0.05 |" in rows[1]
    assert "(100 MiB)" in rows[0]


def test_without_a_baseline_no_ratio_is_made_up(tmp_path):
    text, _, _ = pages(SweepData([job("a"), job("b")]), tmp_path)
    assert "No 32-true job to compare with; add precision=32-true." in text
    assert "× 32-true" not in text
    assert "baseline" not in text


def test_a_long_page_folds_jobs_and_says_once_what_all_rows_have_in_common(tmp_path):
    jobs = [job("32-true"), *(job(f"p{i}") for i in range(12)), lost("r", "refused", "eps is 0")]
    text, html, _ = pages(SweepData(jobs), tmp_path)
    assert text.count("not judged") == 1
    assert "Against the baseline, each one with a result: not judged (one seed)." in text
    assert "- r: not tried: eps is 0" in text
    assert html.count("<details><summary>14 jobs</summary>") == 1
    assert html.count("<table") == 2


def test_a_group_without_a_baseline_is_named(tmp_path):
    groups = ("32-true lr=1", "a lr=1", "a lr=2")
    pairs = [group.split() for group in groups]
    jobs = [job(name, group=f"{name} {own}", settings=own) for name, own in pairs]
    text, _, _ = pages(SweepData(jobs), tmp_path)
    assert "Not compared: a lr=2: no 32-true job to compare with" in text


@pytest.mark.parametrize("jobs", [[], [lost("a", "failed", "x")], [lost("a", "unavailable", "y")]])
def test_a_sweep_without_a_finished_job_has_a_report(jobs, tmp_path):
    text, _, found = pages(SweepData(jobs, is_stopped=True), tmp_path)
    assert set(found) == {".md", ".html", ".csv", ".json"}
    assert "The sweep was stopped before its last job" in text
    assert "How this was compared" not in text


def test_infinite_numbers_are_shown(tmp_path):
    text, html, _ = pages(SweepData([job("a", quality=math.inf), job("b")]), tmp_path)
    assert "| a seed=0 | diverged | inf |" in text
    assert ">inf<" in html


def test_the_note_is_the_answer_then_links_and_what_failed(sweep):
    answer, rest = summary_markdown(sweep, "[Report](#/r)").strip().split("\n\n")
    assert answer.startswith("**")
    # MLflow folds what takes more than about five lines.
    assert rest.startswith("[Report](#/r) · Diverged: 16-true; ")


def test_the_summary_names_failed_jobs(sweep):
    assert "Diverged: 16-true; failed: 64-true; unavailable here: tf32." in summary_markdown(sweep)


def test_a_sweep_with_jobs_that_have_not_begun_recommends_nothing():
    results = [finished(name, seed) for name in ("32-true", "b") for seed in range(3)]
    stopped = SweepData([Job(result) for result in results], job_count=9, is_stopped=True)
    headline = "No answer yet: 6 of 9 jobs finished. Resume the sweep."
    assert stopped.answer.sentence == headline
    note = summary_markdown(stopped)
    assert headline in note
    assert "Stay with" not in note
    assert stopped.answer.is_unfinished
    assert not replace(stopped, job_count=6).answer.is_unfinished


def test_the_head_says_when_where_and_from_what(tmp_path):
    config = {"tracking.note": "first try"}
    environment = {"torch": "2.9.0", "git_commit": "0123456789abcdef", "git_dirty": "true"}
    settings = JobSettings(config, environment)
    curves = {"train/loss": np.array([[1.0], [1_700_000_000_000.0], [1.0]])}
    jobs = [Job(lost("a", "failed", "x").result), Job(finished("b"), curves, lambda: settings)]
    command = "python -m runner precision=a,b tracking.note=x -m"
    text, _, _ = pages(SweepData(jobs, [command], "abc"), tmp_path)
    head = text.split("\n\n")[1:5]
    assert head[0].startswith("14 November 2023, 22:13 UTC · ")
    assert head[0].endswith(" · sweep abc · commit 01234567 with changes · torch 2.9.0")
    assert head[1] == "first try"
    assert head[2] == "- `python -m runner -m precision=a,b tracking.note=x`"
    assert head[3] == "1 of 2 jobs finished"
    assert "jobs finished" not in pages(SweepData(jobs[1:]), tmp_path)[0]
    unnoted = replace(settings, config={"tracking.note": "null"})
    without = SweepData([Job(finished("b"), {}, lambda: unnoted)])
    assert "null" not in pages(without, tmp_path)[0]


def test_jobs_that_lack_one_thing_have_one_entry(tmp_path):
    jobs = [
        job("32-true"),
        *(lost(name, "unavailable", f"precision={name} needs a GPU.") for name in "ab"),
    ]
    text, _, _ = pages(SweepData(jobs), tmp_path)
    assert "- a, b: unavailable here: needs a GPU." in text


def test_a_line_breaks_after_the_dots_of_a_name():
    table = to_html("", [Table(["a"], [[Cell("layers.0.self_attn <b> 0.25")]])])
    assert "layers.<wbr>0.<wbr>self_attn &lt;b&gt; 0.25" in table


def test_the_answer_is_a_heading_and_cards_keep_their_heads():
    page = to_html("", [Text("Stay.", "answer"), Text("why"), Table(["a"], [[Cell("b")]])])
    assert '<h2 class="answer">Stay.</h2>\n<p class="plain">why</p>' in page
    assert "thead{position:absolute" in page


def test_a_table_is_as_wide_as_its_longest_parts():
    short = Table(["a", "b"], [[Cell("x" * 10), Cell("1.00", note="0.90 to 1.10")]])
    dotted = Table(["a", "b"], [[Cell(".".join(["x" * 9] * 4)), Cell("1.00")]])
    long = Table(["a", "b"], [[Cell("x" * 99), Cell("1.00")]])
    assert short.width_rem <= dotted.width_rem + 1 < 15 < long.width_rem < 25
