"""The writer process: hears journal paths on stdin, carries the journals to MLflow, tells on
stdout what happened. It outlives a killed trainer until the journals are stored."""

import json
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from runner.tracking import pending
from runner.utils.stop_signals import ignore_signals

NAP_SECONDS = 0.25
REST = 4.0
"""Rest after a batch, in times of what it took, while the trainer trains: on shared cores (two
hardware threads of one, say) a busy writer slows it. It gets shorter the more batches wait, for
what is left at the end is what the trainer waits for. Nothing rests once it waits."""
AWAY_SECONDS = 30.0
"""Without an answer, before the trainer is told."""
DOUBT_SECONDS = 30.0
ORPHAN_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0


def main(parent: int) -> None:
    """Runs until the trainer (process `parent`) is gone and all it left is stored."""
    ignore_signals()
    events = os.dup(1)
    os.dup2(2, 1)  # what MLflow prints goes to the log
    os.nice(10)  # the trainer's own threads come first
    _settings()
    Writer(parent, events).run()


def _settings() -> None:
    """MLflow's environment, before its import. Its own retries would block for minutes; here a
    failed call is repeated from the journal."""
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.pop("MLFLOW_RUN_ID", None)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"


class JournalTask:
    """A journal in work and its pauses after failures."""

    def __init__(self, follower: Any) -> None:
        self.follower = follower
        self.failing_since = self.retry_at = 0.0
        self.pause = _FIRST_PAUSE
        self.told = self.awaited = False

    def failed(self, now: float) -> float:
        """Notes a failure; returns for how many seconds there has been nothing else."""
        self.failing_since = self.failing_since or now
        self.retry_at = now + self.pause
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        return now - self.failing_since

    def succeeded(self) -> None:
        self.failing_since, self.pause, self.told = 0.0, _FIRST_PAUSE, False


