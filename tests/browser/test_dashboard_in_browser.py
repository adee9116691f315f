"""The dashboard as someone sees it: charts drawn in a browser, from a real server."""

import math
import time
import warnings
from importlib.metadata import version

import pytest

from runner.tracking import dashboard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mlflow's imports, not ours
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.slow

PARENT = "sweep precision=32-true,bf16-mixed,16-mixed"
# Name, precision, validation accuracy, examples per second, MiB.
RUNS = [
    ("32-true", "32-true", 0.981, 900, 1200),
    ("bf16-mixed", "bf16-mixed", 0.979, 1500, 800),
    ("16-mixed seed=1", "16-mixed", 0.976, 1650, 790),
]
SECTIONS = ["Loss scale", "Loss", "Quality", "Gradient norm", "Cost", "Trade-off", "Differences"]
CARD = "[data-testid='experiment-view-compare-runs-card']"


def history(precision, accuracy, speed, memory):
    """(name, value, step) of a run of 120 steps."""
    for step in range(1, 121):
        yield "train/loss", 2.3 * math.exp(-step / 40) + 0.05, step
        yield "train/grad_norm", 3 * math.exp(-step / 50) + 0.2, step
        yield "train/lr", 1e-3 * (1 - step / 200), step
        if precision == "16-mixed":
            yield "loss_scale/value", 65536.0 / (16 if step > 4 else 1), step
            yield "loss_scale/overflow", float(step <= 4), step
            yield "loss_scale/skipped_steps", float(min(step, 4)), step
        if step % 30 == 0:
            yield "val/loss", 2 * math.exp(-step / 40) + 0.08, step
            yield "val/accuracy", accuracy * (1 - math.exp(-step / 20)), step
            yield "perf/examples_per_second", float(speed), step
            yield "perf/step_ms", 64_000 / speed, step
            yield "memory/peak_mib", float(memory), step
    if precision == "16-mixed":
        yield from (("loss_scale/changes", 65536 / 2**step, step) for step in range(5))
    yield "memory/weights_mib", 44.7, 0
    yield "memory/optimizer_mib", 89.4, 3


def fill(store):
    """A sweep's runs and the tags of its dashboards; the experiment's id."""
    client = MlflowClient(store)
    experiment = client.create_experiment("precision-runner")
    now = int(time.time() * 1000)
    parent = client.create_run(experiment, now, {"role": "sweep", "sweep_id": "s1"}, PARENT)
    metrics = set()
    for number, (name, precision, *figures) in enumerate(RUNS):
        tags = {
            "precision": precision,
            "role": "run",
            "sweep_id": "s1",
            "mlflow.parentRunId": parent.info.run_id,
            "mlflow.runColor": dashboard.run_color(number),
        }
        run = client.create_run(experiment, now + number, tags, name).info.run_id
        points = [Metric(k, v, now + s, s) for k, v, s in history(precision, *figures)]
        client.log_batch(run, params=[Param("precision.name", precision)])
        for start in range(0, len(points), 1000):
            client.log_batch(run, points[start : start + 1000])
        client.set_terminated(run)
        metrics |= {point.key for point in points}
    client.set_terminated(parent.info.run_id)
    sweep = ("s1", parent.info.run_id, "32-true, bf16-mixed, 16-mixed")
    existing = client.get_experiment(experiment).tags
    tags = dashboard.tags_to_set(existing, experiment, version("mlflow"), now, metrics, sweep)
    for key, value in tags.items():
        client.set_experiment_tag(experiment, key, value)
    return experiment


@pytest.fixture(scope="module")
def stored(browser, mlflow_server, tmp_path_factory, empty_store):
    """A server on a store with a sweep, and the experiment's id."""
    folder = tmp_path_factory.mktemp("dashboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experiment = fill(empty_store(folder / "mlflow.db"))
    return mlflow_server(folder), experiment


def axes(page):
    """The type of each line chart's axis of values, by the chart's name."""
    return page.evaluate(
        """card => Object.fromEntries([...document.querySelectorAll(card)].flatMap(found => {
            const plot = found.querySelector('.js-plotly-plot');
            const kind = plot?.layout?.yaxis?.type ?? plot?._fullLayout?.yaxis?.type;
            return kind ? [[found.innerText.split('\\n')[0], kind]] : [];
        }))""",
        CARD,
    )


def look(page, url, picture):
    """Opens the dashboard and checks what is to be seen there, whichever view it is."""
    page.goto(url)
    for name in SECTIONS:
        page.get_by_text(name, exact=True).first.wait_for()
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 20")
    page.get_by_text("Parallel Coordinates").wait_for()
    page.screenshot(path=picture)
    text = page.inner_text("body")
    assert "No charts in this section" not in text
    assert "No chart data available" not in text
    assert PARENT not in text
    kinds = axes(page)
    for metric in ("loss_scale/changes", "train/loss", "val/loss", "train/grad_norm"):
        assert kinds[metric] == "log", kinds
    for name, *_ in RUNS:
        assert page.get_by_role("link", name=name, exact=True).count() == 1
        assert f"{name} (train/loss)" in text
    for metric in ("loss_scale/value", "loss_scale/overflow", "val/perplexity"):
        assert metric not in kinds
    assert "loss_scale" not in [line.strip() for line in text.splitlines()], "a section of MLflow's"


def test_one_url_opens_a_sweeps_charts(stored, page, tmp_path):
    server, experiment = stored
    url = server.url + dashboard.dashboard_path(experiment, dashboard.sweep_key("s1"))
    look(page, url, tmp_path / "dashboard.png")


def test_the_note_on_the_experiments_page_links_to_the_dashboard(stored, page):
    server, experiment = stored
    page.goto(f"{server.url}/#/experiments/{experiment}/runs?workflowType=machine_learning")
    link = page.get_by_role("link", name=dashboard.DASHBOARD_NAME).first
    link.wait_for()
    with page.context.expect_page() as opened:
        link.click()
    opened.value.get_by_text("Trade-off", exact=True).first.wait_for()


def test_the_experiments_charts_are_shown_after_a_restart_of_the_server(stored, page, tmp_path):
    server, experiment = stored
    server.stop()
    server.start()
    look(page, server.url + dashboard.dashboard_path(experiment), tmp_path / "dashboard.png")
