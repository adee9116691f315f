import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from job_results import finished

from runner.core.run.run_result import RunResult
from runner.output.plots import plain_label, svg_element
from runner.sweeps.report.charts import (
    MAX_POINTS,
    chart_figures,
    curve_points,
    group_styles,
    mean_curves,
    overview_figure,
)
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.verdict.compare import compare_with_baselines


def curve(values, steps=None):
    steps = np.arange(1, len(values) + 1) if steps is None else steps
    return np.array([steps, steps, values], dtype=float)


def job(precision="32-true", seed=0, values=(3.0, 2.0, 1.0), **more):
    curves = more.pop("curves", {})
    shown = {"train/loss": curve(values), "val/accuracy": curve([0.5, 0.9])}
    return Job(replace(finished(precision, seed), **more), shown | curves)


def scaled(values, **more):
    return job("16-mixed", curves={"loss_scale/value": curve(values)}, **more)


def overview(*jobs):
    return overview_figure(SweepData(jobs))


def axes_named(figure, start):
    return next(a for a in figure.axes if a.get_title(loc="left").startswith(start))


def test_values_that_are_not_finite_are_gaps():
    values = np.ones(10_000)
    values[2000:4000], values[7] = np.nan, np.inf
    steps, (smoothed,) = mean_curves([(np.arange(10_000.0), values)])
    assert len(steps) == len(smoothed) <= MAX_POINTS
    assert set(smoothed[np.isfinite(smoothed)]) == {1.0}
    gap = (steps > 2100) & (steps < 3900)
    assert np.isnan(smoothed[gap]).all()
    assert not np.isnan(smoothed[~gap & ((steps < 2000) | (steps > 4000))]).any()


def test_a_point_is_the_mean_over_two_percent_of_the_steps():
    steps, (smoothed,) = mean_curves([(np.arange(200.0), np.arange(200.0) ** 2)])
    assert steps.tolist() == [*range(200)]
    # Two to each side of the middle; at the ends there are none outside.
    assert smoothed[100] == pytest.approx(100**2 + 2)
    assert smoothed[0] == pytest.approx((0 + 1 + 4) / 3)
    short = np.arange(49.0)
    assert mean_curves([(short, short)])[1].tolist() == [short.tolist()]


def test_a_seed_that_ended_early_leaves_the_steps_of_the_others():
    steps, values = mean_curves([curve_points(curve([1.0, 2.0, 3.0])), curve_points(curve([5.0]))])
    assert steps.tolist() == [1, 2, 3]
    assert values[0].tolist() == [1, 2, 3]
    assert values[1, 0] == 5
    assert np.isnan(values[1, 1:]).all()


def test_a_repeated_step_has_its_last_value():
    steps, values = curve_points(curve([1.0, 2.0, 3.0, 20.0, 30.0], np.array([1, 2, 3, 2, 3])))
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [1, 20, 30])


def test_every_precision_has_a_colour_of_its_own():
    styles = group_styles([finished(f"p{i}") for i in range(28)] + [finished("32-true")])
    assert styles["32-true"] == ("black", 0)
    assert len({colour for colour, _ in styles.values()}) == 29
    settings = [f"lr={i}" for i in range(5)]
    few, many = (
        group_styles([finished(p, settings=s) for p in ("32-true", "b") for s in settings[:count]])
        for count in (2, 5)
    )
    assert [few["b lr=0"], few["b lr=1"], few["32-true lr=1"][1]] == [
        (few["b lr=0"][0], 0),
        (few["b lr=0"][0], 1),
        1,
    ]
    assert len({colour for colour, _ in many.values()}) == 10


def legend(data):
    """The names of the legend's lines, and their colours."""
    figures = chart_figures(data)
    (box,) = [axes.get_legend() for each in figures for axes in each.axes if axes.get_legend()]
    colours = [line.get_color() for line in box.get_lines()]
    return dict(zip([text.get_text() for text in box.get_texts()], colours, strict=True))


def test_each_precision_has_one_line_and_one_entry():
    data = SweepData([job(), job("b", 1), job("b")])
    colours = legend(data)
    assert [*colours] == ["32-true", "b"]
    lines = axes_named(overview_figure(data), "training loss").lines
    assert [line.get_color() for line in lines] == [*colours.values()]
    assert len({*colours.values()}) == 2


