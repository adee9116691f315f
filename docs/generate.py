"""Write the generated tables into README.md and docs/*.md, between their markers.

python docs/generate.py           rewrite
python docs/generate.py --check   exit status 1 if a page is stale
"""

import inspect
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf

from runner.cli.main import option_note
from runner.core import Mode, Room, fmt
from runner.core.base.errors import Unavailable
from runner.core.config.schema import RunSpec
from runner.core.record.metric_names import METRICS
from runner.precision.registry import load_precision, precision_names, yaml_header
from runner.rooms import install_rooms
from runner.tracking.result_table import METRIC_PREFIX, SETTING_PREFIX, table_columns

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CONF = Path(str(files("runner.conf")))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    escaped = [[re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *escaped]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return re.sub(r"(`[^`]*`)|<(?=\w)", lambda match: match[1] or r"\<", text)  # no HTML tags


def every_precision() -> str:
    """Return the table of all precisions."""
    rows = []
    for name in precision_names():
        precision = load_precision(name)
        formats = f"{precision.storage_format} → {precision.compute_format}"
        for words in (" linear weights", " in linear layers", " elsewhere", "; the rest as built"):
            formats = formats.replace(words, "")  # the page says it once
        rows.append([f"`{name}`", formats, needs(name), yaml_header(name)[1]])
    return table(["precision", "stores → computes", "needs", "why"], rows)


def needs(name: str) -> str:
    """Return the hardware that a precision needs, from what its require() says on other devices."""
    unsupported = []
    # torch knows the device `tpu` only with torch_tpu on a TPU, so another object has its type.
    tpu = SimpleNamespace(type="tpu", index=0)
    devices = {"a CPU": torch.device("cpu"), "an Apple GPU": torch.device("mps"), "a TPU": tpu}
    for phrase, device in devices.items():
        try:
            load_precision(name).require(device)
        except Unavailable as error:
            # "needs <hardware>; ..." names what it needs; other messages only refuse the device.
            hardware = error.what.partition("needs ")[2].partition(";")[0]
            if hardware:
                hardware = hardware.replace("an NVIDIA GPU of compute capability ", "NVIDIA ")
                return hardware.replace(" or higher", "+")
            unsupported.append(phrase)
    if not runs_on_turing(name):
        unsupported.append("an NVIDIA GPU before Ampere")
    return f"all but {' or '.join(unsupported)}" if unsupported else "any device"


def runs_on_turing(name: str) -> bool:
    """Return whether require() passes for an NVIDIA GPU of compute capability 7.5."""
    with (
        patch("torch.cuda.get_device_capability", return_value=(7, 5)),
        patch("torch.cuda.get_device_name", return_value="Tesla T4"),
    ):
        try:
            load_precision(name).require(torch.device("cuda"))
        except Unavailable:
            return False
    return True


def optimizers() -> str:
    """Return the table of optimizers' state sizes that bench/low_bit.py measured."""
    results = json.loads((RESULTS / "low_bit.json").read_text())["optimizers"]
    rows = [[f"`{name}`", f"{share:.3f}"] for name, share in results.items()]
    return table(["optimizer", "state"], rows)


def compilation() -> str:
    """Return the table of compiled steps that bench/tuned.py measured."""
    results = json.loads((RESULTS / "tuned.json").read_text())["compilation"]
    return table(results["head"], results["rows"])


def gpu() -> str:
    """Return one line for each machine whose results bench/gpu/run.sh wrote."""
    pages = sorted((RESULTS / "gpu").glob("*.json"))
    if not pages:
        return (
            "**Never run on a GPU.** `bench/gpu/run.sh` runs the GPU tests and measures every "
            "precision; no figures are committed yet."
        )
    lines = []
    for page in pages:
        results = json.loads(page.read_text())
        lines.append(
            f"[{results['device']}](../bench/results/gpu/{page.stem}.md), commit "
            f"{results['commit'][:12]}: {results['tests']}"
        )
    return "\n\n".join(lines)


BEGIN_WITH = ("32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true")
"""Precisions that README.md names first."""
FAMILIES = {"transformer-engine": "`transformer-engine*`", "float8": "`float8-*`, compiled"}
"""Beginnings of names whose measured range stands in one row."""


def first_precisions() -> str:
    """Return what precisions gained in bench/gpu/run.sh and in README.md's sweep."""
    gpu_rows = json.loads((RESULTS / "gpu" / "h200.json").read_text())["gpt"]
    cpu = json.loads((RESULTS / "first_sweep.json").read_text())["answer"]
    compiled = {
        row["width"]: row["tokens_per_second"]
        for row in gpu_rows
        if row["precision"] == "bf16-mixed" and row["compiled"]
    }
    widest = max(compiled)
    rows = []
    for name in BEGIN_WITH:
        speed, memory = "not measured", ""
        for row in gpu_rows:
            if (row["precision"], row["width"], row["compiled"]) == (name, widest, False):
                speed = f"{row['tokens_per_second'] / compiled[widest]:.2f}"
                memory = f"{row['peak_gib']:.0f}"
        ratio = cpu.get(f"answer/speed_ratio/{name}")
        on_cpu = "needs a GPU" if ratio is None else f"{ratio:.2f}"
        rows.append([f"`{name}`", speed, memory, on_cpu, yaml_header(name)[1]])
    for start, title in FAMILIES.items():
        # Eager float8 of torchao is slow: it is there to be compiled.
        found = [
            row
            for row in gpu_rows
            if row["precision"].startswith(start) and (row["compiled"] or start != "float8")
        ]
        ratios = [row["tokens_per_second"] / compiled[row["width"]] for row in found]
        memory = "{:.0f} to {:.0f}".format(*_range([row["peak_gib"] for row in found]))
        speed = "{:.2f} to {:.2f}".format(*_range(ratios))
        rows.append([title, speed, memory, "emulated", "FP8 on Hopper and newer, for wide layers"])
    head = ["precision", "H200, × compiled bf16-mixed", "GiB", "CPU, × 32-true", "why"]
    return table(head, rows)


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def hardware() -> str:
    """Return which commands the GPU suite types, and which have never run on a GPU."""
    sources = [*(ROOT / "tests" / "gpu").glob("*.py"), ROOT / "bench" / "gpu" / "run.sh"]
    typed = "\n".join(path.read_text() for path in sources)
    pages = sorted((RESULTS / "gpu").glob("*.json"))
    gpus = ", ".join(json.loads(page.read_text())["device"] for page in pages)
    words = {"runs and their resume": "", "sweeps": "sweep=", "ddp and fsdp": "strategy="}
    words |= {f"`mode={mode}`": f"mode={mode}" for mode in Mode.all() if mode != "train"}
    lists = {True: [], False: []}
    for what, word in words.items():
        lists[word in typed].append(what)
    return (
        f"On a CPU (in CI): everything. On an {gpus}: {', '.join(lists[True])}. "
        f"Never on a GPU: {', '.join(lists[False])}."
    )


def keys() -> str:
    """Return the table of keys, with the texts of the schema's docstrings."""
    rows = key_rows("", RunSpec())
    for name, kind in Room.all_sections().items():
        if isinstance(kind, str):
            rows.append([f"`{name}`", type_name(str | None), "`null`", kind])
        else:
            rows += key_rows(f"{name}.", kind())
    return table(["key", "type", "default", "meaning"], rows)


def key_rows(prefix: str, spec: Any) -> list[list[str]]:
    """Return a row for each key of a part of the spec; groups, which hold any key, have none."""
    rows = []
    texts = attribute_texts(type(spec))
    for field in fields(spec):
        default = getattr(spec, field.name)
        if is_dataclass(default):
            rows += key_rows(f"{prefix}{field.name}.", default)
        elif prefix or not isinstance(default, dict):  # without a prefix it is a group
            name = f"`{prefix}{field.name}`"
            rows.append([name, type_name(field.type), f"`{yaml(default)}`", texts[field.name]])
    return rows


def type_name(hint: object) -> str:
    """Return the words for a key's type."""
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    return name.replace(" | ", " or ").replace("None", "null").replace("typing.Any", "any")


def yaml(value: object) -> str:
    """Return a value as it is written in YAML, on one line."""
    if isinstance(value, list):
        return fmt.typed_value(value)
    return OmegaConf.to_yaml(OmegaConf.create({"v": value})).removeprefix("v:").strip()


def attribute_texts(cls: type) -> dict[str, str]:
    """Return the entries under "Attributes:" in a class's docstring, each on one line."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
    names, texts = entries[1::2], entries[2::2]
    return {n: " ".join(t.split()).rstrip(".") for n, t in zip(names, texts, strict=True)}


def commands() -> str:
    """Return the table of the commands other than runs, with their arguments."""
    rows = []
    for command in Room.all_commands().values():
        rows.append([f"`{command.name}`", "", command.description.replace("\n", " ")])
        rows += [["", f"`{argument}`", meaning] for argument, meaning in command.rows()]
    return table(["`python -m runner ...`", "argument", "what it does"], rows)


def groups() -> str:
    """Return the table of all options but precisions, with the first line of each one's yaml."""
    rows = []
    for folder in sorted(p for p in CONF.iterdir() if p.is_dir() and list(p.glob("*.yaml"))):
        if folder.name == "precision":
            continue  # docs/precisions.md has a table of them
        for path in sorted(folder.glob("*.yaml")):
            note = option_note(path).partition(": python -m runner ")[0].rstrip(".")
            note = re.sub(r" \([^()]*(?:arXiv|JMLR|, 20\d\d)[^()]*\)", "", note)  # papers
            rows.append([f"`{folder.name}={path.stem}`", note])
    return table(["option", "what it is"], rows)


def metrics() -> str:
    """Return the table of all metrics."""
    return table(["metric", "meaning"], [[f"`{name}`", text] for name, text in METRICS.items()])


def sweep_columns() -> str:
    """Return the table of the columns of report.csv and report.json."""
    rows = [[f"`{name}`", text] for name, text in table_columns([]).items()]
    rows.append([f"`{METRIC_PREFIX}<name>`", "last value of a metric"])
    rows.append([f"`{SETTING_PREFIX}<key>`", "value of a key that the command sets"])
    return table(["column", "meaning"], rows)


TABLES = {
    "every_precision": every_precision,
    "optimizers": optimizers,
    "gpu": gpu,
    "first_precisions": first_precisions,
    "hardware": hardware,
    "commands": commands,
    "keys": keys,
    "groups": groups,
    "metrics": metrics,
    "sweep_columns": sweep_columns,
    "compilation": compilation,
}


def render(text: str) -> str:
    """Return a page with new tables between each `<!-- table:NAME -->` and its `<!-- end -->`."""
    install_rooms()
    for name, make in TABLES.items():
        start, end = f"<!-- table:{name} -->", "<!-- end -->"
        if start in text:
            before, rest = text.split(start, 1)
            text = f"{before}{start}\n{make()}\n{end}{rest.split(end, 1)[1]}"
    return text


def main() -> int:
    """Rewrite stale pages, or with --check only name them."""
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        current = render(text)
        if current != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(current)
    print(f"stale: {', '.join(stale)}" if stale else "every page is up to date")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
