"""Run `runner doctor`: print which precisions run on this machine's devices.

The answers are those of each precision's require(), which a run asks, too.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from runner.config.overrides import config_dir
from runner.precision.registry import supported_precisions, yaml_header
from runner.utils.accelerator import available_kinds, choose_accelerator

# Packages that only some precisions, adapters and TPUs need.
LIBRARIES = ("bitsandbytes", "torchao", "transformer-engine", "peft", "torch_tpu", "torch_xla")


def _installed_version(library: str) -> str:
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"{library} not installed"


def doctor(argv: Sequence[str]) -> int:
    """Print the support table; return the exit status, 2 for arguments that it does not take."""
    console = Console(highlight=False, markup=False)
    folder = config_dir(argv)
    if argv and (folder is None or len(argv) > 2 or not argv[0].startswith("-")):
        text = f"doctor takes no arguments but --config-dir, and was given: {' '.join(argv)}."
        print(f"error: {text} Type doctor.", file=sys.stderr)
        return 2
    if folder is not None and not folder.is_dir():
        text = f"--config-dir={folder} is no folder in {Path.cwd()}."
        print(f"error: {text} Type --config-dir <folder of your configs>.", file=sys.stderr)
        return 2
    console.print(", ".join([f"torch {torch.__version__}", *map(_installed_version, LIBRARIES)]))
    for kind in available_kinds():
        accelerator = choose_accelerator(name=kind)
        table = Table(title=f"accelerator={kind}: {accelerator.name}", title_justify="left")
        for column in ("precision", "runs", "description, or reason and what to type"):
            table.add_column(column, overflow="fold")
        for row in supported_precisions(accelerator.device, folder):
            if row.runs:
                table.add_row(row.name, "yes", yaml_header(row.name, folder)[0])
            else:
                table.add_row(row.name, "no", f"{row.why} {row.remedy}")
        console.print(table)
    return 0
