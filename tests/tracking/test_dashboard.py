"""The dashboard's form, when it is written, and whether the installed MLflow still reads it."""

import base64
import json
import re
import zlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files as resources
from urllib.parse import parse_qs, urlsplit

import pytest

from runner.core.record.journals import NOTE_TAG
from runner.core.record.metric_names import METRICS
from runner.tracking import dashboard

TAG, SWEEP_TAG = (
    "mlflow.sharedViewState.precision-runner",
    "mlflow.sharedViewState.precision-runner-s1",
)
VIEWS = (TAG, SWEEP_TAG)
SWEEP = dashboard.SweepView("s1", "0123abc", "32-true, 16-mixed")
PLACE = dashboard.dashboard_path("7")
NOW = 1_700_000_000_000
LANGUAGE = ("train/loss", "val/loss", "val/perplexity", "perf/mean_examples_per_second")


def written(existing=None, **more):
    return dashboard.tags_to_set(existing or {}, "7", NOW, **{"sweep": SWEEP, **more})


def changed(text, **fields):
    """Return the tag after someone saved another state over it."""
    state = {**dashboard.unpack_state(text), **fields}
    packed = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    return json.dumps({**json.loads(text), "state": packed})


def names(state):
    return [section["name"] for section in state["compareRunSections"]]


def test_a_named_view_has_the_form_of_mlflows_own():
    envelope = json.loads(written()[TAG])
    assert envelope.keys() == {"name", "createdAt", "updatedAt", "state"}
    assert (envelope["name"], envelope["createdAt"]) == (dashboard.DASHBOARD_NAME, NOW)
    envelope = json.loads(written()[SWEEP_TAG])
    assert envelope["name"] == "32-true, 16-mixed"
    packed = envelope["state"].removeprefix("deflate;")
    assert packed != envelope["state"]
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert state == dashboard.unpack_state(written()[SWEEP_TAG])
    assert names(state) == [
        "Loss and answer",
        "Quality",
        "Loss scale",
        "Gradient norm",
        "Rounding",
        "Trade-off",
    ]


def test_a_dashboard_is_far_below_the_size_limit_of_an_experiments_tag():
    assert max(map(len, written().values())) < 4000


def test_every_chart_has_its_section_and_metrics_that_exist():
    state = dashboard.page_state("sweep")
    uuids = {section["uuid"] for section in state["compareRunSections"]}
    cards = state["compareRunCharts"]
    assert len({card["uuid"] for card in cards}) == len(cards)
    assert {card["metricSectionId"] for card in cards if not card["deleted"]} == uuids
    drawn = {card["metricKey"] for card in cards if "metricKey" in card}
    assert drawn == {metric for metric in METRICS if "<" not in metric}


def test_a_metric_that_no_run_logs_has_neither_chart_nor_section():
    state = dashboard.sweep_state(SWEEP, LANGUAGE)
    assert names(state) == ["Loss and answer", "Quality", "Trade-off"]
    # MLflow would make a chart of a metric that no card names.
    cards = dashboard.page_state("sweep")["compareRunCharts"]
    assert len(state["compareRunCharts"]) == len(cards)
    text = json.dumps([card for card in state["compareRunCharts"] if not card["deleted"]])
    assert "val/accuracy" not in text
    assert "val/perplexity" in text


def test_an_experiments_view_is_a_table_of_sweeps_and_a_sweeps_has_charts_of_its_runs():
    table = dashboard.unpack_state(written()[TAG])
    assert table["searchFilter"] == "tags.role = 'sweep'"
    assert table["selectedColumns"][0] == "tags.`answer`"
    assert not table["compareRunCharts"]
    charts = dashboard.unpack_state(written()[SWEEP_TAG])
    assert charts["searchFilter"] == "tags.`mlflow.parentRunId` = '0123abc'"
    # MLflow draws the first 20 runs of a view otherwise.
    assert charts["runsHiddenMode"] == "SHOW_ALL"


