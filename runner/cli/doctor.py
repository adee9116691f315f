"""Run `runner doctor`: print which precisions run on this machine's devices.

The answers are those of each precision's require(), which a run asks, too.
"""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from runner import __version__
from runner.config.overrides import existing_config_dir
from runner.core import accelerators, run_context
from runner.planning.measured_device import measure_device, write_device
from runner.precision.measured_speeds import SOURCES, speed_text
from runner.precision.registry import supported_precisions, yaml_header

# Packages that only some precisions, adapters and TPUs need.
LIBRARIES = ("bitsandbytes", "torchao", "transformer-engine", "peft", "torch_tpu")


def doctor(config_dir: str | None = None, measures: bool = False) -> int:
    """Print the support table and return the exit status.

    Args:
        config_dir: folder of the user's own configs, whose precisions are listed, too.
        measures: measure the devices, and write them to the folder, or the working directory.

    Raises:
        ConfigError: the folder does not exist.
    """
    folder = None if config_dir is None else existing_config_dir(config_dir)
    console = Console(highlight=False, markup=False)
    installed = [f"runner {__version__}", f"torch {torch.__version__}"]
    installed += [
        f"{name} {run_context.installed_version(name) or 'not installed'}" for name in LIBRARIES
    ]
    console.print(", ".join(installed))
    for kind in accelerators.available_kinds():
        accelerator = accelerators.choose_accelerator(name=kind)
        table = Table(title=f"accelerator={kind}: {accelerator.name}", title_justify="left")
        for column in ("precision", "runs", "description, or reason and what to type"):
            table.add_column(column, overflow="fold")
        names_by_need: dict[str, list[str]] = {}
        for row in supported_precisions(accelerator.device, folder):
            if row.runs:
                speed = speed_text(row.name, accelerator.name)
                table.add_row(row.name, "yes", yaml_header(row.name, folder)[0] + speed)
            else:
                need = f"{row.why} {row.remedy}".removeprefix(f"precision={row.name} ")
                names_by_need.setdefault(need, []).append(row.name)
        for need, names in names_by_need.items():
            table.add_row("\n".join(names), "no", need)
        table.caption = SOURCES.get(accelerator.name)
        console.print(table)
        if measures:
            path = Path(folder or ".", "device", f"my-{kind}.yaml")
            card = measure_device(accelerator)
            write_device(path, card)
            rates = ", ".join(f"{name} {rate:.3g}" for name, rate in card.tflops.items())
            console.print(
                f"{path}: {card.bandwidth:.0f} GB/s; TFLOP/s: {rates}. Type --config-dir "
                f"{path.parent.parent} mode=plan device=my-{kind}.",
                soft_wrap=True,
            )
    return 0
