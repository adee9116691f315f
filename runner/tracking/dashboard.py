"""Make the dashboards: shared views of MLflow's runs page, stored as tags of the experiment.

The experiment's is a table of its sweeps with their answers, a sweep's has charts of its runs.
MLflow does not document the form of such a tag. It was read from the scripts of its pages: 3.15.2,
3.16.1, 3.17.2 and 3.18.0. A browser test compares it with the installed version.
The states of the page are in dashboard.json. `ensure_dashboard` keeps the tags in a store, through
an MLflow client; everything above it computes them only.
"""

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

from runner.core import fmt, journals, layout

if TYPE_CHECKING:
    from mlflow import MlflowClient

DASHBOARD_KEY = "precision-runner"
DASHBOARD_NAME = "Sweeps and their answers"
VIEW_TAG_PREFIX = "mlflow.sharedViewState."
REPORT_PAGE = "report.html"
"""The artifact of a sweep's parent run that states the answer."""
MAX_SWEEPS = 20
"""Sweeps of an experiment that have a dashboard of their own; see tags_to_delete."""
# Raise it when the charts change: dashboards with a lower version are then replaced.
CHARTS_VERSION = 4

_MAX_NAME_CHARACTERS = 80
"""Upper bound on the name of a sweep's view, which MLflow shows in a menu."""
_MARK = "runner"
"""Key of our mark in a state."""
_PACKED_PREFIX = "deflate;"
# MLflow takes a run's color from its id, and gives two runs of a sweep the same one. A sweep
# with more than these 16 runs begins again with the first.
_COLORS = (
    "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f "
    "#bcbd22 #17becf #003f5c #ffa600 #00695c #ad1457 #5c6bc0 #a1887f"
)


class SweepView(NamedTuple):
    """A sweep's dashboard.

    Attributes:
        sweep_id: of the sweep.
        parent: id of its parent run.
        name: of the view; a long one is cut. Empty in a job of the sweep, which does not know it.
        swept_keys: that the command varies, which a job does not know either.
    """

    sweep_id: str
    parent: str
    name: str
    swept_keys: Sequence[str] = ()


def sweep_key(sweep_id: str) -> str:
    """Return the share key of one sweep's dashboard."""
    return f"{DASHBOARD_KEY}-{sweep_id}"


def dashboard_path(experiment_id: str, key: str = DASHBOARD_KEY) -> str:
    """Return the dashboard's URL after the server's address."""
    # It must not name a filter or an order: MLflow then ignores the shared view.
    mode = "TABLE" if key == DASHBOARD_KEY else "CHART"
    return (
        f"/#/experiments/{quote(experiment_id, safe='')}/runs?viewStateShareKey="
        f"{quote(key, safe='')}&compareRunsMode={mode}&workflowType=machine_learning"
    )


def run_path(experiment_id: str | None, run_id: str, artifact: str = "") -> str:
    """Return the URL of a run's page, or of one of its artifacts, after the server's address."""
    # Without workflowType MLflow shows the menu of its pages about language models.
    place = f"/artifacts/{artifact}" if artifact else ""
    return f"/#/experiments/{experiment_id}/runs/{run_id}{place}?workflowType=machine_learning"


def sweep_links(experiment_id: str | None, run_id: str | None, sweep_id: str) -> str:
    """Return Markdown for the note of a sweep's parent run: links to its report and dashboard.

    Empty while the store has not opened the run.
    """
    if experiment_id is None or run_id is None:
        return ""
    report = run_path(experiment_id, run_id, REPORT_PAGE)
    charts = dashboard_path(experiment_id, sweep_key(sweep_id))
    return f"[Report]({report[1:]}) · [Charts]({charts[1:]})"


def dashboard_note(experiment_id: str) -> str:
    """Return Markdown for the experiment's note, which MLflow shows on its pages."""
    # It is needed after a reload, which falls back to MLflow's own table and charts.
    link = f"[{DASHBOARD_NAME}]({dashboard_path(experiment_id)[1:]})"
    return f"{link}. The page of a sweep links to its report and charts."


def run_color(number: int) -> str:
    """Return the color for the tag `mlflow.runColor` of a sweep's n-th run."""
    colors = _COLORS.split()
    return colors[number % len(colors)]


