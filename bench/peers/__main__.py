"""Is a training step as fast as in hand-written PyTorch, and how do other frameworks compare?

    make bench
    python -m bench.peers [--quick] [--device cuda] [--jobs mlp resnet18 gpt] [--threads 1]
    python -m bench.peers --render     writes the report of peers.json again

--quick takes few rounds, to see that it works.

One job by hand in PyTorch, with this runner, Lightning Fabric, Lightning Trainer and Hugging Face
Accelerate: the same model, batches, optimizer and seed, each in a process of its own, segment by
segment in turn; who begins changes from round to round. A contender whose first losses are not
raw's, or which computes in another dtype than it was asked for, is not compared. The runner is
measured as a user runs it, by its command, with and without MLflow; what its writer process costs
is reported, too. CPU time is the whole process's.

Writes bench/results/peers.md, peers.json and peers.png.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.common import RESULTS, commit, parse_options, table, write, write_rows
from bench.peers import measure
from bench.peers.contenders import CONTENDERS
from bench.peers.environment import interpreter, versions
from bench.peers.jobs import Job, jobs
from bench.peers.plot import draw
from bench.peers.report import Result, import_table, profile_table

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
DEFAULT = {"cpu": ("mlp", "resnet18", "gpt"), "cuda": ("mlp", "resnet50", "gpt124m")}
BUSY = 3.0  # load average above what two contenders and a writer make
QUESTION = "As fast as hand-written PyTorch?"


def plan(chosen: Any) -> Iterator[tuple[Job, str]]:
    """Yield every job in every precision that can train it."""
    for name in chosen.jobs or DEFAULT[chosen.device]:
        job = jobs(chosen.device)[name]
        if chosen.quick:
            job = replace(job, rounds=3, steps=max(20, job.steps // 5))
        for precision in PRECISIONS:
            slow = precision == "16-mixed" and chosen.device == "cpu"
            if slow and job.model == "resnet":
                continue  # PyTorch's float16 convolutions on a CPU: bench/results/cpu_float16.md
            yield (
                (replace(job, rounds=-(-job.rounds // 2)) if slow and job.real else job),
                precision,
            )


def run(chosen: Any) -> dict[str, Any]:
    """Measure everything."""
    python = interpreter(Path(chosen.venv)).absolute()
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else we are compiled anew at every start
    names, device, rows = list(CONTENDERS), chosen.device, []
    mlp = jobs(device)["mlp"]
    starters = [name for name in names if name != "raw, recording"]
    busiest = os.getloadavg()[0]
    with measure.scratch_folder() as made:
        folder = Path(made)
        show_progress("start-up")
        start = measure.measure_start(
            python, mlp, starters, device, folder, 2 if chosen.quick else 4
        )
        for job, precision in plan(chosen):
            show_progress(f"{job.name} {precision}")
            asked = starters if job.real else names
            results = measure.measure_job(python, job, precision, asked, device, folder)
            rows += [asdict(row) for row in results]
            busiest = max(busiest, os.getloadavg()[0])
        show_progress("where the rest goes")
        paths = measure.profile_steps(python, mlp, "32-true", device, folder)
        profile = profile_table(paths, mlp.steps)
        imported = import_table(measure.import_times(python, mlp, device, folder))
    return {
        "device": device,
        "threads": chosen.threads,
        "start": start,
        "rows": rows,
        "profile": profile,
        "imports": imported,
        "command": f"python -m bench.peers {' '.join(sys.argv[1:])}".strip(),
        "versions": versions(python),
        "load": busiest,
        "commit": commit(),
    }


def show_progress(what: str) -> None:
    """Print what is measured now."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def write_report(results: dict[str, Any]) -> None:
    """Write peers.md and peers.png from the contents of peers.json."""
    result = Result(results)
    threads = f"{results['threads']} thread{'s' if results['threads'] > 1 else ''}"
    parts = {
        "Targets": result.target_lines(),
        "The cost of a step": f"MLP 16-16-4, batch 8.\n\n{result.step_table()}",
        "Realistic jobs": result.real_table(),
        "From exec to the first finished step": result.start_table(),
        "Where the rest goes": "\n\n".join(
            [
                "The cost of a step, µs of CPU time:",
                result.breakdown_table(),
                "Functions whose own time is more than raw's (MLP, 32-true; cProfile, which makes "
                "calls dearer, so the shares count):",
                table(["function", "calls per step", "µs per step over raw"], results["profile"]),
                "Start-up: packages that the runner imports and raw does not:",
                table(["package", "own ms"], results["imports"]),
                "Beside the training process, for the record in MLflow:",
                result.writer_table(),
            ]
        ),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items())
    note = (
        f"Contenders in turn, {threads} each, {os.cpu_count()} cores; {results['versions']}. "
        "Medians (quartiles); over raw: of the differences and ratios round by round."
    )
    if results["load"] > BUSY:
        note += (
            f" **The machine was busy with other work (load average {results['load']:.0f}): wall "
            "times mean nothing, and CPU times are too long.**"
        )
    draw(result, RESULTS / "peers.png")
    write(
        "peers",
        QUESTION,
        f"{note}\n\n![The same as a picture](peers.png)\n\n{body}",
        results["command"],
        results["commit"],
    )


def main() -> None:
    """Measure, unless --render is given, and write the report."""
    chosen = parse_options(
        __doc__,
        quick=False,
        device="cpu",
        jobs=[],
        threads=1,
        venv="outputs/peers-venv",
        render=False,
    )
    path = RESULTS / "peers.json"
    if not chosen.render:
        write_rows(path, run(chosen))
    write_report(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
