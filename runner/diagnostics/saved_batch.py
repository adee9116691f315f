"""Save which samples a failed step was given, so that debug=replay can run it again.

Only indices in the training set are written, not the samples themselves. The samples of a stream
have none: a replay trains up to the step once more.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.core import ConfigError, RunContext, files, fmt, layout, secrets
from runner.data.stream_loader import DatasetLoader, samples_of_step

_NO_INDICES = "The train set is a stream, whose samples have no indices to be replayed by."


@dataclass(frozen=True)
class SavedBatch:
    """The content of a saved batch's file that a replay needs.

    Attributes:
        steps: the first and the last step whose samples these are.
        micro_batches: indices in the training set; empty for a stream.
        loss_scale: in force in the step; None for a precision without one.
        seed: of the run; with another one the indices mean other samples.
        begun: the step that the run started or was resumed at; None where the samples are at
            fault, not the numbers, so that the weights of the step do not matter.
        names: of the run's model, data and precision.
        epoch: that the steps are of, from 1; of several steps the first one's.
        first_batch: number of the first micro-batch in its epoch, from 0.
    """

    steps: tuple[int, int]
    micro_batches: list[list[int]]
    loss_scale: float | None
    seed: int
    begun: int | None
    names: Mapping[str, str]
    epoch: int
    first_batch: int


def save_batch(
    run: RunContext,
    loader: DatasetLoader,
    steps: range,
    why: str,
    scale: float | None = None,
    begun: int | None = None,
) -> str:
    """Save the samples of a run's steps in its folder, and upload the file.

    Args:
        run: the run; its command is what a replay repeats.
        loader: yields the training batches.
        steps: whose samples are saved.
        why: what is wrong with them.
        scale: the loss scale in the step.
        begun: see SavedBatch.

    Returns:
        Sentences that say where the samples are, and the command that replays them.
    """
    invocation, spec = run.invocation, run.spec
    # Computed from seed and epoch, as the loader does: no step has a list of its samples.
    samples_of_steps = [samples_of_step(loader, spec.train.accumulate, step) for step in steps]
    micro_batches = [micro for samples in samples_of_steps for micro in samples.micro_batches]
    if not micro_batches and begun is None:
        return _NO_INDICES
    path = run.out / layout.GUARD_FOLDER / f"batch-{steps[0]:06d}.json"
    # The run's own command with debug=replay in place of training: a replay resumes nothing,
    # sweeps nothing and has its own mode.
    dropped = ("debug=", "batch=", "sweep=", "mode=", "checkpoint.")
    words = [word for word in invocation.overrides if not word.lstrip("+~").startswith(dropped)]
    replay = ["debug=replay", f"batch={fmt.relative_path(path)}"]
    command = invocation.command_text([*words, *replay])
    content = {
        "why": why,
        "steps": [steps[0], steps[-1]],
        "epoch": samples_of_steps[0].epoch,
        "first_batch": samples_of_steps[0].first_batch,
        "micro_batches": micro_batches,
        "loss_scale": scale,
        "begun": begun,
        "precision": run.precision.name,
        "model": invocation.option_name("model", spec.model),
        "data": invocation.option_name("data", spec.data),
        "seed": spec.seed,
        "config": str(run.out / layout.CONFIG),
        "replay": command,
    }
    text = json.dumps(secrets.redact_values(content), indent=1)
    # A list of indices on one line: json.dumps gives each number its own.
    text = re.sub(r"\[[\d,\s]+\]", lambda numbers: "".join(numbers[0].split()), text)
    saved = run.save_artifact(
        path, lambda path: files.write_text(path, text + "\n"), layout.GUARD_FOLDER
    )
    if not saved:
        # The file could not be written: the indices are at least in the message.
        return f"The samples are {micro_batches} of the training set." if micro_batches else ""
    subject = "samples are" if micro_batches else "step is"
    return f"The {subject} in {fmt.relative_path(path)}; to see where it begins:\n{command}"


def read_saved_batch(path: Path) -> SavedBatch:
    """Read a file that save_batch wrote.

    Raises:
        ConfigError: the file is missing, or is no saved batch.
    """
    try:
        content: Mapping[str, Any] = files.read_json(path)
        first, last = map(int, content["steps"])
        # Checked here: a negative index would silently take a sample from the end of the set.
        micro_batches = [[_index(i) for i in micro] for micro in content["micro_batches"]]
        if not all(micro_batches):
            raise ValueError("a micro-batch holds no samples")
        scale = content["loss_scale"]
        names = {key: str(content[key]) for key in ("model", "data", "precision")}
        return SavedBatch(
            (first, last),
            micro_batches,
            None if scale is None else float(scale),
            content["seed"],
            content.get("begun"),
            names,
            _index(content.get("epoch", 1)),
            _index(content.get("first_batch", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"batch={path} is no batch that a guard saved ({type(error).__name__}: {error}). "
            f"Type batch=outputs/runs/<time>/{layout.GUARD_FOLDER}/batch-<step>.json."
        ) from error


def _index(value: Any) -> int:
    """Return a sample's index as it is; raise ValueError where it is none that int64 can hold."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value} is no sample's index")
    return value
