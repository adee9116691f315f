"""The samples of a step, saved when something is wrong with it, for debug=replay."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.data.loader import Loader
from runner.data.step_samples import samples_of_step
from runner.utils.errors import ConfigError
from runner.utils.files import write_text
from runner.utils.formatting import relative_path
from runner.utils.layout import GUARD_FOLDER
from runner.utils.secrets import redact_values
from runner.utils.terminal import quote_command

if TYPE_CHECKING:
    from runner.modes.context import RunContext


@dataclass(frozen=True)
class SavedBatch:
    """What a file of samples holds that a replay needs.

    Attributes:
        steps: the first and the last step whose samples these are.
        micro_batches: indices in the training set.
        loss_scale: in force then, None without one.
        seed, data: of the run; with others the indices mean other samples.
        begun: the step from which its run went; None where samples, not numbers, are at fault.
        names: of the run's model, data and precision.
    """

    steps: tuple[int, int]
    micro_batches: list[list[int]]
    loss_scale: float | None
    seed: int
    data: str
    begun: int | None
    names: Mapping[str, str]


def save_batch(
    this: "RunContext",
    loader: Loader,
    step: int,
    why: str,
    scale: float | None = None,
    count: int = 1,
    begun: int | None = None,
) -> str:
    """Save the samples of `count` steps in the run's folder and with its artifacts.

    Args:
        begun: see Kept.

    Returns:
        Where they are, and the command that replays them.
    """
    every = [
        samples_of_step(loader, this.spec.train.accumulate, n) for n in range(step, step + count)
    ]
    path = this.out / GUARD_FOLDER / f"batch-{step:06d}.json"
    command = replay_command(this, path)
    content = {
        "why": why,
        "steps": [step, step + count - 1],
        "epoch": every[0].epoch,
        "micro_batches": [micro for samples in every for micro in samples.micro_batches],
        "loss_scale": scale,
        "begun": begun,
        "precision": this.precision.name,
        "model": this.origin.option_name("model", this.spec.model),
        "data": this.origin.option_name("data", this.spec.data),
        "seed": this.spec.seed,
        "config": str(this.out / "config.yaml"),
        "replay": command,
    }
    text = json.dumps(redact_values(content), indent=1)
    text = re.sub(r"\[[\d,\s]+\]", lambda found: "".join(found[0].split()), text)
    if not this.leave(path, lambda path: write_text(path, text + "\n"), GUARD_FOLDER):
        return f"The samples are {content['micro_batches']} of the training set."
    return f"The samples are in {relative_path(path)}; to see where it begins:\n{command}"


def replay_command(this: "RunContext", path: Path) -> str:
    """The run's own command, replaying instead of training."""
    dropped = ("debug=", "batch=", "sweep=", "mode=", "checkpoint.")
    words = [w for w in this.origin.command if not w.lstrip("+~").startswith(dropped)]
    return quote_command([*words, "debug=replay", f"batch={relative_path(path)}"])


def read_saved_batch(path: Path) -> SavedBatch:
    """A file that keep wrote.

    Raises:
        ConfigError: it is not there, or is none.
    """
    try:
        if not path.is_file():
            raise OSError("no such file")
        content: Mapping[str, Any] = json.loads(path.read_text())
        first, last = map(int, content["steps"])
        micro_batches = [[_index(i) for i in micro] for micro in content["micro_batches"]]
        if not (micro_batches and all(micro_batches)):
            raise ValueError("it holds no samples")
        scale = content["loss_scale"]
        names = {key: str(content[key]) for key in ("model", "data", "precision")}
        return SavedBatch(
            (first, last),
            micro_batches,
            None if scale is None else float(scale),
            content["seed"],
            content["data"],
            content.get("begun"),
            names,
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"batch={path} is no batch that a guard saved ({type(error).__name__}: {error}). "
            f"Type batch=outputs/runs/<time>/{GUARD_FOLDER}/batch-<step>.json."
        ) from error


def _index(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value} is no sample's index")
    return value
