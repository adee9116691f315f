"""Make the dashboard: a shared view of MLflow's runs page, stored as a tag of the experiment.

MLflow does not document the form of such a tag. It was read from the scripts of its pages: 3.10.1,
3.14.0, 3.15.2, 3.16.1, 3.17.2 and 3.18.0. A browser test compares it with the installed version.
This module computes tags only; dashboard_views.py stores them.
"""

import base64
import binascii
import hashlib
import json
import re
import zlib
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

from runner.tracking.tracker import NOTE_TAG

DASHBOARD_KEY = "precision-runner"
DASHBOARD_NAME = "Precisions compared"
VIEW_TAG_PREFIX = "mlflow.sharedViewState."
MAX_SWEEPS = 20
"""Sweeps of an experiment that have a dashboard of their own; see tags_to_delete."""
# Raise it when the charts change: dashboards with a lower version are then replaced.
CHARTS_VERSION = 1

_MARK = "runner"
"""Key of our mark in a state, and prefix of our ids in it."""
_PACKED_PREFIX = "deflate;"
_OLDEST_VERSION = (3, 10)
_NAMED_SINCE = (3, 15)
"""The MLflow version from which on a view has a name and two dates."""
_SPEED = "perf/examples_per_second"
_PEAK_MEMORY = "memory/peak_mib"
_LOG = {"scaleType": "log"}
_PARALLEL = {"selectedParams": ["precision.name"], "showAllRuns": False}
_DIFFERENCE = {
    "compareGroups": ["Model metrics", "Parameters"],
    "chartName": "Differences",
    "showChangeFromBaseline": False,
    "showDifferencesOnly": True,
    "baselineColumnUuid": "",
}

_Chart = tuple[str, list[str], dict[str, Any]]
_SECTIONS: dict[str, list[_Chart]] = {
    "Loss scale": [
        ("LINE", ["loss_scale/changes"], _LOG),
        ("LINE", ["loss_scale/skipped_steps"], {}),
    ],
    "Loss": [("LINE", ["train/loss"], _LOG), ("LINE", ["val/loss"], _LOG)],
    "Quality": [
        ("LINE", ["val/accuracy"], {}),
        ("LINE", ["val/perplexity"], _LOG),
        ("LINE", ["guard/stagnant_share"], {}),
        ("LINE", ["numerics/underflow_share"], {}),
        ("LINE", ["numerics/overflow_share"], {}),
        ("LINE", ["numerics/swallowed_share"], {}),
    ],
    "Gradient norm": [("LINE", ["train/grad_norm"], _LOG), ("LINE", ["train/lr"], {})],
    "Cost": [
        ("BAR", [_SPEED], {}),
        ("BAR", [_PEAK_MEMORY], {}),
        ("BAR", ["perf/step_ms"], {}),
        ("BAR", ["memory/weights_mib"], {}),
        ("BAR", ["memory/optimizer_mib"], {}),
    ],
    "Trade-off": [
        ("SCATTER", [_SPEED, "val/loss"], {}),
        ("SCATTER", [_SPEED, "val/accuracy"], {}),
        ("PARALLEL", [_SPEED, _PEAK_MEMORY, "val/accuracy"], _PARALLEL),
        ("PARALLEL", [_SPEED, _PEAK_MEMORY, "val/perplexity"], _PARALLEL),
    ],
    "Differences": [("DIFFERENCE", [], _DIFFERENCE)],
}
# A line is drawn from a few hundred of its points: it would not show single dips and overflows.
_UNCHARTED = ("loss_scale/value", "loss_scale/overflow")
_COLUMNS = ("val/accuracy", "val/loss", _SPEED, _PEAK_MEMORY)
# MLflow takes a run's color from its id, and gives two runs of a sweep the same one. A sweep
# with more than these 16 runs begins again with the first.
_COLORS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
    "#003f5c",
    "#ffa600",
    "#00695c",
    "#ad1457",
    "#5c6bc0",
    "#a1887f",
)


def is_supported(version: str) -> bool:
    """Return whether the pages of this MLflow show the dashboard: 3.10 or newer.

    A named view needs 3.15; older versions read only the bare state. Opened in a browser: the bare
    form on 3.10.1, 3.14.0, 3.17.2 and 3.18.0, the named one on 3.17.2 and 3.18.0. For 3.15.2 and
    3.16.1 the scripts were read; versions below 3.10 were not tried.
    """
    return _major_minor(version) >= _OLDEST_VERSION


def sweep_key(sweep_id: str) -> str:
    """Return the share key of one sweep's dashboard."""
    return f"{DASHBOARD_KEY}-{sweep_id}"


def dashboard_path(experiment_id: str, key: str = DASHBOARD_KEY) -> str:
    """Return the dashboard's URL after the server's address."""
    # It must not name a filter or an order: since 3.15 MLflow then ignores the shared view.
    return (
        f"/#/experiments/{quote(experiment_id, safe='')}/runs?viewStateShareKey="
        f"{quote(key, safe='')}&compareRunsMode=CHART&workflowType=machine_learning"
    )


