"""Handle signals and failures of torch's loading processes.

torch raises errors of several types and lengths where a process's data set raises or the process
dies. `worker_failure` turns them into one sentence.
"""

import atexit
import os
import re
import resource
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import active_children
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakKeyDictionary

from torch.multiprocessing import set_sharing_strategy
from torch.utils.data import _utils

from runner.core import RunContext, errors, stop_signals

PREFETCH = 2  # batches that each process loads ahead: torch's default
_DATASET_RAISED = re.compile(r"in DataLoader worker process \d+")
_DEATH_DELAY = 10.0  # seconds between a broken connection and the end of its process, at most


def _open_files_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def init_worker(worker: int) -> None:
    """Make a loading process ignore stop signals; torch calls this when the process starts.

    A signal to every process of a group must not take the next batch from a run that finishes its
    step. A second SIGTERM, which torch sends, ends a process that hangs.
    """
    # A batch of many tensors would take more files than a low limit allows, and torch's thread that
    # sends it would drop it.
    if _open_files_limit() < 1024:  # the usual one
        set_sharing_strategy("file_system")
    signal.set_wakeup_fd(-1)  # the run's, which the fork has copied
    stop_signals.ignore_signals()
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


_started: MutableMapping[Any, int] = WeakKeyDictionary()
"""The loading processes, and the number of the process that has started each."""


@atexit.register
def _end_processes_at_exit() -> None:
    """End the loading processes that an error has left when the interpreter exits.

    multiprocessing would send each of them one SIGTERM and wait for ever: they end at a second one.
    """
    # A fork of this process knows its loading processes, too, and must leave them alone.
    running = [process for process in active_children() if _started.get(process) == os.getpid()]
    if running:
        # torch's handler would raise an error for each of them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in running:
        process.kill()


def wait_for_batch(
    loader: Iterable[Any], wait_context: Callable[[], AbstractContextManager[object]]
) -> Iterator[Any]:
    """Yield a loader's batches, with a context around each wait for one.

    The start is such a wait too: it waits for what processes still load of an earlier epoch that
    was not iterated to its end.

    Args:
        loader: torch's DataLoader.
        wait_context: makes the context.
    """
    batches: Iterator[Any] | None = None
    while True:
        try:
            with wait_context():
                if batches is None:
                    batches = iter(loader)
                    _started.update(dict.fromkeys(getattr(batches, "_workers", ()), os.getpid()))
                batch = next(batches, None)
        except stop_signals.Stopped:
            # Seconds that torch waits for each process that hangs, when it ends them.
            _utils.MP_STATUS_CHECK_INTERVAL = 0.1
            raise
        except Exception as error:
            # Now: the garbage collector, which ends the error's frames, closes the queues first.
            # Then no process hears that it should end, and torch waits 10 s for them.
            # Where a process died torch would forget it, and not report its signal.
            if batches is not None and is_dataset_error(error):
                batches._shutdown_workers()  # type: ignore[attr-defined]
            raise
        if batch is None:
            return
        yield batch


def is_dataset_error(error: BaseException) -> bool:
    """Return whether a data set raised an error in a loading process.

    Such an error belongs to the batch that is waited for; a dead process may have been loading a
    later one.
    """
    return bool(_DATASET_RAISED.search(str(error)))


def is_process_death(error: BaseException) -> bool:
    """Return whether torch reports by an error that a loading process died."""
    return "DataLoader worker (pid" in str(error)


def worker_failure(error: BaseException) -> str | None:
    """Return why a loading process failed; None where the error is not a loading process's."""
    text = str(error)
    if "Too many open files" in text or "items of ancdata" in text:
        return (
            f"each tensor takes an open file, and the shell allows {_open_files_limit()}. Type "
            "ulimit -n 4096 before the command, or train.num_workers=0"
        )
    if is_dataset_error(error):
        # The last line of the process's traceback: the error's type and message.
        return text.strip().splitlines()[-1].rstrip(".")
    if is_process_death(error):
        return text.partition(". ")[0].rstrip(".")
    # Raised while the main process fetched a loaded batch.
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, OSError | EOFError) and "_try_get_data" in functions:
        return _death_of_worker() or f"it died ({type(error).__name__})"
    return None


def _death_of_worker() -> str | None:
    """Wait for a loading process of this process to end, and return how it did, as torch says it;
    None where all live on.

    torch's SIGCHLD handler may raise meanwhile, wherever the main thread is, or may have been
    called already, inside a function that ignores errors.
    """
    workers = [worker for worker, starter in _started.items() if starter == os.getpid()]
    try:
        # Workers of earlier epochs have ended with status 0.
        running = {worker.sentinel: worker for worker in workers if worker.exitcode is None}
        if not any(worker.exitcode for worker in workers):
            for sentinel in wait([*running], _DEATH_DELAY):
                running[sentinel].join(_DEATH_DELAY)  # its connection ends before the process
        for worker in workers:
            code = worker.exitcode
            if code:
                end = f"exited unexpectedly with exit code {code}"
                if code < 0:
                    end = f"is killed by signal: {signal.strsignal(-code)}"
                return f"DataLoader worker (pid {worker.pid}) {end}"
    except RuntimeError as error:
        return worker_failure(error)
    return None


@contextmanager
def explain_dead_workers(run: RunContext, split: str) -> Iterator[None]:
    """Return the context around a check of a split, in which a dead worker is a DataError."""
    try:
        yield
    except Exception as error:
        reason = worker_failure(error)
        if reason is None:
            raise
        text = worker_message(reason, f"the {split} set's first batches")
        raise errors.DataError(f"{text}\n{run.save_traceback()}".rstrip()) from error


def worker_message(reason: str, what: str) -> str:
    """Return a message for a process that loads data and died or raised."""
    return (
        f"A process that loads {what} failed: {reason}.\n"
        "Try train.num_workers=0 to see it in the main process, or fewer processes."
    )
