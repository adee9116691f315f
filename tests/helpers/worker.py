"""Several processes: run the jobs of a file, {folder: overrides}, one after the other."""

import itertools
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module

from runner.config.invocation import Invocation
from runner.config.overrides import rewrite_arguments
from runner.config.resolve import register_schema, resolve_spec
from runner.distributed import torchrun
from runner.modes.run import run
from runner.utils.errors import RunnerError

torch.set_num_threads(1)
OWN = "tracking._target_=runner.tracking.rank_journal.ProcessJournal"


def counted(folder, rank):
    """Has FSDP's reductions of gradients counted."""
    name = "reduce_scatter_single"  # since torch 2.15
    name = name if hasattr(dist, name) else "reduce_scatter_tensor"
    count, reduce = itertools.count(1), getattr(dist, name)

    def watched(*args, **how):
        (folder / f"reductions-{rank}.txt").write_text(str(next(count)))
        return reduce(*args, **how)

    return mock.patch.object(dist, name, watched)


def job(folder, overrides):
    with initialize_config_module(version_base="1.3", config_module="runner.conf"):
        spec = resolve_spec(
            compose("config", rewrite_arguments(["tracking=none", OWN, *overrides]))
        )
    folder.mkdir(parents=True, exist_ok=True)
    rank = torchrun.process_rank().rank
    try:
        with counted(folder, rank):
            run(spec, folder, Invocation(overrides=tuple(overrides)))
    except RunnerError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))
    except Exception:
        (folder / f"failed-{rank}.txt").write_text(traceback.format_exc())
        raise


def work():
    register_schema()
    for name, typed in json.loads(Path(sys.argv[1]).read_text()).items():
        job(Path(name), typed)


def forked(rank, world, port):
    """A process as torchrun would start it, but for the seconds that its imports take."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if (world := int(sys.argv[2])) == 1:
        work()
        sys.exit()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {forked(rank, world, port) for rank in range(world)}
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:  # the others would wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