def dashboard_note(experiment_id: str) -> str:
    """Return Markdown for the experiment's note, which MLflow shows on its pages."""
    # The link is needed after a reload, which since 3.15 falls back to MLflow's own charts.
    link = dashboard_path(experiment_id)[1:]
    return f"[{DASHBOARD_NAME}: the dashboard]({link}), also after a reload"


def run_color(number: int) -> str:
    """Return the color for the tag `mlflow.runColor` of a sweep's n-th run."""
    return _COLORS[number % len(_COLORS)]


def dashboard_tag(
    state: Mapping[str, Any],
    version: str,
    now_ms: int,
    name: str = DASHBOARD_NAME,
    metrics: Collection[str] = (),
) -> str:
    """Return the value of a dashboard's tag in the form that a server of a version reads.

    Args:
        state: of the page, see dashboard_state.
        version: from 3.15 on the value has a name, which the menu of views shows; before, it is the
            bare state.
        now_ms: Unix time in milliseconds.
        name: of the view.
        metrics: those that the state was made for.
    """
    # MLflow ignores keys that it does not know. By the digest a later run sees whether a user has
    # changed the view since.
    mark = {
        "version": CHARTS_VERSION,
        "digest": _digest(state),
        "at": now_ms,
        "metrics": sorted(metrics),
    }
    text = json.dumps({**state, _MARK: mark}, separators=(",", ":"))
    packed = _PACKED_PREFIX + base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if _major_minor(version) < _NAMED_SINCE:
        return packed
    return json.dumps({"name": name, "createdAt": now_ms, "updatedAt": now_ms, "state": packed})


def dashboard_state(
    parent_run_id: str | None = None, metrics: Collection[str] = ()
) -> dict[str, Any]:
    """Return the state of the page with our charts.

    Args:
        parent_run_id: of a sweep, whose runs are shown by name; None shows all runs of the
            experiment except the sweeps' parents, the newest first.
        metrics: names that are logged. Charts of other metrics are left out, because MLflow shows
            a section whose charts are all empty, and a scatter chart with one empty axis. Empty
            keeps all charts.
    """
    if parent_run_id is None:
        # Ordered by "Created": with the usual name of the start time MLflow would collapse the
        # runs under their parents.
        page = _page("tags.precision != ''", "attributes.Created", False)
    else:
        # A quote cannot be escaped in a filter; MLflow's own ids hold none.
        search_filter = "tags.`mlflow.parentRunId` = '{}'".format(parent_run_id.replace("'", ""))
        page = _page(search_filter, "tags.`mlflow.runName`", True)
    charts = []
    for section, section_charts in _SECTIONS.items():
        for number, chart in enumerate(section_charts):
            if not metrics or set(chart[1]) <= set(metrics):
                charts.append((section, _card(f"{section}-{number}", section, *chart)))
    # Listed as deleted, because otherwise MLflow generates charts for them.
    hidden = [_card(metric, "", "LINE", [metric], {"deleted": True}) for metric in _UNCHARTED]
    page["compareRunSections"] = [_section(name) for name in dict(charts)]
    page["compareRunCharts"] = [card for _, card in charts] + hidden
    return page


def tags_to_set(
    existing: Mapping[str, str],
    experiment_id: str,
    version: str,
    now_ms: int,
    metrics: Collection[str] = (),
    sweep: tuple[str, str, str] | None = None,
) -> dict[str, str]:
    """Return the experiment's tags to set, given those that it has.

    A dashboard is written if there is none, and replaced if it is an older one of ours, lacks a
    chart for these metrics or has the form of another version. One that a user changed stays as it
    is, and so does a note.

    Args:
        existing: tags of the experiment.
        experiment_id: of the experiment.
        version: of the server, or of MLflow here for a store without a server.
        now_ms: Unix time in milliseconds.
        metrics: names that runs log, added to those of an existing dashboard.
        sweep: the sweep's id, its parent run's id, and the name of its view.
    """
    if not is_supported(version):
        return {}
    views: dict[str, tuple[str | None, str]] = {
        VIEW_TAG_PREFIX + DASHBOARD_KEY: (None, DASHBOARD_NAME)
    }
    if sweep:
        sweep_id, parent, name = sweep
        views[VIEW_TAG_PREFIX + sweep_key(sweep_id)] = (parent, name)
    # Metrics without a chart are left out: they would make every dashboard look outdated.
    shown_metrics = set(metrics) & _charted_metrics()
    new_tags: dict[str, str] = {}
    for tag, (parent, name) in views.items():
        old = existing.get(tag)
        mark = _mark(unpack_state(old)) if old else None
        # Runs of one experiment log different metrics; a later one must not remove the charts of
        # an earlier one.
        known = shown_metrics | set(mark["metrics"] if mark else ())
        new = dashboard_tag(dashboard_state(parent, known), version, now_ms, name, known)
        # A view without our mark is a user's, or was changed by one.
        if not old or (mark and _is_outdated(mark, known, old, new)):
            new_tags[tag] = new
    if not existing.get(NOTE_TAG):
        new_tags[NOTE_TAG] = dashboard_note(experiment_id)
    return new_tags


