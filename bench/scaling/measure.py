"""Does the model of docs/scaling.md hold on this machine?

python -m bench.scaling.measure   some minutes; writes bench/results/scaling.json and scaling.md

Calibrated are collectives by size, copies into new memory, the forward and backward and the update
of one process alone while the others compute, and, on the smallest model, what a strategy's own
host code takes. Predicted and compared are steps of the runner's loop on the larger models. 1, 2
and 4 processes over gloo, one thread each; contenders in turn, medians.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.common import RESULTS, commit, machine, median
from bench.scaling.links import Measured
from bench.scaling.model import KINDS, STRATEGIES, Case, Net, Work, memory
from bench.scaling.worker import CONTEXT, COPIED, EXAMPLES, SIZES, VOCABULARY

ROOT = Path(__file__).parents[2]
SMALL = (32, 4)
PLAN = {1: (SMALL, (256, 4)), 2: (SMALL, (128, 4), (256, 4), (384, 4)), 4: (SMALL, (256, 4))}
ROUNDS = {1: 3, 2: 5, 4: 3}
MEMORY = (512, 4)
LINKED = ("all_reduce", "all_gather", "reduce_scatter")


def launch(world: int, rounds: int, sizes: Sequence[tuple[int, int]], **env: str) -> dict[str, Any]:
    """Return what bench/scaling/worker.py measures with a number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        chosen = [f"{width},{layers}" for width, layers in sizes]
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={world}",
                "-m",
                "bench.scaling.worker",
                str(file),
                str(rounds),
                *chosen,
            ],
            env=os.environ | own,
            cwd=ROOT,
            check=True,
            timeout=600,
        )
        return json.loads(file.read_text())


class Fit(NamedTuple):
    """alpha + beta x bytes."""

    alpha: float
    beta: float

    def __call__(self, size: float) -> float:
        return self.alpha + self.beta * size


def walls(times: Sequence[Sequence[float]]) -> float:
    return median([wall for wall, _ in times])


def fit(points: Mapping[float, float]) -> Fit:
    """alpha + beta x size through medians by size, by least squares of the relative errors, with
    neither below 0."""
    a = b = c = d = e = 0.0
    for size, seconds in points.items():
        w = seconds**-2
        a, b, c = a + w, b + w * size, c + w * size**2
        d, e = d + w * seconds, e + w * size * seconds
    beta = (a * e - b * d) / (a * c - b * b)
    if not 0 < beta < e / c:
        return Fit(0.0, e / c)
    return Fit((d - b * beta) / a, beta)


def links(times: Mapping[str, Any], world: int) -> Measured:
    return Measured(
        world, {kind: {size: walls(times[f"{kind} {size}"]) for size in SIZES} for kind in LINKED}
    )


def pooled(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the timings of links and copies, of all models together."""
    every = [row["links"] for row in found["steps"]]
    return {key: [one for times in every for one in times[key]] for key in every[0]}


def net_of(row: Mapping[str, Any]) -> Net:
    """Return the model that was timed; its activations as bench/scaling/predict.py counts them."""
    layers, width = row["layers"], row["width"]
    root = row["params"] - layers * row["block"]
    kept = (
        CONTEXT * (15 * layers * width + VOCABULARY),
        CONTEXT * 2 * layers * width,
        CONTEXT * 2 * VOCABULARY,
    )
    return Net(f"GPT {width}", layers, row["block"], root, 0.0, kept)


def predicted(row: Mapping[str, Any], strategy: str, world: int) -> float:
    """Seconds of a step; nothing overlaps, as gloo works on the cores that compute."""
    copies = 2 * COPIED / walls(row["links"]["copy"])
    passes, alone = walls(row["times"]["passes"]), walls(row["times"]["alone"])
    work = Work(passes / 3, passes * 2 / 3, max(alone - passes, 0.0))
    kind = KINDS[row["precision"]]
    return STRATEGIES[strategy](
        Case(net_of(row), kind, work, links(row["links"], world), copies, False)
    ).total


def compare(world: int, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Prediction and measurement of each model, precision and strategy; host: what the smallest
    model took above the prediction, which is added to the larger ones'."""
    rows, host = [], {}
    for row in found["steps"]:
        for strategy in STRATEGIES:
            said = predicted(row, strategy, world)
            key, seen = (row["precision"], strategy), walls(row["times"][strategy])
            small = (row["width"], row["layers"]) == SMALL
            if small:
                host[key] = max(seen - said, 0.0)
            rows.append(
                {
                    "world": world,
                    "strategy": strategy,
                    "precision": row["precision"],
                    "width": row["width"],
                    "params": row["params"],
                    "calibrates": small,
                    "alone": walls(row["times"]["alone"]),
                    "bare": said,
                    "host": host[key],
                    "predicted": said + host[key],
                    "measured": seen,
                    "cpu": median([cpu for _, cpu in row["times"][strategy]]),
                }
            )
    return rows


def weigh(found: Mapping[str, float]) -> list[dict[str, Any]]:
    """Predicted and measured bytes of a process of two."""
    width, layers = MEMORY
    block = 12 * width**2 + 13 * width
    params = layers * block + (VOCABULARY + CONTEXT) * width + 2 * width
    net = net_of({"layers": layers, "width": width, "params": params, "block": block})
    rows = []
    for key, measured in found.items():
        precision, strategy = key.split()
        said = memory(net, KINDS[precision], strategy, 2, EXAMPLES)
        rows.append(
            {
                "precision": precision,
                "strategy": strategy,
                "predicted": sum(said.values()),
                "measured": measured,
                "params": params,
            }
        )
    return rows


def lines(world: int, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """alpha and beta of each collective, and how far that line is from what was timed."""
    rows = []
    for kind, seen in links(pooled(found), world).times.items():
        line = fit(seen)
        off = [abs(line(size) / seconds - 1) for size, seconds in seen.items()]
        rows.append(
            {
                "world": world,
                "kind": kind,
                "alpha": line.alpha,
                "beta": line.beta,
                "error": median(off),
                "worst": max(off),
                "seconds": seen,
            }
        )
    return rows


def main() -> None:
    torch.set_num_threads(1)  # as each process does: machine() reports it
    found = {world: launch(world, ROUNDS[world], sizes) for world, sizes in PLAN.items()}
    held = launch(2, 0, [MEMORY], MALLOC_MMAP_THRESHOLD_="65536")
    flags = ("flag", "flag twice", "copy")
    figures = {
        "machine": machine(),
        "load": os.getloadavg()[1],
        "commit": commit(),
        "links": [row for world in (2, 4) for row in lines(world, found[world])],
        "steps": [row for world, one in found.items() for row in compare(world, one)],
        "memory": weigh(held["memory"]),
        "others": {str(w): {k: walls(pooled(one)[k]) for k in flags} for w, one in found.items()},
    }
    (RESULTS / "scaling.json").write_text(json.dumps(figures, indent=1) + "\n")
    from bench.scaling.tables import page

    (RESULTS / "scaling.md").write_text(page())


if __name__ == "__main__":
    main()
