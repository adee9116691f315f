"""The dashboard, report and run page of a real sweep as someone sees them, in a browser."""

import re
import warnings

import pytest
from run_folders import read_json

from runner.sweeps.report.load import load_from_folder
from runner.tracking import dashboard

pytestmark = pytest.mark.slow
COMMAND = (
    "-m precision=32-true,16-mixed,tf32 seed=0,1 model=mlp train.max_steps=1000 "
    "train.eval_every=250 accelerator=cpu precision.loss_scale.init_scale=1e9"
)
PRECISIONS = ("32-true", "16-mixed")
RUNS = [f"{precision} seed={seed}" for precision in PRECISIONS for seed in (0, 1)]
NAME = "mlp on digits: 3 precisions × 2 seeds"
SECTIONS = ["Loss and answer", "Quality", "Loss scale", "Gradient norm", "Trade-off"]
CARD = "[data-testid='experiment-view-compare-runs-card']"


@pytest.fixture(scope="module")
def swept(browser, mlflow_server, tmp_path_factory, inside, empty_store):
    """Return the server, what the sweep printed, and its folder."""
    home = tmp_path_factory.mktemp("swept")
    with inside(home) as main, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = main(*COMMAND.split(), f"tracking.uri={empty_store(home / 'mlflow.db')}")
    assert done.rc == 2, done.stderr
    (folder,) = home.glob("outputs/sweeps/*")
    return mlflow_server(home), done.stdout, folder


def results(folder):
    found = (read_json(path) for path in sorted(folder.glob("*/result.json")))
    return {result["label"]: result for result in found}


def answer(folder):
    data = load_from_folder(folder)
    return data.answer.sentence


def axes(page):
    """Return the type of each line chart's axis of values, by the chart's name."""
    return page.evaluate(
        """card => Object.fromEntries([...document.querySelectorAll(card)].flatMap(found => {
            const plot = found.querySelector('.js-plotly-plot');
            const kind = plot?.layout?.yaxis?.type ?? plot?._fullLayout?.yaxis?.type;
            return kind ? [[found.innerText.split('\\n')[0], kind]] : [];
        }))""",
        CARD,
    )


def look(page, picture):
    """Check what is to be seen on a sweep's dashboard."""
    for name in SECTIONS:
        page.get_by_text(name, exact=True).first.wait_for()
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 20")
    page.screenshot(path=picture)
    text = page.inner_text("body")
    assert "No charts in this section" not in text
    assert "No chart data available" not in text
    assert not any(NAME in text for text in page.locator(CARD).all_inner_texts())
    assert page.get_by_role("link", name=NAME, exact=True).count() == 0
    kinds = axes(page)
    for metric in ("loss_scale/changes", "train/loss", "val/loss", "train/grad_norm"):
        assert kinds[metric] == "log", kinds
    for name in RUNS:
        assert page.get_by_role("link", name=name, exact=True).count() == 1
    for name in PRECISIONS:
        assert f"{name} (train/loss)" in text, "a line for all of its seeds"
    assert text.index("Group: 32-true") < text.index("Group: 16-mixed"), "the baseline is first"
    assert "Sort: Created" in text
    for metric in ("loss_scale/value", "loss_scale/overflow", "val/perplexity"):
        assert metric not in kinds
    assert "loss_scale" not in [line.strip() for line in text.splitlines()], "a section of MLflow's"


def test_the_dashboard_of_a_sweep_shows_its_charts(swept, page, tmp_path):
    server, printed, folder = swept
    assert "http:" not in printed, "no server answers yet"
    page.goto(server.url + next(iter(results(folder).values()))["dashboard"])
    look(page, tmp_path / "dashboard.png")


