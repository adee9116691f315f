import json
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from runner.core.record.tracker import NoTracker, RunOutput, SilentConsole
from runner.diagnostics.numerics.numerics_page import (
    MAX_MAP_ROWS,
    MAX_MAP_STEPS,
    OUTLINE,
    answer_lines,
    heat_map,
    judge_precisions,
    loss_scale_sentence,
    lost_shares,
    page_head,
    write_page,
)
from runner.diagnostics.numerics.results import (
    KINDS,
    Numerics,
    NumericsSnapshot,
    QuantizationLoss,
    TensorStats,
)
from runner.output.plots import svg_element
from runner.precision.emulation.formats import FORMATS

SPOT = {("m2", 5): 0.25}


def make_numerics(modules=4, looks=8, spots=SPOT, name="m{}"):
    """Gradients that vanish at some modules and steps, updates that are all swallowed."""

    def one(module, kind, step):
        vanished = spots.get((module, step), 0.0) if kind == "gradients" else 0.0
        swallowed = 1.0 if kind == "updates" else None
        found = dict.fromkeys(FORMATS, QuantizationLoss(vanished, 0.0, 0.0, 70.0, swallowed))
        return TensorStats(module, kind, 10, 0.0, 0.0, 1.0, {0: 10}, found)

    names = [name.format(i) for i in range(modules)]
    every = [
        NumericsSnapshot(step, 1024.0, tuple(one(n, k, step) for n in names for k in KINDS))
        for step in range(1, looks + 1)
    ]
    return Numerics(1, "16-mixed", "float32", "float16", tuple(every))


def coloured(axes):
    """(column, row) of each square, and its value."""
    (found,) = [c for c in axes.collections if isinstance(c, PolyCollection)]
    middles = [tuple(p.vertices[:4].mean(0)) for p in found.get_paths()]
    return dict(zip(middles, found.get_array().tolist(), strict=True))


def test_a_cell_per_module_and_look():
    names, found, _ = lost_shares(make_numerics(), "float16", "gradients")
    assert names == ["m0", "m1", "m2", "m3"]
    assert np.argwhere(found).tolist() == [[2, 4]]
    assert found[2, 4] == 0.25
    assert (lost_shares(make_numerics(), "float16", "updates")[1] == 1).all()


def test_a_heat_map_has_only_modules_that_lose_something():
    (axes, _) = heat_map(make_numerics(), "float16", "gradients").axes
    assert axes.get_title(loc="right") == "share of gradients that float16 loses"
    assert coloured(axes) == {(4.0, 0.0): 0.25}
    assert [t.get_text() for t in axes.get_yticklabels()] == ["m2"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "3", "5", "7"]
    updates, _ = heat_map(make_numerics(), "float16", "updates").axes
    assert len(coloured(updates)) == 4 * 8
    assert heat_map(make_numerics(), "float16", "weights") is None


def test_the_worst_cell_has_the_most_ink_and_what_decides_an_outline():
    """The ink is the page's text colour, on a light page and a dark one."""
    spots = {("m0", 1): 0.001, ("m1", 1): 0.04, ("m2", 1): 0.06, ("m3", 1): 1.0}
    figure = heat_map(make_numerics(4, 1, spots), "float16", "gradients")
    svg = svg_element(figure)
    (cells,) = [c for c in figure.axes[0].collections if isinstance(c, PolyCollection)]
    faces = cells.to_rgba(cells.get_array())
    assert not faces[:, :3].any()
    assert (np.diff(faces[:, 3]) > 0).all()
    assert cells.get_linewidths() == [0, 0, 1.2, 1.2]
    assert f"stroke: {OUTLINE.lower()}" in svg
    assert "fill-opacity: 0.5" in svg
    assert "outlined: past the limit" in figure.axes[1].get_xlabel()


def test_a_single_overflow_decides():
    one = make_numerics(1, 1, {})
    (snapshot,) = one.probes
    gradients = next(stats for stats in snapshot.measured if stats.kind == "gradients")
    lost = gradients.formats["float16"]._replace(overflow=1e-4)
    changed = replace(gradients, formats={**gradients.formats, "float16": lost})
    numerics = replace(one, probes=(replace(snapshot, measured=(changed,)),))
    assert lost_shares(numerics, "float16", "gradients")[2].all()


def test_many_modules_and_looks_lose_no_spot():
    modules, looks = 2 * MAX_MAP_ROWS, 3 * MAX_MAP_STEPS
    many = make_numerics(modules, looks, {("m57", 113): 0.125, ("m70", 114): 0.5})
    (axes, _) = heat_map(many, "float16", "gradients").axes
    found = coloured(axes)
    assert sorted(found.values()) == [0.125, 0.5]
    assert all(row < MAX_MAP_ROWS and column < MAX_MAP_STEPS for column, row in found)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["m57", "m70"]
    updates, _ = heat_map(many, "float16", "updates").axes
    assert updates.get_title(loc="right").endswith(f"\nthe worst {MAX_MAP_ROWS} modules")


