"""Does a process that is killed while it saves ever cost the checkpoint before?

    python -m bench.kill_saves [--kills 200] [--megabytes 16] [--dry]

A process saves one checkpoint after another through the runner's own Saver and is killed with
SIGKILL at a random moment, again and again in the same folder. After each kill the newest whole
checkpoint must be the last one that was reported as written, or a later one. Beside it, the same
with torch.save to one file, as scripts do. Writes bench/results/kill_saves.md; --dry prints only.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.common import table, write
from runner.checkpoint import checkpoint_file, locate
from runner.checkpoint.async_writer import AsyncCheckpointWriter
from runner.utils.errors import ConfigError

Save = Callable[[int], None]


def contents(step: int, tensor: torch.Tensor) -> dict[str, object]:
    rest = {key: kind() for key, kind in checkpoint_file._KEY_TYPES.items()}
    model = {"w": tensor.fill_(step)}
    return {**rest, "format": checkpoint_file.FORMAT, "step": step, "model": model}


def ours(folder: Path, tensor: torch.Tensor, told: int) -> None:
    """Saves without end; writes the number of each checkpoint that is on the disk to `told`."""
    saver, step = AsyncCheckpointWriter(folder, 2, print), first_free(folder)
    while True:
        saver.save(contents(step, tensor))
        saver.finish()
        os.write(told, f"{step}\n".encode())
        step += 1


def plain(folder: Path, tensor: torch.Tensor, told: int) -> None:
    """Save without end with `torch.save(state, "last.pt")`, as after each epoch."""
    step = 1
    while True:
        torch.save(contents(step, tensor), folder / "last.pt")
        os.write(told, f"{step}\n".encode())
        step += 1


def first_free(folder: Path) -> int:
    found = sorted(folder.glob("step-*.pt"))
    return int(found[-1].stem.removeprefix("step-")) + 1 if found else 1


def whole_ours(folder: Path) -> int:
    """Step of the newest whole checkpoint, 0 without one; its numbers are checked, too."""
    try:
        content = locate.load_newest(str(folder), None, "checkpoint", []).content
    except ConfigError:
        return 0
    weight = content["model"]["w"]
    return content["step"] if bool((weight == content["step"]).all()) else 0


def whole_plain(folder: Path) -> int:
    try:
        content = torch.load(folder / "last.pt", weights_only=True)
        return content["step"] if bool((content["model"]["w"] == content["step"]).all()) else 0
    except Exception:
        return 0


def killed(
    save: Callable[[Path, torch.Tensor, int], None],
    whole: Callable[[Path], int],
    folder: Path,
    kills: int,
    megabytes: int,
) -> tuple[int, int]:
    """Return how many kills hit a save, and how many of them lost the earlier checkpoint."""
    tensor = torch.zeros(megabytes * 2**18)
    hit = torn = 0
    for _ in range(kills):
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            save(folder, tensor, writes)
        os.close(writes)
        time.sleep(random.uniform(0.05, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reads) as told:
            saved = [int(line) for line in told if line.endswith("\n")]
        hit += any(folder.glob("*.partial")) or not saved
        torn += whole(folder) < (saved[-1] if saved else 0)
        if save is plain:
            shutil.rmtree(folder)
            folder.mkdir()
    return hit, torn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    random.seed(0)
    torch.set_num_threads(1)
    rows = []
    for name, save, whole in (
        ("this runner", ours, whole_ours),
        ("torch.save", plain, whole_plain),
    ):
        folder = Path(tempfile.mkdtemp())
        hit, torn = killed(save, whole, folder, args.kills, args.megabytes)
        shutil.rmtree(folder)
        rows.append([name, str(args.kills), str(hit) if save is ours else "", str(torn)])
    body = table(["saved by", "kills", "of them while a file was written", "good ones lost"], rows)
    if args.dry:
        print(body)
    else:
        note = f"Checkpoints of {args.megabytes} MiB."
        write("kill_saves", "Kills during saves", f"{note}\n\n{body}")


if __name__ == "__main__":
    main()