def dashboard_tag(
    state: Mapping[str, Any], time_ms: int, name: str, metrics: Sequence[str] = ()
) -> str:
    """Return the value of a dashboard's tag.

    Args:
        state: of the page.
        time_ms: Unix time in milliseconds.
        name: of the view, which the menu of views shows.
        metrics: those that the state was made for, sorted.
    """
    # MLflow ignores keys that it does not know. By the digest a later run sees whether a user has
    # changed the view since.
    mark = {"version": CHARTS_VERSION, "digest": _digest(state), "at": time_ms, "metrics": metrics}
    text = json.dumps({**state, _MARK: mark}, separators=(",", ":"))
    packed = _PACKED_PREFIX + base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    name = name[:_MAX_NAME_CHARACTERS]
    return json.dumps({"name": name, "createdAt": time_ms, "updatedAt": time_ms, "state": packed})


def page_state(view: Literal["experiment", "sweep"]) -> dict[str, Any]:
    """Return the page's state for an experiment, or for a sweep with every chart."""
    # Where the values of dashboard.json come from:
    # - a sweep's order is "Created" in this form: MLflow collapses runs that are sorted by its
    #   usual name of the start time under their parents, and shows names without quotes as
    #   "undefined". The first group, which is the first in the legends, is that of the first job;
    # - isAccordionReordered: else MLflow sorts the sections by their names;
    # - two columns: in MLflow's three the names are truncated; a table needs the whole width;
    # - metrics of which single dips and overflows count are listed as deleted: a line is drawn from
    #   a few hundred of its points, and MLflow generates charts of metrics that are not listed;
    # - so are the parallel coordinates and the differences, which MLflow leaves empty for groups.
    states = json.loads(files(str(__package__)).joinpath("dashboard.json").read_text())
    return {**states["every"], **states[view]}


def sweep_state(view: SweepView, metrics: Collection[str] = ()) -> dict[str, Any]:
    """Return the state of the page with charts of a sweep's runs.

    Args:
        view: of the sweep.
        metrics: names that are logged. Charts of other metrics are deleted, because MLflow shows
            a section whose charts are all empty, and a scatter chart with one empty axis. Empty
            keeps all charts.
    """
    page = page_state("sweep")
    # A quote cannot be escaped in a filter; MLflow's own ids hold none.
    parent = view.parent.replace("'", "")
    page["searchFilter"] = f"tags.`mlflow.parentRunId` = '{parent}'"
    page["groupBy"] = group_state(view.swept_keys)
    if metrics:
        charts = page["compareRunCharts"]
        for card in charts:
            # Deleted rather than left out: MLflow makes a chart of each metric that no card names.
            card["deleted"] = card["deleted"] or not _axes(card) <= set(metrics)
        used = {card["metricSectionId"] for card in charts if not card["deleted"]}
        page["compareRunSections"] = [
            section for section in page["compareRunSections"] if section["uuid"] in used
        ]
    return page


def group_state(keys: Sequence[str]) -> dict[str, Any] | None:
    """Return the page's grouping of a sweep's runs: one color, line and band over the seeds each.

    Args:
        keys: that the command varies; mode=advise varies precision and seed without them.

    Returns:
        None where no runs differ in the seed alone, unless they differ in the precision alone.
    """
    others = [key for key in keys if key not in ("precision", "seed")]
    if others and "seed" not in keys:
        return None
    group_keys = []
    for key in [*others, "precision"]:
        if key in ("precision", "model", "data"):
            group_keys.append({"mode": "tag", "groupByData": key})
        else:
            # An option of another group is known by what it builds.
            is_group = (layout.BUILT_IN_CONFIGS / key).is_dir()
            name = f"{key}._target_" if is_group else key
            group_keys.append({"mode": "param", "groupByData": name})
    return {"aggregateFunction": "average", "groupByKeys": group_keys}


def _axes(card: Mapping[str, Any]) -> set[str]:
    """Return the metrics that a chart shows."""
    metrics = {card[axis]["key"] for axis in ("xaxis", "yaxis") if axis in card}
    return metrics.union(card.get("selectedMetricKeys", ()), card.get("selectedMetrics", ()))


