"""A long sweep's report in a browser: complete at each width and on paper, readable in the dark."""

import pytest
from job_results import finished, lost

from runner.sweeps.report.pages import write_report
from runner.sweeps.report.sweep_data import Job, SweepData

pytestmark = pytest.mark.slow
ANSWER = "Train in bf16-mixed: 1.50 × as fast as 32-true"
WIDER_THAN_ITS_CONTAINER = """() => [...document.querySelectorAll('main, main *')]
  .filter(e => !e.closest('svg') && e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1)
  .filter(e => getComputedStyle(e).clipPath === 'none')
  .map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 60)}`)"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
WHITE = "rgb(255, 255, 255)"
CONTRASTS = """() => {
  const light = text => { const [r, g, b] = text.match(/[0-9.]+/g).map(Number).map(
      c => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!colour.startsWith('rgba(0, 0, 0, 0')) return light(colour); } };
  return [...document.querySelectorAll('main :is(h1, p, li, pre, th, td span, td small)')].map(
    e => [light(getComputedStyle(e).color), behind(e)].sort((a, b) => b - a)).map(
    ([bright, dim]) => (bright + 0.05) / (dim + 0.05)); }"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """URL of the report on 28 precisions, of which six have no result."""
    speeds = {"32-true": 100.0, "bf16-mixed": 150.0}
    speeds |= {f"block-scaled-{i}": 90.0 for i in range(20)}
    more = {"loss_scale": 65536.0, "skipped_steps": 2, "converted": "53/54", "step_ms": 12.5}
    more["matrix_work"] = "86.5% FP8, 13.5% bfloat16"
    results = [
        finished(name, seed, 0.9 + seed / 100, examples_per_second=speed, **more)
        for name, speed in speeds.items()
        for seed in range(3)
    ]
    results += [
        lost(f"lost-{i}", "refused", "optimizer.eps=1e-08 is 0 here. " * 5) for i in range(6)
    ]
    folder = tmp_path_factory.mktemp("report")
    command = "python -m runner -m precision=" + ",".join(speeds)
    write_report(SweepData([*map(Job, results)], [command], "abc"), folder)
    return (folder / "report.html").as_uri()


@pytest.mark.parametrize("media", ["screen", "print"])
@pytest.mark.parametrize("width", [390, 718, 805, 1366, 1920])
def test_nothing_is_wider_than_its_container(address, page, width, media):
    """718 pixels are the width of A4 within its margins."""
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(media=media)
    page.goto(address)
    assert page.evaluate(WIDER_THAN_ITS_CONTAINER) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    answer = page.get_by_text(ANSWER)
    box = answer.bounding_box()
    assert box["y"] + box["height"] < 800
    assert page.locator("pre").nth(1).inner_text().endswith(" precision=bf16-mixed")
    # Folded on a screen, not on paper.
    assert page.get_by_text("lost-5", exact=True).first.is_visible() == (media == "print")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_is_readable(address, page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(address)
    is_dark = (
        page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    )
    assert is_dark == (scheme == "dark")
    # WCAG 2.2, success criterion 1.4.3.
    assert min(page.evaluate(CONTRASTS)) >= 4.5
    page.emulate_media(media="print", color_scheme=scheme)
    assert page.evaluate(BACKGROUND) == WHITE


def test_a_screen_reader_finds_heads_and_findings_on_a_phone(address, page):
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(address)
    assert page.get_by_role("columnheader", name="val/accuracy").count() == 1
    assert page.get_by_role("heading", name=ANSWER).count() == 1
    assert page.get_by_role("img", name="val/accuracy minus that of 32-true: ").count() == 1
