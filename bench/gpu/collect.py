"""Write gpu.json and gpu.md of a run of bench/gpu/run.sh: python bench/gpu/collect.py OUT SWEEP

Copy both to bench/results/gpu/ under the device's name; `make docs` puts them into the pages.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import table, version_of, write_rows
from runner.core.run.run_context import git_tags

PACKAGES = ("torch", "transformer_engine", "bitsandbytes", "torchao")


def main(folder: Path, sweep: Path) -> None:
    """Write both files to the folder, and print the second."""
    results = collect(folder, sweep)
    write_rows(folder / "gpu.json", results)
    (folder / "gpu.md").write_text(markdown(results))
    print(markdown(results))


def collect(folder: Path, sweep: Path) -> dict[str, Any]:
    """Return all results of the stages in a folder, and the jobs of the sweep."""
    lines = folder / "throughput.jsonl"
    rows = [json.loads(text) for text in lines.read_text().splitlines()] if lines.exists() else []
    tests = folder / "tests.log"
    results = sorted(sweep.glob("*/result.json"), key=lambda p: int(p.parent.name))
    status = (folder / "status.txt").read_text().splitlines()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "capability": torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        "versions": {name: version_of(name) for name in PACKAGES} | {"cuda": torch.version.cuda},
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "command": "bench/gpu/run.sh WHEELS OUT",
        "stages": dict(line.split() for line in status),
        "tests": _test_counts(tests.read_text()) if tests.exists() else "not run",
        "ceilings": next((row for row in rows if row["kind"] == "ceilings"), None),
        "gpt": [row for row in rows if row["kind"] == "gpt"],
        "sweep": [_job(json.loads(path.read_text())) for path in results],
    }


def _job(result: dict[str, Any]) -> dict[str, Any]:
    keys = (
        "label",
        "status",
        "error",
        "metrics",
        "converted",
        "weights_mib",
        "peak_memory_mib",
        "skipped_steps",
    )
    return {key: result.get(key) for key in keys}


def _test_counts(log: str) -> str:
    """Return pytest's last line, with its counts."""
    counts = re.findall(
        r"^=*\s*(\d+ (?:passed|failed|skipped|error).* in [\d.]+s.*?)\s*=*$", log, re.M
    )
    return counts[-1] if counts else "cut off before its end"


def _commit() -> str:
    tags = git_tags(Path.cwd())
    commit = os.environ.get("COMMIT") or tags.get("git_commit", "unknown")
    return f"{commit} (changed)" if tags.get("git_dirty") == "true" else commit


def markdown(results: dict[str, Any]) -> str:
    """Return the figures as tables."""
    versions = ", ".join(f"{name} {text}" for name, text in results["versions"].items())
    parts = [
        f"# GPU suite on {results['device']}",
        f"`{results['command']}`, {results['date']}, commit {results['commit']}; {versions}",
        f"Tests: {results['tests']}. Stages and their exit status: {results['stages']}.",
    ]
    if results["ceilings"]:
        c = results["ceilings"]
        parts.append(
            f"Ceilings: bfloat16 product {c['tflops']:.0f} TFLOP/s, copy {c['tbps']:.2f} TB/s."
        )
    tables = (_throughput_table(results["gpt"]), _sweep_table(results["sweep"]))
    return "\n\n".join([*parts, *tables]) + "\n"


def _throughput_table(rows: list[dict[str, Any]]) -> str:
    base = {
        row["width"]: row["tokens_per_second"]
        for row in rows
        if row["precision"] == "bf16-mixed" and row["compiled"] and "error" not in row
    }
    lines = []
    for row in rows:
        case = [str(row["width"]), row["precision"], "yes" if row["compiled"] else "no"]
        if "error" in row:
            lines.append([*case, row["error"].splitlines()[0], "", "", ""])
            continue
        rate = row["tokens_per_second"]
        rates = f"{rate:,.0f} ({row['least']:,.0f} to {row['greatest']:,.0f})"
        ratio = f"{rate / base[row['width']]:.2f}" if row["width"] in base else ""
        lines.append([*case, rates, ratio, f"{row['peak_gib']:.1f}", row["converted"]])
    head = ["width", "precision", "compiled", "tokens/s (least to greatest)"]
    head += ["against compiled bf16-mixed", "peak GiB", "converted"]
    return f"## GPT, tokens per second\n\n{table(head, lines)}"


def _sweep_table(jobs: list[dict[str, Any]]) -> str:
    lines = []
    for job in jobs:
        loss = (job["metrics"] or {}).get("val/loss")
        sizes = (job["weights_mib"], job["peak_memory_mib"])
        lines.append(
            [
                job["label"],
                job["status"],
                "" if loss is None else f"{loss:.4f}",
                *("" if size is None else f"{size:.1f}" for size in sizes),
                job["converted"] or "",
                (job["error"] or "").replace("\n", " "),
            ]
        )
    head = ["precision", "status", "val/loss", "weights MiB", "peak MiB", "converted", "reason"]
    return f"## Every precision, GPT on text, 100 steps\n\n{table(head, lines)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
