"""torch's loading processes: how they and the wait for them end, and what torch raises when one
raises or dies, in one sentence."""

import re
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from time import sleep
from typing import Any

from torch.utils.data import _utils

from runner.utils.stop_signals import Stopped, ignore_signals

PREFETCH = 2  # batches that each process loads ahead
_RAISED = re.compile(r"in DataLoader worker process \d+")
_DIED = re.compile(r"DataLoader worker \(pid")
_LATE = 2.0  # seconds that the death of a process may be told after its connection broke


def keep_alive(worker: int) -> None:
    """In a loading process: a signal to every process must not take the run's next batch from it.
    A second SIGTERM, torch's own, ends one that hangs."""
    signal.set_wakeup_fd(-1)  # the run's
    ignore_signals()
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def wait_for_batch(
    loader: Iterable[Any], waiting: Callable[[], AbstractContextManager[object]]
) -> Iterator[Any]:
    """A loader's batches, with a context around each wait for one, and around its start, which
    waits for what processes still load of an epoch that was left."""
    batches: Iterator[Any] | None = None
    while True:
        try:
            with waiting():
                batches = batches or iter(loader)
                batch = next(batches, None)
        except Stopped:
            _utils.MP_STATUS_CHECK_INTERVAL = 0.1  # seconds that torch waits for each that hangs
            raise
        if batch is None:
            return
        yield batch


def original_error(error: BaseException) -> bool:
    """Whether a data set raised it in a process, which so is that of the batch awaited."""
    return bool(_RAISED.search(str(error)))


def worker_failure(error: BaseException) -> str | None:
    """Why a process failed; None where the error is not a process's."""
    text = str(error)
    if original_error(error):
        return text.strip().splitlines()[-1].rstrip(".")
    if _DIED.search(text):
        return text.partition(". ")[0].rstrip(".")
    if isinstance(error, OSError | EOFError) and _from_dataloader(error):
        return _told_late() or f"it died ({type(error).__name__})"
    return None


def _told_late() -> str | None:
    """torch learns of a death from SIGCHLD, whose handler raises wherever the main thread is: it
    must not do so while the first error is being told."""
    try:
        sleep(_LATE)
    except RuntimeError as error:
        return worker_failure(error)
    return None


def _from_dataloader(error: BaseException) -> bool:
    """Whether it came while the main process fetched what another had loaded."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_name == "_try_get_data" for frame in frames)