def test_a_curve_is_compared_with_that_of_the_same_seed():
    pairs = [job(seed=0, values=(3.0, 2.0)), job(seed=1, values=(5.0, 4.0)), job("c", seed=3)]
    own = [job("b", 0, (3.5, 2.5)), job("b", 1, (5.5, 5.5)), job("b", 2, (9.0, 9.0))]
    axes = axes_named(overview(*pairs, *own), "training loss minus that of 32-true")
    line, _ = axes.lines
    assert [*line.get_ydata()] == [0.5, 1.0]
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert (low, high) == (0.5, 1.5)


def test_a_chart_says_in_a_sentence_what_it_shows():
    jobs = [job(), job("b", values=(3.0, 2.0, 1.5))]
    names, gap, loss, by_step, quality = chart_figures(SweepData(jobs))
    assert gap.get_label() == "val/accuracy minus that of 32-true: b +0.0000 ± 0.0000."
    assert names.get_label() == "Lines: 32-true, b."
    assert loss.get_label() == "training loss by step, at the end: 32-true 1, b 1.5."
    assert by_step.get_label().endswith("minus that of 32-true by step, at the end: b 0.5.")
    assert quality.get_label() == "val/accuracy by step, at the end: 32-true 0.9, b 0.9."
    assert f'role="img" aria-label="{loss.get_label()}"' in svg_element(loss)
    loss.set_label("")
    assert 'aria-label="training loss"' in svg_element(loss)


def test_a_group_without_a_curve_is_not_in_the_legend():
    refused = replace(job("b"), curves={"memory/weights_mib": curve([9.0])})
    assert [*legend(SweepData([job(), refused]))] == ["32-true"]


def with_quality(precision, quality, seed=0):
    return job(precision, seed, metrics={"val/accuracy": quality})


def difference_axes(figure):
    return next(a for a in figure.axes if "minus that of" in a.get_title(loc="right"))


def test_the_first_chart_has_each_difference_with_its_interval():
    qualities = [("32-true", 0.90), ("32-true", 0.91), ("b", 0.92), ("b", 0.91), ("c", 0.5)]
    data = SweepData([with_quality(*one, seed=i % 2) for i, one in enumerate(qualities)])
    b, _ = (c.difference for c in compare_with_baselines(data.results) if not c.is_baseline)
    axes = chart_figures(data)[1].axes[0]
    title = "val/accuracy minus that of 32-true\nbars: 95 % interval; one seed has none"
    assert axes.get_title(loc="right") == title
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["b", "c"]
    (bars,) = [c for c in axes.collections if len(c.get_segments()[0])]
    assert bars.get_segments()[0][:, 0] == pytest.approx(
        [b.value - b.ci_half_width, b.value + b.ci_half_width]
    )
    alone = difference_axes(overview(job(), job("b")))
    assert alone.get_title(loc="right").endswith("one seed: no interval")
    assert alone.get_xlabel() == "higher is better"


def test_a_bad_precision_does_not_press_the_others_together():
    named = [("32-true", 0.9), ("a", 0.901), ("b", 0.902), ("c", 0.903), ("bad", 0.1)]
    jobs = [with_quality(*one) for one in named]
    scales = [difference_axes(overview(*jobs[:count])).get_xscale() for count in (4, 5)]
    assert scales == ["linear", "symlog"]


def test_an_axis_is_linear_where_the_intervals_are_alike():
    """Two groups that differ from the baseline by nothing say nothing of the axis."""
    same = (0.90, 0.91, 0.92)
    seeds = (same, same, (0.905, 0.908, 0.921), (0.899, 0.912, 0.915), (0.92, 0.88, 0.85))
    names = ("32-true", "a", "b", "c", "d")
    jobs = [
        with_quality(name, quality, seed)
        for name, qualities in zip(names, seeds, strict=True)
        for seed, quality in enumerate(qualities)
    ]
    assert difference_axes(overview(*jobs)).get_xscale() == "linear"


def test_a_loss_scale_that_stays_is_not_drawn():
    for scales, count in (([4, 4], 5), ([4, 2], 6)):
        assert len(chart_figures(SweepData([job(), scaled(scales)]))) == count


def test_a_curve_of_one_step_is_not_drawn():
    shown = job(curves={"val/accuracy": curve([0.9])})
    titles = [axes.get_title(loc="left") for axes in overview(shown).axes]
    assert titles == ["", "training loss"]