def test_a_long_name_keeps_its_end():
    numerics = make_numerics(2, name="model.decoder.layers.11.attention.self.{}.query")
    (axes, _) = heat_map(numerics, "float16", "updates").axes
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert [label[-8:] for label in labels] == [".0.query", ".1.query"]
    assert all(len(label) == 30 and label.startswith("…") for label in labels)


def test_a_page_names_the_worst_as_it_is_and_needs_nothing_else(tmp_path):
    numerics = make_numerics(name="a_$x$<script>{}", spots={("a_$x$<script>0", 1): 0.25})
    page = write_page(numerics, "16-mixed <b>", [], tmp_path / "numerics.html").read_text()
    assert "Numerics of 16-mixed &lt;b&gt;" in page
    assert "a_$x$&lt;script&gt;0" in page
    assert loss_scale_sentence(numerics) in page
    assert page.count("<svg") >= len(FORMATS)
    answer, *_ = answer_lines(numerics)
    assert answer in re.sub("<[^>]+>", "", page)
    assert page.index("100 % swallowed in the updates of a_$x$") < page.index("<h2>")
    assert not re.findall(r"<script|<img|https?://(?!www\.w3\.org)|data:", page)
    order = re.findall(r"<h2>(.*?)</h2>", page)
    assert order == ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "How to read this"]


def test_the_experts_of_a_stack_have_one_row_and_one_line_of_a_map(tmp_path):
    spots = {(f"experts.w[{i}]", 1): 0.08 * (i + 1) for i in range(3)}
    numerics = make_numerics(modules=100, looks=1, spots=spots, name="experts.w[{}]")
    page = write_page(numerics, "x", [], tmp_path / "numerics.html").read_text()
    page = page.replace("<wbr>", "")
    assert "the most of 3 experts, the least 8 %" in page
    assert "the most of 100 experts, the least 100 %" in page
    assert "experts.w[2]" in page
    assert "experts.w[1]" not in page
    names, shares, _ = lost_shares(numerics, "float16", "gradients")
    assert names == ["experts.w[…]"]
    assert shares.tolist() == [[0.24]]


def test_long_tables_are_folded(tmp_path):
    page = write_page(make_numerics(modules=9), "x", [], tmp_path / "numerics.html").read_text()
    # Of the float16 format: nine modules' updates and one's gradients.
    assert "<details><summary>6 more</summary>" in page


def test_every_precision_has_an_answer():
    """Half of the updates are swallowed: weights that are stored in the format lose them."""
    answer, *lines = answer_lines(make_numerics(spots={}))
    assert answer == (
        "Would do: bf16-mixed, 16-mixed, float8-tensorwise. "
        "Loss of updates: bf16-true, 16-true, transformer-engine-current."
    )
    why = "100 % swallowed in the updates of m0, limit 50 %; type precision.update=kahan"
    assert f"bf16-true: loss of updates: {why}" in lines
    assert "16-mixed: would do: nothing is lost" in lines


@pytest.mark.parametrize(
    ("kind", "lost", "verdict", "why"),
    [
        ("weights", {"sqnr_db": 10.0}, "too much noise", "10 % noise in the weights of m0"),
        ("activations", {"overflow": 1e-4}, "too little range", "0.01 % overflow in the act"),
        ("activations", {"underflow": 0.06}, "too little range", "6 % underflow in the activat"),
        ("activations", {"underflow": 0.04}, "loss of updates", "100 % swallowed in the updates"),
    ],
)
def test_the_number_that_decides_is_named(kind, lost, verdict, why):
    """A rule of precision.update saves swallowed updates alone, so that other losses come first."""
    one = make_numerics(1, 1, {})
    (snapshot,) = one.probes
    measured = []
    for stats in snapshot.measured:
        if stats.kind == kind:
            worse = {name: loss._replace(**lost) for name, loss in stats.formats.items()}
            stats = replace(stats, formats=worse)
        measured.append(stats)
    numerics = replace(one, probes=(replace(snapshot, measured=measured),))
    verdicts = {found.precision: found for found in judge_precisions(numerics)}
    assert not answer_lines(numerics)[0].partition("Would do")[0].endswith(". ")
    assert verdicts["bf16-true"].verdict == verdict
    assert verdicts["bf16-true"].why.startswith(why)


def test_the_head_of_a_page_is_of_the_runs_files(tmp_path):
    environment = {
        "command": ["python", "-m", "runner", "model.hidden=[8, 8]"],
        "packages": {"torch": "9.9"},
        "git_commit": "0123456789",
        "git_dirty": "true",
    }
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    output = RunOutput(tmp_path, SilentConsole(), NoTracker())
    facts, note, commands = page_head(output, "A processor", "why I ran it")
    assert (
        f" · A processor · run {tmp_path} · commit 01234567 with changes · torch 9.9" in facts.text
    )
    assert note.text == "why I ran it"
    assert commands.lines == ["python -m runner 'model.hidden=[8, 8]'"]
    (tmp_path / "environment.json").write_text("{")
    assert len(page_head(output, "A processor")) == 1
