"""Writes the generated tables into README.md and docs/*.md, between their markers.

python docs/generate.py           rewrite
python docs/generate.py --check   exit status 1 if a page is stale
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from unittest.mock import patch

import torch
from omegaconf import OmegaConf

from runner.config.schema import RunSpec
from runner.precision.registry import load_precision, precision_names, yaml_header
from runner.tracking.metric_names import METRICS
from runner.utils.errors import Unavailable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # bench/ is in the checkout only
RESULTS = ROOT / "bench" / "results"
CONF = Path(str(files("runner.conf")))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def precisions() -> str:
    rows = []
    for name in precision_names():
        p = load_precision(name)
        scale = p.scale(torch.device("cpu")).value
        text = "none" if scale is None else f"dynamic, from {scale.item():g}"
        rows.append([f"`{name}`", p.stores, p.computes, text, needs(name), yaml_header(name)[1]])
    head = ["precision", "stores", "computes", "loss scale", "needs", "why"]
    return table(head, rows)


def needs(name: str) -> str:
    """The hardware that require() asks for where there is only a CPU, an Apple GPU or a TPU."""
    lacking = []
    for kind, called in (("cpu", "a CPU"), ("mps", "an Apple GPU"), ("xla", "a TPU")):
        try:
            load_precision(name).require(torch.device(kind))
        except Unavailable as error:
            if found := error.what.partition("needs ")[2].partition(";")[0].removeprefix("an "):
                return found
            lacking.append(called)
    if not runs_on_turing(name):
        lacking.append("an NVIDIA GPU before Ampere")
    return f"any device but {' or '.join(lacking)}" if lacking else "any device"


def runs_on_turing(name: str) -> bool:
    """Whether require() passes for an NVIDIA GPU of compute capability 7.5."""
    with (
        patch("torch.cuda.get_device_capability", return_value=(7, 5)),
        patch("torch.cuda.get_device_name", return_value="Tesla T4"),
    ):
        try:
            load_precision(name).require(torch.device("cuda"))
        except Unavailable:
            return False
    return True


def measured() -> str:
    """What bench/low_bit.py measured."""
    found = json.loads((RESULTS / "low_bit.json").read_text())["precisions"]
    rows = [
        [
            f"`{name}`",
            f"{row['weights']:.3f}",
            f"{row['error']:.1e}",
            f"{row['step']:.2f}" if row["step"] else "emulated",
        ]
        for name, row in found.items()
    ]
    head = ["precision", "weights' bytes", "error of a product", "time of a training step"]
    return table(head, rows)


def optimizers() -> str:
    found = json.loads((RESULTS / "low_bit.json").read_text())["optimizers"]
    return table(["optimizer", "state"], [[f"`{k}`", f"{v:.3f}"] for k, v in found.items()])


def tuned(part: str) -> str:
    """What bench/tuned.py measured."""
    found = json.loads((RESULTS / "tuned.json").read_text())[part]
    return table(found["head"], found["rows"])


def memory_plan() -> str:
    """What bench/memory_plan.py measured."""
    found = json.loads((RESULTS / "memory_plan.json").read_text())
    return table(found["head"], found["rows"])


def gpu() -> str:
    """What bench/gpu/run.sh left under bench/results/gpu/."""
    pages = sorted((RESULTS / "gpu").glob("*.json"))
    if not pages:
        return (
            "**Never run on a GPU.** `bench/gpu/run.sh` runs the GPU tests and measures every "
            "precision; no figures are committed yet."
        )
    lines = []
    for page in pages:
        found = json.loads(page.read_text())
        lines.append(
            f"[{found['device']}](../bench/results/gpu/{page.stem}.md), commit "
            f"{found['commit'][:12]}: {found['tests']}"
        )
    return "\n\n".join(lines)


def keys() -> str:
    rows = []
    for part in fields(RunSpec):
        value = getattr(RunSpec(), part.name)
        if is_dataclass(value):
            notes = attributes(type(value))
            for field in fields(value):
                default = getattr(value, field.name)
                note = notes.get(field.name, "")
                name = f"`{part.name}.{field.name}`"
                rows.append([name, kind(field.type), f"`{yaml(default)}`", note])
        elif not isinstance(value, dict):
            rows.append([f"`{part.name}`", kind(part.type), f"`{yaml(value)}`", TOP[part.name]])
    return table(["key", "type", "default", "meaning"], rows)


TOP = {
    "mode": "train, evaluate, plan or replay",
    "batch": "what debug=replay replays: a batch that a guard saved",
    "seed": "of Python, NumPy and torch, and of the order of the training data",
    "deterministic": "refuse operations whose result can differ between runs",
}


def kind(hint: object) -> str:
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    return name.replace(" | ", " or ").replace("None", "null").replace("typing.Any", "any")


def yaml(value: object) -> str:
    return OmegaConf.to_yaml(OmegaConf.create({"v": value})).removeprefix("v:").strip()


def attributes(of: type) -> dict[str, str]:
    """`name: text` entries of a class's docstring, continuation lines joined."""
    notes: dict[str, str] = {}
    text = " ".join((of.__doc__ or "").split())
    known = [field.name for field in fields(of)]
    spots = sorted((text.index(f"{k}: "), k) for k in known if f"{k}: " in text)
    for (start, key), end in zip(spots, [*[s for s, _ in spots[1:]], len(text)], strict=False):
        notes[key] = text[start + len(key) + 2 : end].strip(" ;.")
    return notes


def groups() -> str:
    rows = []
    for folder in sorted(p for p in CONF.iterdir() if p.is_dir() and list(p.glob("*.yaml"))):
        for path in sorted(folder.glob("*.yaml")):
            lines = [line for line in path.read_text().splitlines() if line.startswith("#")]
            note = next(line.lstrip("# ") for line in lines if "@package" not in line)
            rows.append([f"`{folder.name}={path.stem}`", note])
    return table(["option", "what it is"], rows)


def metrics() -> str:
    return table(["metric", "meaning"], [[f"`{name}`", text] for name, text in METRICS.items()])


TUNED = ("compilation", "checkpointing", "loading", "optimizers", "memory_format", "cross_entropy")
TABLES = {
    "precisions": precisions,
    "measured": measured,
    "optimizers": optimizers,
    "memory_plan": memory_plan,
    "gpu": gpu,
    "keys": keys,
    "groups": groups,
    "metrics": metrics,
    **{f"tuned-{part}": partial(tuned, part) for part in TUNED},
}


def render(text: str) -> str:
    """The page with every table between `<!-- table:NAME -->` and `<!-- end -->` made anew."""
    from bench.scaling.tables import TABLES as SCALING

    for name, make in (TABLES | SCALING).items():
        start, end = f"<!-- table:{name} -->", "<!-- end -->"
        if start in text:
            before, rest = text.split(start, 1)
            text = f"{before}{start}\n{make()}\n{end}{rest.split(end, 1)[1]}"
    return text


def main() -> int:
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        if (made := render(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(made)
    print(f"stale: {', '.join(stale)}" if stale else "every page is up to date")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