def test_mlflow_can_name_the_order_of_each_view():
    """It knows the start time, and shows of another key what stands in quotes."""
    for view in ("experiment", "sweep"):
        key = dashboard.page_state(view)["orderByKey"]
        assert key == "attributes.start_time" or re.fullmatch(r".+\.`(.+)`", key)


def test_a_url_names_the_view_and_nothing_that_overrides_it():
    for key, mode in ((dashboard.DASHBOARD_KEY, "TABLE"), ("precision-runner-s1", "CHART")):
        path = dashboard.dashboard_path("7", key)
        place, _, query = urlsplit(f"http://host:5000{path}").fragment.partition("?")
        assert place == "/experiments/7/runs"
        assert parse_qs(query) == {
            "viewStateShareKey": [key],
            "compareRunsMode": [mode],
            "workflowType": ["machine_learning"],
        }


def test_special_characters_in_a_share_key_are_escaped():
    assert "viewStateShareKey=precision-runner-a%26b%20c%2Fd&" in dashboard.dashboard_path(
        "7", dashboard.sweep_key("a&b c/d")
    )


def test_a_quote_cannot_break_out_of_the_filter():
    wanted = dashboard.sweep_state(SWEEP._replace(parent="x' or a = 'b"))["searchFilter"]
    assert wanted.count("'") == 2


def test_the_note_links_to_the_sweeps_and_one_of_a_user_is_kept():
    assert written()[NOTE_TAG].startswith(f"[Sweeps and their answers]({PLACE[1:]})")
    assert NOTE_TAG not in written({NOTE_TAG: "Ask Ann."})


def test_an_existing_dashboard_is_not_written_again():
    first = written()
    assert first.keys() == {TAG, SWEEP_TAG, NOTE_TAG}
    assert written(first) == {}
    assert written(sweep=None).keys() == {TAG, NOTE_TAG}


def test_a_dashboard_gains_the_charts_of_metrics_that_come_later():
    first = written(metrics=LANGUAGE)
    assert written(first, metrics=LANGUAGE[:2]) == {}
    assert written(first, metrics=["my/own"]) == {}
    second = written(first, metrics=["loss_scale/changes"])
    assert second.keys() == {SWEEP_TAG}
    assert names(dashboard.unpack_state(second[SWEEP_TAG]))[1:3] == ["Quality", "Loss scale"]


def test_a_quality_of_rounding_alone_makes_no_section_of_quality():
    state = dashboard.sweep_state(SWEEP, ["train/loss", "val/loss", "guard/stagnant_share"])
    assert names(state) == ["Loss and answer", "Rounding"]


def test_bars_are_of_metrics_that_finished_runs_alone_have():
    cards = dashboard.page_state("sweep")["compareRunCharts"]
    bars = {card["metricKey"] for card in cards if card["type"] == "BAR" and not card["deleted"]}
    timed = ("perf/mean_examples_per_second", "perf/mean_step_ms")
    assert bars == {*timed, "memory/compared_mib"}


@pytest.mark.parametrize(
    ("keys", "grouped"),
    [
        (("precision", "seed"), [("tag", "precision")]),
        ((), [("tag", "precision")]),  # of mode=advise
        (("precision", "optimizer.lr"), None),
        (("precision", "optimizer.lr", "seed"), [("param", "optimizer.lr"), ("tag", "precision")]),
        (
            ("model", "optimizer", "seed"),
            [("tag", "model"), ("param", "optimizer._target_"), ("tag", "precision")],
        ),
    ],
)
def test_runs_that_differ_in_the_seed_or_the_precision_alone_are_grouped(keys, grouped):
    tag = written(sweep=SWEEP._replace(swept_keys=keys))
    # The sweep's jobs know neither its keys nor its name.
    later = written(tag, sweep=SWEEP._replace(name=""), metrics=["loss_scale/changes"])
    for text in (tag[SWEEP_TAG], later[SWEEP_TAG]):
        group = dashboard.unpack_state(text)["groupBy"]
        found = group and [(one["mode"], one["groupByData"]) for one in group["groupByKeys"]]
        assert found == grouped
        assert json.loads(text)["name"] == SWEEP.name
    assert dashboard.unpack_state(tag[TAG])["groupBy"] is None


