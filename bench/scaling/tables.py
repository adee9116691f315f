"""The tables of docs/scaling.md and bench/results/scaling.md: from scaling.json and the model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.common import RESULTS, median, table
from bench.scaling import predict
from bench.scaling.links import Latency
from bench.scaling.model import KINDS, STRATEGIES, Case, wire
from bench.scaling.predict import ASSUMED, CAPACITY, NETS, US, USABLE, WORLDS, Row

NAMES = {"alone": "one process", "ddp": "DDP", "fsdp": "FSDP"}
FAR = 10**9  # processes, where (N - 1) / N is 1
UNSURE = (("bf16-mixed", "ddp"), ("bf16-mixed", "fsdp"))
FIXED_WORLDS, SEQUENCES = (8, 64, 512), 512


def figures() -> dict[str, Any]:
    return json.loads((RESULTS / "scaling.json").read_text())


def bytes_per_weight() -> str:
    """What each precision takes and sends for one weight; those that are alike in one row."""
    any_net = next(iter(NETS))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, kind in KINDS.items():
        sends = (f"{wire(any_net, kind, s, FAR) / any_net.params:.0f}" for s in STRATEGIES)
        cast = f" + {kind.cast}" if kind.cast else ""
        found = (
            f"{predict.per_parameter(kind)}",
            f"{predict.largest(kind) / 1e9:.1f}",
            f"{4 * kind.stored} / N{cast}",
            *sends,
        )
        rows.setdefault(found, []).append(f"`{name}`")
    head = [
        "precision",
        "DDP holds",
        "DDP's largest, 10^9 weights",
        "FSDP holds",
        "DDP sends",
        "FSDP sends",
    ]
    return table(head, [[", ".join(names), *found] for found, names in rows.items()])


def links() -> str:
    """alpha and bandwidth of each collective over gloo."""
    rows = [
        [
            f"{row['world']}",
            row["kind"].replace("_", "-"),
            f"{row['alpha'] / US:.0f} us",
            f"{1e-9 / row['beta']:.2f} GB/s",
            f"{row['error']:.0%}",
            f"{row['worst']:.0%}",
        ]
        for row in figures()["links"]
    ]
    return table(
        ["processes", "collective", "alpha", "1 / beta", "off by (median)", "at worst"], rows
    )


def tested() -> list[dict[str, Any]]:
    """Steps of several processes that were predicted."""
    return [r for r in figures()["steps"] if r["world"] > 1 and not r["calibrates"]]


def error(row: dict[str, Any], key: str = "predicted") -> float:
    return row[key] / row["measured"] - 1


def steps() -> str:
    """Predicted and measured steps, models and strategies side by side."""
    found = tested()
    sizes = {row["width"]: row["params"] / 1e6 for row in found}
    where = [(strategy, width) for strategy in STRATEGIES for width in sorted(sizes)]
    cells = {
        (
            row["world"],
            row["precision"],
            row["strategy"],
            row["width"],
        ): f"{row['predicted'] * 1e3:.0f} / {row['measured'] * 1e3:.0f} ({error(row):+.0%})"
        for row in found
    }
    lines = [
        [str(world), f"`{name}`", *(cells.get((world, name, s, width), "") for s, width in where)]
        for world, name in dict.fromkeys((row["world"], row["precision"]) for row in found)
    ]
    heads = [f"{NAMES[s]} {sizes[width]:.1f} M" for s, width in where]
    return table(["processes", "precision", *heads], lines)


def every_step() -> str:
    """All that was measured of steps, those that calibrated the host's cost too."""
    rows = [
        [
            str(row["world"]),
            NAMES[row["strategy"]],
            f"`{row['precision']}`",
            f"{row['params'] / 1e6:.2f}",
            *(f"{row[key] * 1e3:.1f}" for key in ("alone", "bare", "predicted", "measured", "cpu")),
            "calibrates" if row["calibrates"] else f"{error(row):+.0%}",
        ]
        for row in figures()["steps"]
    ]
    return table(
        [
            "processes",
            "strategy",
            "precision",
            "10^6 weights",
            "alone beside others",
            "without the host",
            "predicted",
            "measured",
            "measured, CPU",
            "error",
        ],
        rows,
    )


def summary() -> str:
    """Return a sentence on how far off the model was here."""
    found, parts = figures(), []
    for world in sorted({row["world"] for row in tested()}):
        for strategy in STRATEGIES:
            rows = [r for r in tested() if (r["world"], r["strategy"]) == (world, strategy)]
            off, bare = ([abs(error(r, key)) for r in rows] for key in ("predicted", "bare"))
            shown = [f"{value:.0%}" for value in (median(off), max(off), median(bare), max(bare))]
            parts.append([str(world), NAMES[strategy], str(len(rows)), *shown])
    head = [
        "processes",
        "strategy",
        "predictions",
        "off by (median)",
        "at worst",
        "without the host's cost (median)",
        "at worst",
    ]
    where = (
        f"{found['machine']}; load of the machine {found['load']:.1f}; commit {found['commit']}."
    )
    return f"{where}\n\n{table(head, parts)}"


