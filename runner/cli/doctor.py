"""`runner doctor`: every precision on this machine's devices, from require()."""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from runner.precision.registry import supported_precisions, yaml_header
from runner.utils.accelerator import available_kinds, choose_accelerator

LIBRARIES = ("bitsandbytes", "torchao", "transformer-engine", "peft", "torch_tpu", "torch_xla")


def _found(library: str) -> str:
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"{library} not installed"


def doctor(argv: Sequence[str]) -> int:
    """Print the support table. Exit status 2 for arguments, which it does not take."""
    console = Console(highlight=False, markup=False)
    if argv:
        text = f"doctor takes no arguments, and was given: {' '.join(argv)}."
        print(f"error: {text} Type doctor.", file=sys.stderr)
        return 2
    console.print(", ".join([f"torch {torch.__version__}", *map(_found, LIBRARIES)]))
    for kind in available_kinds():
        accelerator = choose_accelerator(name=kind)
        table = Table(title=f"accelerator={kind}: {accelerator.name}", title_justify="left")
        for column in ("precision", "runs", "what it is, or why not and what to type"):
            table.add_column(column, overflow="fold")
        for row in supported_precisions(accelerator.device):
            text = yaml_header(row.name)[0] if row.runs else f"{row.why} {row.remedy}"
            table.add_row(row.name, "yes" if row.runs else "no", text)
        console.print(table)
    return 0
