import re
from dataclasses import replace

import numpy as np
from matplotlib.collections import PolyCollection

from runner.core.base.fmt import format_share
from runner.diagnostics.numerics.numerics_page import (
    MAX_MAP_ROWS,
    MAX_MAP_STEPS,
    draw_heat_maps,
    heat_maps,
    loss_scale_sentence,
    lost_shares,
    numerics_summary,
    write_page,
)
from runner.diagnostics.numerics.results import (
    KINDS,
    Numerics,
    NumericsSnapshot,
    QuantizationLoss,
    TensorStats,
)
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


def panel(figure, kind):
    return next(a for a in figure.axes if a.get_title().startswith(kind))


def coloured(axes):
    """(column, row) of each square, and its value."""
    (found,) = [c for c in axes.collections if isinstance(c, PolyCollection)]
    middles = [tuple(p.vertices[:4].mean(0)) for p in found.get_paths()]
    return dict(zip(middles, found.get_array().tolist(), strict=True))


def test_a_cell_per_module_and_look():
    names, found = lost_shares(make_numerics(), "float16", "gradients")
    assert names == ["m0", "m1", "m2", "m3"]
    assert np.argwhere(found).tolist() == [[2, 4]]
    assert found[2, 4] == 0.25
    assert (lost_shares(make_numerics(), "float16", "updates")[1] == 1).all()


def test_a_heat_map_has_only_kinds_and_modules_that_lose_something():
    figure = heat_maps(make_numerics(), "float16")
    assert [a.get_title() for a in figure.axes if a.get_title()] == ["gradients", "updates"]
    assert coloured(panel(figure, "gradients")) == {(4.0, 0.0): 0.25}
    assert len(coloured(panel(figure, "updates"))) == 4 * 8
    labels = [t.get_text() for t in panel(figure, "gradients").get_yticklabels()]
    assert labels == ["m2"]
    steps = [t.get_text() for t in panel(figure, "gradients").get_xticklabels()]
    assert steps == ["1", "3", "5", "7"]
    assert heat_maps(make_numerics(), "float16", ["weights"]).axes == []


def test_many_modules_and_looks_lose_no_spot():
    modules, looks = 2 * MAX_MAP_ROWS, 3 * MAX_MAP_STEPS
    many = make_numerics(modules, looks, {("m57", 113): 0.125, ("m70", 114): 0.5})
    figure = heat_maps(many, "float16")
    found = coloured(panel(figure, "gradients"))
    assert sorted(found.values()) == [0.125, 0.5]
    assert all(row < MAX_MAP_ROWS and column < MAX_MAP_STEPS for column, row in found)
    labels = [t.get_text() for t in panel(figure, "gradients").get_yticklabels()]
    assert labels == ["m57", "m70"]
    assert panel(figure, "updates").get_title() == f"updates, the worst {MAX_MAP_ROWS} modules"


def test_a_long_name_keeps_its_end():
    figure = heat_maps(
        make_numerics(2, name="model.decoder.layers.11.attention.self.{}.query"), "float16"
    )
    labels = [t.get_text() for t in panel(figure, "updates").get_yticklabels()]
    assert [label[-8:] for label in labels] == [".0.query", ".1.query"]
    assert all(len(label) == 30 and label.startswith("…") for label in labels)


def test_a_page_names_the_worst_as_it_is_and_needs_nothing_else(tmp_path):
    numerics = make_numerics(name="a_$x$<script>{}", spots={("a_$x$<script>0", 1): 0.25})
    page = write_page(numerics, "16-mixed <b>", tmp_path / "numerics.html").read_text()
    assert "Numerics of 16-mixed &lt;b&gt;" in page
    assert "a_$x$&lt;script&gt;0" in page
    assert loss_scale_sentence(numerics) in page
    assert page.count("<svg") >= len(FORMATS)
    verdict = "would do, but not to store weights in (most: 100 % swallowed in the updates of a_$x$"
    assert f"<li><b>float16:</b> {verdict}" in page
    assert not re.findall(r"<script|<img|https?://(?!www\.w3\.org)|data:", page)
    order = re.findall(r"<h2>(.*?)</h2>", page)
    assert order == ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "How to read this"]


def test_the_experts_of_a_stack_have_one_row_and_one_line_of_a_map(tmp_path):
    spots = {(f"experts.w[{i}]", 1): 0.08 * (i + 1) for i in range(3)}
    numerics = make_numerics(modules=100, looks=1, spots=spots, name="experts.w[{}]")
    page = write_page(numerics, "x", tmp_path / "numerics.html").read_text()
    assert "the most of 3 experts, the least 8 %" in page
    assert "the most of 100 experts, the least 100 %" in page
    assert "experts.w[2]" in page
    assert "experts.w[1]" not in page
    names, shares = lost_shares(numerics, "float16", "gradients")
    assert names == ["experts.w[…]"]
    assert shares.tolist() == [[0.24]]


def test_a_picture_of_one_look_where_nothing_is_lost(tmp_path):
    nothing = Numerics(5, "32-true", "float32", "float32", make_numerics(1, 1, {}).probes)
    assert draw_heat_maps(nothing, tmp_path / "numerics.png").read_bytes()[1:4] == b"PNG"


def test_the_summary_has_every_format():
    verdict = "would do, but not to store weights in (most: 100 % swallowed in the updates of m0)"
    lines = numerics_summary(make_numerics()).splitlines()
    assert lines == [f"  {fmt}: {verdict}" for fmt in FORMATS]
    assert [format_share(v) for v in (0.0123, 0.5, 1.0)] == ["1.2 %", "50 %", "100 %"]


def test_noise_is_more_than_a_matter_of_storage():
    noisy = make_numerics(2)
    part = noisy.probes[0].measured[0]
    lost = part.formats["float16"]._replace(sqnr_db=10.0)
    worse = replace(part, formats={**part.formats, "float16": lost})
    looks = [replace(look, measured=(worse, *look.measured[1:])) for look in noisy.probes]
    assert numerics_summary(replace(noisy, probes=looks)).startswith(
        "  float16: lacks precision (most: 100 % swallowed in the updates of m0)\n  bfloat16: would"
    )