def held() -> str:
    """Predicted and measured memory of a process of two."""
    rows = [
        [
            NAMES[r["strategy"]],
            f"`{r['precision']}`",
            f"{r['predicted'] / 1e6:.0f}",
            f"{r['measured'] / 1e6:.0f}",
            f"{r['predicted'] / r['measured'] - 1:+.0%}",
        ]
        for r in sorted(figures()["memory"], key=lambda r: list(NAMES).index(r["strategy"]))
    ]
    return table(["strategy", "precision", "predicted, MB", "measured, MB", "error"], rows)


def flags() -> str:
    """Return what the flag of a stop costs a step."""
    rows = [
        [world, f"{one['flag'] / US:.0f} us", f"{one['flag twice'] / US:.0f} us"]
        for world, one in figures()["others"].items()
    ]
    return table(["processes", "asked once", "asked twice in a row"], rows)


def assumed() -> str:
    return table(["what", "value", "on whose word"], [list(source) for source in ASSUMED])


def cell(row: Row, strategy: str, world: int) -> str:
    step = row.steps[strategy, world]
    if not row.fits(strategy, world):
        return "does not fit"
    share = step.collectives / step.total
    return f"{step.total * 1e3:.0f} ({row.alone / step.total:.0%}, {share:.0%})"


def times() -> str:
    """Predicted milliseconds, efficiency, collectives against the step, and gigabytes."""
    where = [(s, n) for s in STRATEGIES for n in WORLDS]
    rows = []
    for row in predict.rows():
        sizes = [row.bytes["ddp", 8], *(row.bytes["fsdp", n] for n in (8, 1024))]
        rows.append(
            [
                row.net.name,
                f"`{row.precision}`",
                f"{row.alone * 1e3:.0f}",
                *(cell(row, s, n) for s, n in where),
                *(f"{size / 1e9:.0f}" for size in sizes),
            ]
        )
    heads = [f"{NAMES[s]} {n}" for s, n in where]
    return table(["model", "precision", "one", *heads, "GB, DDP", "FSDP 8", "FSDP 1024"], rows)


def same_command() -> str:
    """Return the table of one train.batch_size on more and more devices."""
    lines, where = [], [(s, n) for s in STRATEGIES for n in FIXED_WORLDS]
    for net in [net for net in NETS if net.name in ("GPT-2 124M", "GPT 1.3B")]:
        for precision in ("bf16-mixed", "bf16-true"):
            whole = sum(predict.work(net, precision, SEQUENCES))
            line = [net.name, f"`{precision}`"]
            for strategy, world in where:
                part = SEQUENCES / world
                step = predict.predict(net, precision, strategy, world, part)
                full = predict.taken(net, precision, strategy, world, part) > CAPACITY * USABLE
                at = f"{step.total * 1e3:.0f} ({whole / world / step.total:.0%})"
                line.append("does not fit" if full else at)
            lines.append(line)
    return table(["model", "precision", *(f"{NAMES[s]} {n}" for s, n in where)], lines)


def sure() -> str:
    """Efficiency on 1024 devices if an assumption is off."""
    whole, rows = predict.CLUSTER, []
    slow = replace(whole, share=whole.share / 2)
    late = replace(
        whole,
        ring=Latency(*(2 * t for t in whole.ring)),
        tree=Latency(*(2 * t for t in whole.tree)),
    )
    for net in NETS:
        for precision, strategy in UNSURE:
            kind, cells = KINDS[precision], []
            work = predict.work(net, precision, NETS[net])
            for cluster, overlaps in ((whole, True), (slow, True), (late, True), (whole, False)):
                case = Case(net, kind, work, replace(cluster, world=1024), predict.SPEED, overlaps)
                cells.append(f"{sum(work) / STRATEGIES[strategy](case).total:.0%}")
            rows.append([net.name, f"`{precision}`", NAMES[strategy], *cells])
    return table(
        [
            "model",
            "precision",
            "strategy",
            "as assumed",
            "half the bandwidth",
            "twice the latency",
            "no overlap",
        ],
        rows,
    )


TABLES = {
    "scaling_bytes": bytes_per_weight,
    "scaling_times": times,
    "scaling_same": same_command,
    "scaling_sure": sure,
    "scaling_summary": summary,
    "scaling_steps": steps,
    "scaling_memory": held,
    "scaling_assumed": assumed,
}


def page() -> str:
    """bench/results/scaling.md: what was measured, and against what was predicted."""
    parts: Sequence[tuple[str, str]] = [
        ("Does the model of docs/scaling.md hold on this machine?", summary()),
        ("Steps, ms; CPU: of all threads of the slowest process", every_step()),
        ("Collectives over gloo: alpha + beta x bytes", links()),
        ("Memory of one of two processes", held()),
        ("The flag of a stop", flags()),
    ]
    title, *heads = [f"{'##' if i else '#'} {head}" for i, (head, _) in enumerate(parts)]
    title += "\n\n`python -m bench.scaling.measure`; the model: [docs](../../docs/scaling.md)."
    texts = [f"{head}\n\n{text}" for head, (_, text) in zip([title, *heads], parts, strict=True)]
    return "\n\n".join(texts) + "\n"
