"""The dashboard, report and run page of a real sweep, in a browser."""

import json
import re
import warnings

import pytest

pytestmark = pytest.mark.slow
ARGS = (
    "-m",
    "precision=32-true,16-mixed,tf32",
    "seed=0,1",
    "model=mlp",
    "train.max_steps=60",
    "train.eval_every=20",
    "accelerator=cpu",
)


@pytest.fixture(scope="module")
def swept(browser, mlflow_server, tmp_path_factory, inside, empty_store):
    """(the server's address, what the sweep printed, its folder)."""
    home = tmp_path_factory.mktemp("swept")
    with inside(home) as main, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = main(*ARGS, f"tracking.uri={empty_store(home / 'mlflow.db')}")
    assert done.rc == 2, done.stderr
    (folder,) = home.glob("outputs/sweeps/*")
    return mlflow_server(home).url, done.stdout, folder


def results(folder):
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json")))
    return {result["label"]: result for result in found}


def test_the_url_at_the_end_opens_the_sweeps_charts(swept, page, tmp_path):
    base, printed, _ = swept
    url = re.search(r"^dashboard: http://[^/]+(/\S+)$", printed, re.M)[1]
    page.goto(base + url)
    page.get_by_text("Trade-off", exact=True).first.wait_for()
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 16")
    page.screenshot(path=tmp_path / "dashboard.png")
    text = page.inner_text("body")
    for name in ("32-true seed=0", "32-true seed=1", "16-mixed seed=0", "16-mixed seed=1"):
        assert f"{name} (train/loss)" in text
    for section in ("Loss scale", "Loss", "Quality", "Gradient norm", "Cost", "Differences"):
        assert page.get_by_text(section, exact=True).count()
    assert "No charts in this section" not in text


def test_the_report_opens_among_the_parents_artifacts_with_the_right_numbers(swept, page, tmp_path):
    base, printed, folder = swept
    parent = re.search(r"parent run (\w+)", printed)[1]
    page.goto(f"{base}/#/experiments/1/runs/{parent}/artifacts/report.html")
    page.wait_for_selector("iframe")
    frame = page.frame_locator("iframe")
    frame.get_by_role("heading", name="Every job").wait_for()
    page.screenshot(path=tmp_path / "report.png")
    text = frame.locator("body").inner_text()
    assert "Unavailable here" in text
    assert frame.locator("svg").count() >= 4, "curves, loss scale, trade-off"
    for label, result in results(folder).items():
        row = frame.locator("tr", has_text=label).first.inner_text()
        assert result["status"] in row
        if result["metrics"]:
            assert f"{result['metrics']['val/accuracy']:.4g}" in row
            assert f"{result['step_ms']:.4g}" in row
    drawn = frame.locator("svg path").evaluate_all(
        "paths => paths.filter(path => path.getTotalLength() > 100).length"
    )
    assert drawn >= 8, "lines have a length where the viewer lets them be drawn"


def test_the_page_of_a_run_shows_its_command_and_dtypes(swept, page, tmp_path):
    base, _, folder = swept
    result = results(folder)["16-mixed seed=1"]
    page.goto(f"{base}/#/experiments/1/runs/{result['run_id']}")
    page.get_by_text("python -m runner").first.wait_for()
    page.screenshot(path=tmp_path / "run.png")
    text = page.inner_text("body")
    assert "precision=16-mixed" in text
    assert "seed=1" in text
    assert "digits" in text
    page.goto(f"{base}/#/experiments/1/runs/{result['run_id']}/artifacts/dtypes.json")
    page.get_by_text("computes").first.wait_for()
    page.screenshot(path=tmp_path / "dtypes.png")
    assert "float16" in page.inner_text("body")