def tags_to_set(
    existing: Mapping[str, str],
    experiment_id: str,
    time_ms: int,
    metrics: Collection[str] = (),
    sweep: SweepView | None = None,
) -> dict[str, str]:
    """Return the experiment's tags to set, given those that it has.

    A dashboard is written if there is none, and replaced if it is an older one of ours or lacks a
    chart for these metrics. One that a user changed stays as it is, and so does a note.

    Args:
        existing: tags of the experiment.
        experiment_id: of the experiment.
        time_ms: Unix time in milliseconds.
        metrics: names that runs log, added to those of an existing dashboard.
        sweep: whose dashboard is set, too.
    """
    new_tags: dict[str, str] = {}
    tag = VIEW_TAG_PREFIX + DASHBOARD_KEY
    if _is_outdated(existing.get(tag), []):
        new_tags[tag] = dashboard_tag(page_state("experiment"), time_ms, DASHBOARD_NAME)
    if sweep:
        tag = VIEW_TAG_PREFIX + sweep_key(sweep.sweep_id)
        old_state = unpack_state(existing.get(tag, "")) or {}
        # Metrics without a chart are left out: they would make every dashboard look outdated.
        cards = page_state("sweep")["compareRunCharts"]
        charted = set().union(*(_axes(card) for card in cards if not card["deleted"]))
        # Runs of one sweep log different metrics; a later one must not remove the charts of an
        # earlier one.
        mark = _mark(old_state)
        known = sorted(charted & {*metrics, *(mark["metrics"] if mark else ())})
        if _is_outdated(existing.get(tag), known):
            state = sweep_state(sweep, known)
            name = sweep.name or sweep.sweep_id
            if old_state and not sweep.name:
                name = json.loads(existing[tag])["name"]
                state["groupBy"] = old_state.get("groupBy")
            new_tags[tag] = dashboard_tag(state, time_ms, name, known)
    if not existing.get(journals.NOTE_TAG):
        new_tags[journals.NOTE_TAG] = dashboard_note(experiment_id)
    return new_tags


def _is_outdated(text: str | None, metrics: Sequence[str]) -> bool:
    """Return whether a dashboard is to be written in the place of a tag's text, for some metrics.

    A view without our mark is a user's, or was changed by one. A newer runner's stays, too: two
    versions that share a store would replace each other's.
    """
    if not text:
        return True
    mark = _mark(unpack_state(text))
    if not mark or mark["version"] > CHARTS_VERSION:
        return False
    return mark["version"] < CHARTS_VERSION or mark["metrics"] != metrics


def tags_to_delete(existing: Mapping[str, str]) -> list[str]:
    """Return the tags of the oldest sweeps' dashboards beyond MAX_SWEEPS."""
    # Every answer about an experiment carries all of its tags, and from 40 views on MLflow keeps
    # its users from saving their own.
    dated_tags = []
    for tag, text in existing.items():
        mark = (
            _mark(unpack_state(text)) if tag.startswith(VIEW_TAG_PREFIX + sweep_key("")) else None
        )
        if mark:
            dated_tags.append((mark["at"], tag))
    return [tag for _, tag in sorted(dated_tags, reverse=True)[MAX_SWEEPS:]]


def unpack_state(text: str) -> dict[str, Any] | None:
    """Return the state in a tag's value; None if it cannot be read."""
    try:
        packed = json.loads(text)["state"].removeprefix(_PACKED_PREFIX)
        compressed = base64.b64decode(packed, validate=True)
        state = json.loads(zlib.decompress(compressed))
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error, binascii.Error):
        return None
    return state if isinstance(state, dict) else None


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


def ensure_dashboard(
    client: "MlflowClient",
    experiment_id: str,
    metrics: Collection[str] = (),
    sweep: SweepView | None = None,
) -> str:
    """Set or renew the dashboards of an experiment, and of a sweep of it.

    Args:
        client: of the store.
        experiment_id: of the experiment.
        metrics: names of those that are logged.
        sweep: the sweep whose path is returned; None returns the experiment's.

    Returns:
        The dashboard's path after the server's address.

    Raises:
        MlflowException: the store refuses or cannot be reached.
    """
    # Read now rather than cached: other runs, and users, change the tags meanwhile.
    tags = dict(client.get_experiment(experiment_id).tags)
    new = tags_to_set(tags, experiment_id, fmt.now_ms(), metrics, sweep)
    for key, value in new.items():
        client.set_experiment_tag(experiment_id, key, value)
    for key in tags_to_delete({**tags, **new}):
        client.delete_experiment_tag(experiment_id, key)
    return dashboard_path(experiment_id, sweep_key(sweep.sweep_id) if sweep else DASHBOARD_KEY)