class Writer:
    """The loop over all journals of one trainer. One thread: they mostly share one store."""

    def __init__(self, parent: int, events: int) -> None:
        from runner.tracking.writer.store_cache import StoreCache
        from runner.tracking.writer.store_errors import RefusedError, UnreachableError
        from runner.tracking.writer.uploader import JournalUploader

        self._refused, self._unreachable = RefusedError, UnreachableError
        self._follower: Callable[..., Any] = partial(JournalUploader, stores=StoreCache())
        self._parent, self._events = parent, events
        self._tasks: dict[str, JournalTask] = {}
        self._heard, self._rest = True, b""
        self._settled = set[Path]()
        self._progress_at = time.monotonic()

    def run(self) -> None:
        busy, rest = False, 0.0
        while not self._finished():
            self._listen(rest if busy else NAP_SECONDS)
            began = time.monotonic()
            busy = sum(self._work(name, task) for name, task in list(self._tasks.items())) > 0
            awaited = not self._heard or any(task.awaited for task in self._tasks.values())
            behind = sum(task.follower.behind for task in self._tasks.values())
            took = time.monotonic() - began
            rest = 0.0 if awaited else REST * took / (1 + behind) ** 2
            for task in self._tasks.values() if self._heard else ():
                task.follower.observe()

    def _finished(self) -> bool:
        if self._heard:
            return False
        return not self._tasks or time.monotonic() - self._progress_at > ORPHAN_SECONDS

    def _listen(self, patience: float) -> None:
        """Takes in journal paths. stdin ends with the trainer; a forked child of it that holds
        the pipe open does not deceive, since the parent's process id changes."""
        if not self._heard:
            time.sleep(patience)
            return
        gone = os.getppid() != self._parent
        while select.select([0], [], [], 0.0 if gone else patience)[0]:
            data = os.read(0, 65536)
            if not data:
                gone = True
                break
            self._take(data)
            patience = 0.0
        if gone:
            self._heard, self._progress_at = False, time.monotonic()

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name = json.loads(line)["journal"]
            if name in self._tasks:
                task = self._tasks[name]  # named again: the trainer waits for its end
                task.awaited, task.retry_at = True, 0.0
            else:
                emit = partial(self._emit, name)
                self._tasks[name] = JournalTask(self._follower(Path(name), emit=emit))

    def _work(self, name: str, task: JournalTask) -> bool:
        """Moves one journal on; True if it may have more at once."""
        now = time.monotonic()
        if now < task.retry_at:
            return False
        before = task.follower.progress.offset
        try:
            more = task.follower.advance(last=not self._heard)
        except self._unreachable as error:
            more = self._unreached(name, task, error, task.failed(now))
        except self._refused as error:
            more = self._refusal(name, task, _cause(str(error)))
        except Exception as error:  # one journal's trouble must not end the others
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                doubt = self._unreachable(f"{type(error).__name__}: {error}", doubtful=True)
                more = self._unreached(name, task, doubt, task.failed(now))
            else:
                more = self._give_up(name, task, error)
        else:
            self._answered(name, task)
        if task.follower.progress.offset != before:
            self._progress_at = time.monotonic()
            self._emit(name, "progress", offset=task.follower.progress.offset)
        if task.follower.progress.done:
            self._close(name, complete=True)
        return more

    def _unreached(self, name: str, task: JournalTask, error: Any, seconds: float) -> bool:
        """Keeps trying, and says so once an outage is long. What is no metric and no status is left
        out where the answer may be a refusal."""
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        cause = _cause(str(error))
        if error.doubtful and seconds > DOUBT_SECONDS and not task.follower.vital:
            return self._refusal(name, task, cause)
        away = seconds > AWAY_SECONDS and self._heard and not task.told
        task.told = task.told or away
        self._emit(name, "away" if away else "waiting", seconds=round(seconds), message=cause)
        if not self._heard:
            task.follower.progress.release()  # `runner sync` may take over
        return False

    def _answered(self, name: str, task: JournalTask) -> None:
        if task.told:
            self._emit(name, "back")
        task.succeeded()
        if self._heard and not task.follower.opening:
            self._settle(pending.outputs_folder(Path(name)))

    def _settle(self, folder: Path) -> None:
        """Has what earlier runs left there sent by a process of its own, which may find their
        store away without keeping this run waiting."""
        if folder not in self._settled:
            self._settled.add(folder)
            pending.upload_in_background(folder)

    def _refusal(self, name: str, task: JournalTask, message: str) -> bool:
        """A run that is not taken ends here; of an open run only the batch is left out."""
        print(f"{name}: refused: {message}", file=sys.stderr, flush=True)
        opening = task.follower.opening
        self._emit(name, "error", fatal=opening, message=message)
        if opening:
            task.follower.progress.save(refused=True)
            self._close(name, complete=False)
            return False
        task.follower.skip()
        task.succeeded()
        return True

    def _give_up(self, name: str, task: JournalTask, error: Exception) -> bool:
        """A fault of ours or a journal that is gone: training goes on all the same."""
        traceback.print_exc()
        message = f"unexpected {type(error).__name__}: {error}"
        self._emit(name, "error", fatal=False, message=message)
        self._close(name, complete=False)
        return False

    def _close(self, name: str, complete: bool) -> None:
        self._emit(name, "closed", complete=complete)
        self._tasks.pop(name).follower.progress.release()

    def _emit(self, journal: str, event: str, **content: Any) -> None:
        line = json.dumps({"journal": journal, "event": event, **content}) + "\n"
        try:
            os.write(self._events, line.encode())
        except BrokenPipeError:
            self._events = os.open(os.devnull, os.O_WRONLY)  # no trainer is left to hear it


def _cause(message: str) -> str:
    """What the system said, where a long tale of connection pools ends in it; else the first
    line, without the SQL."""
    found = re.search(r"\[Errno -?\d+\] [\w ]+", message)
    return found.group() if found else message.partition("\n")[0][:400]