def _charted_metrics() -> set[str]:
    """Return the names of all metrics that some chart shows."""
    charts = [chart for section_charts in _SECTIONS.values() for chart in section_charts]
    return {name for _, metrics, _ in charts for name in metrics}


def tags_to_delete(existing: Mapping[str, str]) -> list[str]:
    """Return the tags of the oldest sweeps' dashboards beyond MAX_SWEEPS."""
    # Every answer about an experiment carries all of its tags, and from 40 views on MLflow keeps
    # its users from saving their own.
    ours = []
    for tag, text in existing.items():
        if not tag.startswith(VIEW_TAG_PREFIX + sweep_key("")):
            continue
        mark = _mark(unpack_state(text))
        if mark:
            ours.append((mark["at"], tag))
    return [tag for _, tag in sorted(ours, reverse=True)[MAX_SWEEPS:]]


def unpack_state(text: str) -> dict[str, Any] | None:
    """Return the state in a tag's value of either form; None if it cannot be read."""
    try:
        packed = text if text.startswith(_PACKED_PREFIX) else json.loads(text)["state"]
        compressed = base64.b64decode(packed.removeprefix(_PACKED_PREFIX), validate=True)
        state = json.loads(zlib.decompress(compressed))
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error, binascii.Error):
        return None
    return state if isinstance(state, dict) else None


def _is_outdated(mark: Mapping[str, Any], known: set[str], old: str, new: str) -> bool:
    """Return whether our dashboard in the tag's value `old`, with this mark, becomes `new`."""
    # A newer runner's charts stay: two versions that share a store would replace each other's.
    if mark["version"] != CHARTS_VERSION:
        return mark["version"] < CHARTS_VERSION
    # A server that was upgraded, or downgraded, reads the other form.
    form_differs = old.startswith(_PACKED_PREFIX) != new.startswith(_PACKED_PREFIX)
    return known != set(mark["metrics"]) or form_differs


def _mark(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return our mark in a state that we wrote; None if someone else wrote or changed it."""
    if not state:
        return None
    mark = state.get(_MARK)
    if not isinstance(mark, dict) or mark.get("digest") != _digest(state):
        return None
    return mark if {"version", "at", "metrics"} <= mark.keys() else None


def _digest(state: Mapping[str, Any]) -> str:
    """Return a digest of a state without our mark; the order of keys does not count."""
    rest = {key: value for key, value in state.items() if key != _MARK}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def _major_minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0, 0)


def _page(search_filter: str, order: str, ascending: bool) -> dict[str, Any]:
    """Return the page's state without its charts."""
    # Every field is needed: versions before 3.15 fill in no defaults.
    return {
        "searchFilter": search_filter,
        "orderByKey": order,
        "orderByAsc": ascending,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [f"metrics.`{metric}`" for metric in _COLUMNS],
        "columnOrder": [],
        "columnWidths": {},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "FIRST_20_RUNS",
        "viewMaximized": False,
        "runListHidden": False,
        # Without it MLflow sorts the sections by their names.
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {
            "xAxisKey": "step",
            "lineSmoothness": 0,
            "selectedXAxisMetricKey": "",
        },
        "chartsSearchFilter": "",
    }


def _section(name: str) -> dict[str, Any]:
    is_table = name == "Differences"
    # In MLflow's default of three columns the names are truncated; a table needs the whole width.
    return {
        "uuid": f"{_MARK}-{name}",
        "name": name,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
        "columns": 1 if is_table else 2,
        "cardHeight": 480 if is_table else 320,
    }


def _card(
    uuid: str, section: str, kind: str, metrics: list[str], more: dict[str, Any]
) -> dict[str, Any]:
    card: dict[str, Any] = {
        "uuid": f"{_MARK}-{uuid}",
        "type": kind,
        "metricSectionId": f"{_MARK}-{section}",
        "runsCountToCompare": 100,
        "deleted": False,
        "isGenerated": False,
    }
    if kind in ("LINE", "BAR"):
        card |= {"metricKey": metrics[0], "selectedMetricKeys": metrics}
    if kind == "LINE":
        card |= {
            "lineSmoothness": 0,
            "xAxisScaleType": "linear",
            "scaleType": "linear",
            "range": {},
            "xAxisKey": "step",
            "selectedXAxisMetricKey": "",
            "yAxisKey": "metric",
            "yAxisExpressions": [],
            "ignoreOutliers": False,
            "useGlobalXaxisKey": True,
            "useGlobalLineSmoothing": True,
        }
    if kind == "SCATTER":
        x_metric, y_metric = metrics
        card["xaxis"] = {"key": x_metric, "type": "METRIC"}
        card["yaxis"] = {"key": y_metric, "type": "METRIC"}
    if kind == "PARALLEL":
        card["selectedMetrics"] = metrics
    return card | more
