"""Save checkpoints in a process that is killed at random moments, again and again in one folder.

python tests/helpers/killed_saves.py FOLDER KILLS MEBIBYTES
prints {"in_a_write": kills that hit a write, "lost": kills that cost a saved checkpoint}.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from forked_process import run_forked

from runner.core.base.errors import ConfigError
from runner.core.record import checkpoint_file
from runner.tracking import locate
from runner.training.formats.writers import AsyncCheckpointWriter


def killed_saves(folder, env, kills, mebibytes):
    """Run this file as a process, because a test's own threads would not survive its forks."""
    command = [sys.executable, __file__, str(folder), str(kills), str(mebibytes)]
    done = run_forked(command, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def count(folder, kills, mebibytes):
    """Kill a saving process a number of times; return how many kills hit a write or lost a file."""
    tensor = torch.zeros(mebibytes * 2**18)
    in_a_write = lost = 0
    for _ in range(kills):
        saved = kill_while_saving(folder, tensor)
        in_a_write += any(folder.glob("*.partial")) or not saved
        lost += newest_whole_step(folder) < max(saved, default=0)
    return {"in_a_write": in_a_write, "lost": lost}


def kill_while_saving(folder, tensor):
    """Kill a process that saves checkpoints; return the steps that it reported as saved."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        save_forever(folder, tensor, writes)
    os.close(writes)
    time.sleep(random.uniform(0.05, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reads) as reports:
        return [int(line) for line in reports if line.endswith("\n")]


def save_forever(folder, tensor, reports):
    """Save one checkpoint after another, and report each step that is on the disk."""
    writer = AsyncCheckpointWriter(folder, 2, print)
    steps = [int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.pt")]
    step = max(steps, default=0) + 1
    while True:
        writer.save(checkpoint(step, tensor))
        writer.finish()
        os.write(reports, f"{step}\n".encode())
        step += 1


def checkpoint(step, tensor):
    """Return a checkpoint whose every weight is the number of its step."""
    blank = {key: kind() for kind, keys in checkpoint_file._KEYS.items() for key in keys}
    model = {"w": tensor.fill_(step)}
    return {**blank, "format": checkpoint_file.FORMAT, "step": step, "model": model}


def newest_whole_step(folder):
    """Return the step of the newest undamaged checkpoint whose weights are right, or 0."""
    try:
        content = locate.load_newest(str(folder), None, "checkpoint", []).content
    except ConfigError:
        return 0
    is_right = bool((content["model"]["w"] == content["step"]).all())
    return content["step"] if is_right else 0


if __name__ == "__main__":
    random.seed(0)
    torch.set_num_threads(1)
    print(json.dumps(count(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
