"""The report of a sweep: every job side by side, its curves laid over one another."""

import html
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.errors import ConfigError, RunnerError
from runner.result import RunResult, columns, number, read_results

MANIFEST = "sweep.json"


def write_report(folder: Path) -> list[Path]:
    """Write `report.md`, `report.html` and `report.png` of the jobs in a sweep's folder.

    Returns:
        The files written; no picture where no job has a journal.
    """
    results = read_results(folder)
    shown = [
        *columns(results),
        ("best", lambda r: number(r.best)),
        ("step ms", lambda r: number(r.step_ms)),
        ("reason", lambda r: r.error),
    ]
    head, rows = [name for name, _ in shown], [[cell(r) for _, cell in shown] for r in results]
    command = " ".join(json.loads((folder / MANIFEST).read_text())["command"])
    markdown, page, picture = (folder / f"report.{kind}" for kind in ("md", "html", "png"))
    markdown.write_text(_markdown(command, head, rows))
    drawn = _draw(picture, results)
    page.write_text(_html(command, head, rows, picture if drawn else None))
    return [markdown, page, *([picture] if drawn else [])]


def _markdown(command: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
        return f"| {' | '.join(escaped)} |"

    table = [line(head), f"|{'---|' * len(head)}", *map(line, rows)]
    return f"`{command}`\n\n" + "\n".join(table) + "\n"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Sweep report</title>
<style>body{{font:14px sans-serif;margin:2em;max-width:80em}}
table{{border-collapse:collapse}}
td,th{{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:left}}
img{{max-width:100%}}</style>
<h1>Sweep report</h1><p><code>{command}</code></p><table>{table}</table>{picture}</html>
"""


def _html(
    command: str, head: Sequence[str], rows: Sequence[Sequence[str]], picture: Path | None
) -> str:
    """A page that needs nothing beside itself."""
    import base64

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(c)}</{tag}>' for c in cells)}</tr>"

    table = line("th", head) + "".join(line("td", row) for row in rows)
    image = ""
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<p><img alt="loss and loss scale" src="data:image/png;base64,{data}"></p>'
    return _PAGE.format(command=html.escape(command), table=table, picture=image)


def history(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, values) of every record in a job's journal."""
    for journal in sorted(folder.glob("journal*.jsonl")):
        for text in journal.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                return  # the last append of a job that was killed
            record: dict[str, Any] = json.loads(text)
            if record.get("kind") == "metrics":
                yield record["step"], record["values"]


def _draw(path: Path, results: Sequence[RunResult]) -> bool:
    """Loss curves of all jobs, and loss scales of those that have one, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    drawn = False
    for r in results:
        for ax, key in zip(axes, ("train/loss", "loss_scale/value"), strict=True):
            points = [(step, v[key]) for step, v in history(Path(r.folder)) if key in v]
            if points:
                ax.plot(*zip(*points, strict=True), label=r.label, lw=1)
                ax.set_ylabel(key)
                drawn = True
    if not drawn:
        return False
    axes[0].set_yscale("log")
    axes[1].set_yscale("log", base=2)
    axes[1].set_xlabel("step")
    for ax in axes:
        if ax.lines:
            ax.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    return True


def rebuild(argv: Sequence[str]) -> int:
    """`runner report [parent run id or sweep folder]`; the newest sweep where none is given."""
    try:
        if len(argv) > 1:
            raise ConfigError(f"report takes one sweep, and was given: {' '.join(argv)}.")
        paths = write_report(_sweep_folder(argv[0] if argv else None))
    except RunnerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(paths[0].read_text())
    print("\n".join(str(path) for path in paths))
    return 0


def _sweep_folder(where: str | None) -> Path:
    from runner.checkpoint import folder_of_run

    if where is None:
        found = sorted(Path("outputs/sweeps").glob(f"*/{MANIFEST}"))
        if not found:
            raise ConfigError(
                "There is no sweep under outputs/sweeps. Type report <folder or run id>."
            )
        return found[-1].parent
    folder = Path(where) if Path(where).exists() else folder_of_run(where, None)
    if not (folder / MANIFEST).exists():
        raise ConfigError(f"{where} is not a sweep: {folder} holds no {MANIFEST}.")
    return folder
