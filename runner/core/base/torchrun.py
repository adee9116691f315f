"""Rendezvous of torchrun's processes before Hydra runs.

The main process publishes the run's folder and, after a restart, the checkpoint to resume from, so
that all processes compose the same config.
"""

import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from runner.core.base.errors import ConfigError
from runner.core.base.fmt import override_key, quote_value

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_QUERY_FLAGS = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "--version"}

# Keys of the rendezvous store, with the run's folder.
START_KEY = "runner/begun"
RESUME_KEY = "runner/out"

# How long a process waits for the main one to compose its config and publish the folder.
_STORE_TIMEOUT = timedelta(minutes=10)
_STORE_INTERVAL = timedelta(milliseconds=50)


@dataclass(frozen=True)
class ProcessRank:
    """The rank of this process, as torchrun sets it.

    Attributes:
        index: the rank, from 0 over all machines.
        world_size: number of processes.
        local_rank: from 0, on this machine.
        restart: how often torchrun has restarted all processes.
    """

    index: int = 0
    world_size: int = 1
    local_rank: int = 0
    restart: int = 0

    @property
    def is_main(self) -> bool:
        """Return whether this is the main process, which writes the files of the run."""
        return self.index == 0

    def batch_slice(self, size: int) -> slice:
        """Return this process's slice of a batch.

        The first processes take one example more where the batch does not divide evenly.
        """
        share, remainder = divmod(size, self.world_size)
        start = self.index * share + min(self.index, remainder)
        return slice(start, start + share + (self.index < remainder))

    def batch_share(self, size: int) -> int:
        """Return how many of a batch's examples this process takes."""
        share = self.batch_slice(size)
        return share.stop - share.start


SINGLE_PROCESS = ProcessRank()


class MainRankFailed(Exception):
    """The main process failed before its run started; it has printed why."""


def is_torchrun() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return all(key in os.environ for key in _TORCHRUN_VARIABLES)


def process_rank() -> ProcessRank:
    """Return the rank of this process; of a single process without torchrun."""
    if not is_torchrun():
        return ProcessRank()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"
    return ProcessRank(*(int(os.environ.get(name, 0)) for name in names))


def command_of_rank(argv: Sequence[str]) -> Sequence[str]:
    """Return the command that this process runs.

    All processes run in the folder of the main one; after a restart they resume from its newest
    checkpoint.

    Raises:
        ConfigError: the command is none for several processes.
        MainRankFailed: the main process has failed, and has reported why.
    """
    here = process_rank()
    if here.world_size == 1 and not here.restart:
        return argv
    if not _QUERY_FLAGS.isdisjoint(argv):
        return argv
    if {"-m", "--multirun"} & set(argv):
        raise ConfigError(
            f"torchrun started {here.world_size} processes, and a sweep starts its own. Leave "
            "torchrun out, or leave -m out and type one torchrun command for each job."
        )
    shared = rendezvous_store(here)
    extra = {}
    if here.restart and shared.check([RESUME_KEY]):
        folder = shared.get(RESUME_KEY).decode()
        extra = {"hydra.run.dir": quote_value(folder), "checkpoint.resume": "auto"}
    if not here.is_main:
        if not extra:
            folder = _published_folder(shared)
            if not folder:
                raise MainRankFailed
            extra["hydra.run.dir"] = quote_value(folder)
        # Only the main process writes Hydra's files.
        extra["hydra.output_subdir"] = "null"
    others = [text for text in argv if override_key(text) not in extra]
    published = [f"{key}={value}" for key, value in extra.items()]
    # First: Hydra's parser takes overrides next to each other, and rewrite_arguments has put the
    # flags last.
    return [*published, *others]


def _published_folder(shared: "TCPStore") -> str:
    """Wait until the main process has published its folder; empty if it failed.

    Raises:
        ConfigError: it has not within ten minutes.
    """
    # Asked again and again: a signal is obeyed only between calls of the store.
    for _ in range(_STORE_TIMEOUT // _STORE_INTERVAL):
        if shared.check([START_KEY]):
            return shared.get(START_KEY).decode()
        sleep(_STORE_INTERVAL.total_seconds())
    raise ConfigError(
        f"The main process of the run has not started within {_STORE_TIMEOUT}: see what it said."
    )


def publish(key: str, folder: Path) -> None:
    """Publish a folder of the run to the other processes. Call it in the main process.

    Args:
        key: START_KEY for the folder of the run, with which the other processes begin, or
            RESUME_KEY for the one that the run resumes from after a restart.
        folder: of a run.
    """
    here = process_rank()
    if is_torchrun() and here.is_main:
        rendezvous_store(here).set(key, str(folder.absolute()))


def publish_failure() -> None:
    """Publish that the main process failed, so that the processes that wait for its folder end."""
    here = process_rank()
    if not (is_torchrun() and here.is_main and here.world_size > 1):
        return
    # The process that serves the store may have ended.
    with suppress(RuntimeError):
        if not rendezvous_store(here).check([START_KEY]):
            rendezvous_store(here).set(START_KEY, "")


def claim_message(text: str) -> bool:
    """Return whether this process is the first to print a message, so that it is printed once."""
    here = process_rank()
    if here.world_size == 1:
        return True
    try:
        key = f"runner/{here.restart}/{zlib.crc32(text.encode())}"
        return rendezvous_store(here).add(key, 1) == 1
    except RuntimeError:
        # The process that serves the store has ended: a message twice is better than none.
        return True


@cache
def rendezvous_store(here: ProcessRank) -> "TCPStore":
    """Return torchrun's key-value store, which outlives a process that fails."""
    from torch.distributed import TCPStore

    # torchrun's own process serves the store if it sets this variable; else rank 0 does.
    serves_store = here.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        here.world_size,
        serves_store,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
    )
