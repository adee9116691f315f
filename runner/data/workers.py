"""What torch's DataLoader raises when one of its processes raises or dies, in one sentence."""

import re
import traceback
from time import sleep

PREFETCH = 2  # batches that each process loads ahead
_RAISED = re.compile(r"in DataLoader worker process \d+")
_DIED = re.compile(r"DataLoader worker \(pid")
_LATE = 2.0  # seconds that the death of a process may be told after its connection broke


def raised(error: BaseException) -> bool:
    """Whether a data set raised it in a process, which so is that of the batch awaited."""
    return bool(_RAISED.search(str(error)))


def failure(error: BaseException) -> str | None:
    """Why a process failed; None where the error is not a process's."""
    text = str(error)
    if raised(error):
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
        return failure(error)
    return None


def _from_dataloader(error: BaseException) -> bool:
    """Whether it came while the main process fetched what another had loaded."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_name == "_try_get_data" for frame in frames)