def test_the_figure_has_a_chart_for_each_kind_of_curve():
    for jobs, count in (([job()], 3), ([job(), job("b")], 5), ([job(), scaled([4, 2])], 6)):
        assert len(chart_figures(SweepData(jobs))) == count
        assert len(overview(*jobs).axes) == count


def test_nothing_trained_makes_no_figure():
    evaluated = job(trained_in="32-true")
    failed = Job(RunResult(precision="b", label="b", folder="/x", status="failed"))
    for jobs in ([], [evaluated], [failed], [Job(job().result)]):
        assert overview_figure(SweepData(jobs)) is None
        assert chart_figures(SweepData(jobs)) == []


def test_the_axis_is_logarithmic_if_it_then_has_ticks():
    losses = ([3.0, math.nan, 1.0], [0.59, 0.57], [3.0, 0.0, 1.0], [3.0, -1.0])
    axes = [axes_named(overview(job(values=values)), "training loss") for values in losses]
    assert [each.get_yscale() for each in axes] == ["log", "linear", "linear", "linear"]
    axes[0].figure.draw_without_rendering()
    assert {"1", "2"} <= {tick.get_text() for tick in axes[0].get_yticklabels()}


def test_a_run_that_never_had_a_number_is_drawn():
    figure = overview(job(values=[math.nan] * 3), scaled([0.0, math.nan]))
    figure.draw_without_rendering()


def test_validation_loss_is_drawn_if_the_quality_has_no_curve():
    shown = job(curves={"val/accuracy": curve([]), "val/loss": curve([4.0, 1.0])})
    assert axes_named(overview(shown), "val/loss").get_yscale() == "log"


def test_seeds_are_drawn_as_their_mean_and_range():
    jobs = [job(seed=s, values=(3.0 + s, 2.0 + s, 1.0 + s if s else math.nan)) for s in range(5)]
    data = SweepData(jobs)
    axes = axes_named(overview_figure(data), "training loss")
    (mean,) = axes.lines
    assert mean.get_ydata().tolist() == [5, 4, 3.5]
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert (low, high) == (2, 7)
    assert axes.get_title(loc="left") == "training loss\nband: range of seeds"


HOSTILE = '<script>x</script> --> $a_b$ \\frac{ ]]> _日 url(#a) id="b"'


def test_an_svg_stands_alone():
    name = f"_{HOSTILE}"
    data = SweepData([job(name), job("b"), scaled([4, 2], label=name)])
    texts = [svg_element(figure) for figure in (*chart_figures(data), overview_figure(data))]
    every = []
    for text in texts:
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg")
        assert not re.search(r"<script|<style|<image|<!|<\?", text)
        ids = [each.get("id") for each in root.iter() if each.get("id")]
        every += ids
        tags = re.sub(' aria-label="[^"]+"', "", " ".join(re.findall("<[^>]+>", text)))
        links = re.findall(r'href="([^"]+)"', tags) + re.findall(r"url\(([^)]+)\)", tags)
        assert {link.lstrip("#") for link in links} <= set(ids)
        assert 'fill="currentColor"' in text
        assert "#000000" not in text
        assert "#ffffff" not in text
        rest = re.sub(r'xmlns(:\w+)?="[^"]+"', "", text)
        assert "http" not in rest
    assert len(every) == len(set(every))


def test_an_svg_is_the_same_every_time():
    data = SweepData([job(), scaled([4, 2])])
    assert [svg_element(f) for f in chart_figures(data)] == [
        svg_element(f) for f in chart_figures(data)
    ]


def test_labels_hold_only_characters_of_the_font():
    assert plain_label("32-true ± é β") == "32-true ± é β"
    assert plain_label("a\n日") == "a??"
    assert plain_label("_hidden") == " _hidden"
    assert plain_label("x" * 99) == "x" * 33 + "…"


def test_many_long_jobs_are_few_points():
    rng = np.random.default_rng(0)
    curves = {"loss_scale/value": curve(2.0 ** rng.integers(1, 16, 10_000))}
    losses = rng.random((20, 10_000)) + 0.1
    figure = overview(*(job(f"p{i % 5}", i, losses[i], curves=curves) for i in range(20)))
    assert all(len(line.get_xdata()) <= MAX_POINTS for a in figure.axes for line in a.lines)
    assert sum(len(a.lines) for a in figure.axes) <= 5 * 4
    assert len(svg_element(figure)) < 500_000
