"""The processes that torchrun starts for one run, and what they tell each other before any of them
knows its config: in which folder it lies, and where it goes on after a restart."""

import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runner.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHOWS = ("-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "--version")
_BEGUN, _OUT = "runner/begun", "runner/out"
_PATIENCE = timedelta(minutes=10)


class ProcessRank(NamedTuple):
    """Which of how many processes this is, `local` on its machine; restarts of them all so far."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    restart: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes what the run leaves."""
        return self.rank == 0

    def part(self, size: int) -> slice:
        """This process's examples of a batch; the first processes take one more where it does not
        divide."""
        least, more = divmod(size, self.world_size)
        start = self.rank * least + min(self.rank, more)
        return slice(start, start + least + (self.rank < more))

    def examples(self, size: int) -> int:
        """How many of a batch's examples are this process's."""
        part = self.part(size)
        return part.stop - part.start


SINGLE_PROCESS = ProcessRank()


class MainRankFailed(Exception):
    """The first process has ended with an error before its run began."""


def is_torchrun() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process."""
    return all(key in os.environ for key in _NEEDED)


def process_rank() -> ProcessRank:
    """This process's place."""
    if not is_torchrun():
        return ProcessRank()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"
    return ProcessRank(*(int(os.environ.get(name, 0)) for name in names))


def join(argv: Sequence[str]) -> Sequence[str]:
    """The command as this process runs it: all in the folder of the first one, and after a restart
    from its newest checkpoint.

    Raises:
        ConfigError: the command is none for several processes.
        FirstFailed: the first process has ended, and has said why.
    """
    here = process_rank()
    if here.world_size == 1 and not here.restart:
        return argv
    if any(text in _SHOWS for text in argv):
        return argv
    if {"-m", "--multirun"} & set(argv):
        raise ConfigError(
            f"torchrun started {here.world_size} processes, and a sweep starts its own. Leave "
            "torchrun out, or leave -m out and type one torchrun command for each job."
        )
    shared = store(here)
    extra = {}
    if here.restart and shared.check([_OUT]):
        extra = {"hydra.run.dir": shared.get(_OUT).decode(), "checkpoint.resume": "auto"}
    if not here.is_main:
        if not extra:
            folder = shared.get(_BEGUN).decode()  # waits for it
            if not folder:
                raise MainRankFailed
            extra["hydra.run.dir"] = folder
        extra["hydra.output_subdir"] = "null"
    kept = [text for text in argv if text.lstrip("+~").partition("=")[0] not in extra]
    # First: Hydra's parser takes overrides in one piece, and `rewrite` has put the flags last.
    return [*(f"{key}={_quoted(value)}" for key, value in extra.items()), *kept]


def publish_start(folder: Path) -> None:
    """Told by the first process: the others can begin."""
    _tell(_BEGUN, folder)


def publish_failure() -> None:
    """Told by the first process as it ends with an error: those that wait for its folder end."""
    here = process_rank()
    if not (is_torchrun() and here.is_main and here.world_size > 1):
        return
    with suppress(RuntimeError):  # the process that keeps the store is gone
        if not store(here).check([_BEGUN]):
            store(here).set(_BEGUN, "")


def publish_run_folder(folder: Path) -> None:
    """Told by the first process: where the run's checkpoints are."""
    _tell(_OUT, folder)


def claim_message(text: str) -> bool:
    """Whether this process is the first to say it: an error of them all is told once."""
    here = process_rank()
    if here.world_size == 1:
        return True
    try:
        return store(here).add(f"runner/{here.restart}/{zlib.crc32(text.encode())}", 1) == 1
    except RuntimeError:  # the process that keeps the store is gone
        return True


def _tell(key: str, folder: Path) -> None:
    here = process_rank()
    if is_torchrun() and here.is_main:
        store(here).set(key, str(folder.absolute()))


@cache
def store(here: ProcessRank) -> "TCPStore":
    """The store that torchrun keeps, which outlives a process."""
    from torch.distributed import TCPStore

    hosts = here.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        here.world_size,
        hosts,
        timeout=_PATIENCE,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _quoted(value: str) -> str:
    return value if value in ("null", "auto") else "'" + value.replace("'", r"\'") + "'"