@pytest.mark.extended
def test_the_note_on_the_experiments_page_links_to_the_sweeps_after_a_restart(
    swept, page, tmp_path
):
    server, _, folder = swept
    server.stop()
    server.start()
    page.goto(f"{server.url}/#/experiments/1/runs?workflowType=machine_learning")
    link = page.get_by_role("link", name=dashboard.DASHBOARD_NAME).first
    link.wait_for()
    with page.context.expect_page() as opened:
        link.click()
    assert opened.value.url.endswith(dashboard.dashboard_path("1"))
    table = opened.value
    table.get_by_text("answer/recommended_speed_ratio").first.wait_for()
    table.get_by_text(answer(folder)[:40]).first.wait_for()
    table.screenshot(path=tmp_path / "sweeps.png")
    text = table.inner_text("body")
    assert "Sort: Created" in text
    assert "1 matching run" in text
    assert not any(name in text for name in RUNS)


def test_the_page_at_the_end_opens_the_answer_beside_mlflows_assistant(swept, browser, tmp_path):
    server, printed, folder = swept
    parent = re.search(r"parent run (\w+)", printed)[1]
    path = dashboard.run_path("1", parent, dashboard.REPORT_PAGE)
    with browser.new_context(viewport={"width": 1366, "height": 768}) as context:
        page = context.new_page()
        page.goto(server.url + path)
        page.get_by_text("MLflow Assistant").first.wait_for()
        sentence = page.frame_locator("iframe").get_by_text(answer(folder)[:40])
        sentence.wait_for()
        page.screenshot(path=tmp_path / "page.png")
        box = sentence.bounding_box()
        assert box["y"] + box["height"] < 768


def test_the_parents_page_shows_the_answer_first(swept, page, tmp_path):
    server, printed, folder = swept
    page.set_viewport_size({"width": 1366, "height": 768})
    parent = re.search(r"parent run (\w+)", printed)[1]
    page.goto(server.url + dashboard.run_path("1", parent))
    sentence = page.get_by_text(answer(folder)[:40]).first
    for found in (sentence, page.get_by_text("answer/gap/16-mixed"), page.get_by_text(NAME).last):
        found.wait_for()
        box = found.bounding_box()
        assert box["y"] + box["height"] < 768
    page.screenshot(path=tmp_path / "parent.png")
    assert page.get_by_text("Show more").count() == 0, "the note is not folded"


@pytest.mark.extended
def test_the_report_opens_among_the_parents_artifacts_with_the_right_numbers(swept, page, tmp_path):
    server, printed, folder = swept
    parent = re.search(r"parent run (\w+)", printed)[1]
    page.goto(f"{server.url}/#/experiments/1/runs/{parent}/artifacts/report.html")
    page.wait_for_selector("iframe")
    frame = page.frame_locator("iframe")
    frame.get_by_role("heading", name="Every job").wait_for()
    frame.locator("summary", has_text="jobs").click()
    page.screenshot(path=tmp_path / "report.png")
    text = frame.locator("body").inner_text()
    assert "Without a result" in text
    assert frame.locator("svg").count() >= 4, "curves, loss scale, trade-off"
    for label, result in results(folder).items():
        row = frame.locator("tr", has_text=label).first.inner_text()
        assert result["status"] in row
        if result["metrics"]:
            assert f"{result['metrics']['val/accuracy']:.4g}" in row
            is_timed = result["examples_per_second"] is not None
            assert (f"{result['step_ms']:.4g}" in row) is is_timed
    drawn = frame.locator("svg path").evaluate_all(
        "paths => paths.filter(path => path.getTotalLength() > 100).length"
    )
    assert drawn >= 8, "lines have a length where the viewer lets them be drawn"


@pytest.mark.extended
def test_the_page_of_a_run_shows_its_command_and_dtypes(swept, page, tmp_path):
    server, _, folder = swept
    result = results(folder)["16-mixed seed=1"]
    page.goto(f"{server.url}/#/experiments/1/runs/{result['run_id']}")
    page.get_by_text("python -m runner").first.wait_for()
    page.screenshot(path=tmp_path / "run.png")
    text = page.inner_text("body")
    assert "precision=16-mixed" in text
    assert "seed=1" in text
    assert "digits" in text
    page.goto(f"{server.url}/#/experiments/1/runs/{result['run_id']}/artifacts/dtypes.json")
    page.get_by_text("computes").first.wait_for()
    page.screenshot(path=tmp_path / "dtypes.png")
    assert "float16" in page.inner_text("body")