def test_an_older_dashboard_of_ours_is_replaced_and_a_newer_one_is_not(monkeypatch):
    first = written()
    monkeypatch.setattr(dashboard, "CHARTS_VERSION", dashboard.CHARTS_VERSION + 1)
    second = written(first)
    assert second.keys() == {TAG, SWEEP_TAG}
    monkeypatch.setattr(dashboard, "CHARTS_VERSION", dashboard.CHARTS_VERSION - 1)
    assert written({**first, **second}) == {}


@pytest.mark.parametrize(
    "text", ["{}", "[]", "deflate;x", "deflate;eJwrLkksSQUABioCDQ==", "nothing"]
)
def test_a_view_of_another_author_is_not_replaced(text):
    theirs = {TAG: text, SWEEP_TAG: text, NOTE_TAG: "our notes"}
    assert written(theirs, metrics=LANGUAGE) == {}


def test_a_dashboard_that_a_user_changed_is_not_replaced(monkeypatch):
    first = written()
    first = {**first, **{tag: changed(first[tag], hideEmptyCharts=False) for tag in VIEWS}}
    monkeypatch.setattr(dashboard, "CHARTS_VERSION", dashboard.CHARTS_VERSION + 1)
    assert written(first, metrics=LANGUAGE) == {}


def test_the_oldest_sweeps_dashboards_are_deleted_but_not_those_a_user_changed():
    tags = {}
    for number in range(dashboard.MAX_SWEEPS + 3):
        sweep = dashboard.SweepView(str(number), "0123abc", f"sweep {number}")
        tags |= dashboard.tags_to_set(tags, "7", NOW + number, sweep=sweep)
    oldest = [f"{TAG}-{number}" for number in (0, 1, 2)]
    assert sorted(dashboard.tags_to_delete(tags)) == oldest
    tags[oldest[0]] = changed(tags[oldest[0]], orderByAsc=False)
    assert sorted(dashboard.tags_to_delete(tags)) == oldest[1:]


def test_neighbours_differ_in_color():
    colors = [dashboard.run_color(number) for number in range(16)]
    assert len(set(colors)) == 16
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in colors)


@cache
def scripts():
    """Return the scripts of the installed MLflow's pages."""
    folder = resources("mlflow") / "server" / "js" / "build" / "static" / "js"
    return "\n".join(path.read_text(errors="replace") for path in folder.glob("*.js"))


@pytest.mark.parametrize(
    "piece",
    [
        r'"mlflow\.sharedViewState\."',
        r'"viewStateShareKey"',
        r'"deflate;"',
        r"JSON\.stringify\(\{name:\w+,createdAt:\w+,updatedAt:\w+,state:\w+\}\)",
        r'"FIRST_20_RUNS"',
        r'"SHOW_ALL"',
        r'PARALLEL="PARALLEL",\w+\.DIFFERENCE="DIFFERENCE"',
        r'MODEL_METRICS="Model metrics"',
        r'"mlflow\.runColor"',
        r'DATE:"attributes\.start_time"',
    ],
)
def test_the_scripts_of_the_installed_mlflow_contain(piece):
    assert re.search(piece, scripts()), f"mlflow {version('mlflow')} changed its saved views"


def test_the_installed_pages_keep_every_field_of_the_state():
    """They drop what is not in their two lists."""
    lists = re.findall(r'=\[((?:"\w+",?){5,30})\]', scripts())
    known = {name for found in lists for name in re.findall(r'"(\w+)"', found)}
    for tag in VIEWS:
        assert dashboard.unpack_state(written()[tag]).keys() - {"runner"} <= known
