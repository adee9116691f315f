"""The report of a sweep: what each job came to, side by side."""

from collections.abc import Sequence
from pathlib import Path

from runner.result import RunResult, number


def write_report(folder: Path, results: Sequence[RunResult]) -> list[Path]:
    """Write `report.md` into the sweep's folder and return the files written."""
    columns = [
        "job",
        "status",
        "quality",
        "examples/s",
        "peak MiB",
        "skipped",
        "final scale",
        "error",
    ]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for r in results:
        quality = f"{r.quality} {number(r.metrics.get(r.quality))}" if r.quality else ""
        skipped = "" if r.skipped_steps is None else str(r.skipped_steps)
        error = r.error.splitlines()[0].replace("|", "\\|") if r.error else ""
        cells = [r.label, r.status, quality, number(r.examples_per_second),
                 number(r.peak_memory_mib), skipped, number(r.loss_scale), error]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return [path]
