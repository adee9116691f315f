"""The writer process: read journal paths from stdin and upload the journals to MLflow.

Third stage of the way that runner/tracking/__init__.py describes. One loop over all journals of one
trainer; it outlives a killed trainer until they are stored. What the trainer should know is saved
in each journal's state file (upload_state.py). A failed call is repeated here, after a pause, from
the journal.
"""

import json
import os
import select
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.core import journals, stop_signals
from runner.tracking import writer_process
from runner.tracking.uri import RefusedError, UnreachableError, short_cause

IDLE_POLL_SECONDS = 0.25
"""Seconds between looks at the journals when there was nothing to send."""
REST_FACTOR = 4.0
"""Rest after a batch, as a multiple of the time that the batch took, while the trainer trains."""
DOUBTFUL_REFUSAL_SECONDS = 30.0
"""Seconds after which an answer that may be a refusal counts as one."""
ORPHAN_IDLE_SECONDS = 300.0
"""Seconds without progress after which a writer whose trainer has ended gives up."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 5.0
"""A pause after a failed call is twice the one before, up to this."""
_PASSING_ERRORS = (RefusedError, UnreachableError, OSError)
"""Errors that are worth a retry: of the store, or of a local disk that is full or away."""


def run_writer(parent: int) -> None:
    """Run until the trainer (process `parent`) has ended and all of its journals are stored."""
    # A batch system may signal every process of a job; the writer ends after the trainer.
    stop_signals.ignore_signals()
    # The trainer's own threads come first.
    os.nice(10)
    # MLflow reads these when it is imported. Its own retries would block the loop for minutes:
    # failed calls are repeated here.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    # It would override the run that a batch is for.
    os.environ.pop("MLFLOW_RUN_ID", None)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    # It would add the files of a uv project in the working directory to a model.
    os.environ["MLFLOW_UV_AUTO_DETECT"] = "false"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    Writer(parent).run()


@dataclass(eq=False)
class JournalTask:
    """One journal in the writer's loop, and its pauses after failures.

    Attributes:
        uploader: a JournalUploader.
        failing_since: time.monotonic() of the first of the present failures; 0 without one.
        retry_at: time.monotonic() before which it is not tried again.
        is_awaited: the run has ended, so its process waits for the end of the upload.
        has_skipped: a batch was skipped after many attempts; a later one gets a single one.
    """

    uploader: Any
    failing_since: float = 0.0
    retry_at: float = 0.0
    pause: float = _FIRST_PAUSE_SECONDS
    is_awaited: bool = False
    has_skipped: bool = False

    def record_failure(self, now: float) -> float:
        """Schedule the next attempt; return for how many seconds all attempts have failed."""
        self.failing_since = self.failing_since or now
        self.retry_at = now + self.pause
        self.pause = min(2 * self.pause, _LONGEST_PAUSE_SECONDS)
        return now - self.failing_since

    def record_success(self) -> None:
        """Forget earlier failures."""
        self.failing_since = 0.0
        self.pause = _FIRST_PAUSE_SECONDS

    def look_for_end(self) -> None:
        """Hurry once the end of the run is in the journal: its process then waits."""
        if self.is_awaited:
            return
        with suppress(OSError):
            self.is_awaited = journals.has_end(self.uploader.journal)
        if self.is_awaited:
            self.retry_at = 0.0


def rest_seconds(took: float, backlog: float, is_awaited: bool) -> float:
    """Return how long the writer rests after it has sent batches.

    On shared cores (two hardware threads of one, for example) a busy writer slows the trainer. The
    more batches wait, the shorter is the rest, because the trainer waits at its end until they are
    sent.

    Args:
        took: seconds that the last batches took.
        backlog: full batches that wait.
        is_awaited: the trainer waits for the writer, or has ended.
    """
    return 0.0 if is_awaited else REST_FACTOR * took / (1 + backlog) ** 2


class Writer:
    """The loop over all journals of one trainer.

    One thread is enough: the journals mostly share one store.

    Args:
        parent: the trainer's process id.

    Attributes:
        tasks: the journals that are not stored yet.
        trainer_is_alive: the trainer runs, as far as is known.
    """

    def __init__(self, parent: int) -> None:
        # It imports mlflow, which needs the environment that run_writer sets.
        from runner.tracking.writer.uploader import JournalUploader

        self._make_uploader: Callable[[Path], Any] = JournalUploader
        self._parent = parent
        self.tasks: list[JournalTask] = []
        self.trainer_is_alive = True
        self._partial_line = b""
        self._searched_folders = set[Path]()
        self._progress_at = time.monotonic()

    def run(self) -> None:
        """Upload all journals; return when the trainer has ended and they are stored."""
        is_busy = False
        rest = 0.0
        while not self._is_finished():
            self._read_requests(rest if is_busy else IDLE_POLL_SECONDS)
            started_at = time.monotonic()
            for task in self.tasks:
                task.look_for_end()
            results = [self.advance(task) for task in self.tasks.copy()]
            is_busy = any(results)
            is_awaited = not self.trainer_is_alive or any(task.is_awaited for task in self.tasks)
            took = time.monotonic() - started_at
            backlog = sum(task.uploader.backlog for task in self.tasks)
            rest = rest_seconds(took, backlog, is_awaited)
            if self.trainer_is_alive:
                for task in self.tasks:
                    task.uploader.log_system_metrics()

    def _is_finished(self) -> bool:
        if self.trainer_is_alive:
            return False
        return not self.tasks or time.monotonic() - self._progress_at > ORPHAN_IDLE_SECONDS

    def _read_requests(self, patience: float) -> None:
        """Read journal paths from stdin for at most `patience` seconds; note the trainer's end."""
        if not self.trainer_is_alive:
            time.sleep(patience)
            return
        # stdin ends with the trainer. A forked child of it may hold the pipe open, but the
        # parent's process id changes then.
        has_ended = os.getppid() != self._parent
        while select.select([0], [], [], 0.0 if has_ended else patience)[0]:
            data = os.read(0, 65536)
            if not data:
                has_ended = True
                break
            # A read may end in the middle of a line; the rest comes with the next one.
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                journal = Path(json.loads(line)["journal"])
                self.tasks.append(JournalTask(self._make_uploader(journal)))
            patience = 0.0
        if has_ended:
            self.trainer_is_alive = False
            self._progress_at = time.monotonic()

    def advance(self, task: JournalTask) -> bool:
        """Upload one batch of a journal, if one is due; return True if more may follow at once."""
        now = time.monotonic()
        if now < task.retry_at:
            return False
        before = task.uploader.state.offset
        try:
            more = task.uploader.advance(last=not self.trainer_is_alive)
        except Exception as error:  # one journal's error must not end the others
            more = self._handle_error(task, error, now)
        else:
            task.record_success()
            task.uploader.state.clear_outage()
            folder = writer_process.outputs_folder(task.uploader.journal)
            is_searched = folder in self._searched_folders or task.uploader.is_unopened
            if self.trainer_is_alive and not is_searched:
                # Earlier runs' pending journals, once per folder. By a process of its own: a store
                # of theirs that does not answer must not delay this run.
                self._searched_folders.add(folder)
                writer_process.upload_in_background(folder)
        if task.uploader.state.offset != before:
            self._progress_at = time.monotonic()
        if task.uploader.state.done:
            self._close(task)
        return more

    def _handle_error(self, task: JournalTask, error: Exception, now: float) -> bool:
        if isinstance(error, RefusedError) and (task.uploader.is_unopened or not error.of_store):
            return self._handle_refusal(task, short_cause(str(error)))
        if isinstance(error, FileNotFoundError) or not isinstance(error, _PASSING_ERRORS):
            # A bug, or the loss of the journal's file: the journal is closed, and training
            # continues. Not retried: the records stay in the journal, for `runner sync` with a
            # newer version.
            traceback.print_exception(error)
            with suppress(OSError):
                task.uploader.state.save(failure=f"unexpected {type(error).__name__}: {error}")
            self._close(task)
            return False
        return self._handle_outage(task, error, now)

    def _handle_outage(self, task: JournalTask, error: Exception, now: float) -> bool:
        """Schedule a retry, and save why the store does not answer.

        A batch that is neither points nor a status is skipped if the answer may be a refusal, has
        stayed the same for long, and the store answers another call.
        """
        seconds = task.record_failure(now)
        # Some of the system's errors have no text of their own.
        text = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
        print(f"{task.uploader.journal}: {text}", file=sys.stderr, flush=True)
        cause = short_cause(text)
        # All but an UnreachableError may be: a refusal by a password that has expired, where no
        # batch of a run that is stored in part is lost, and the error of a disk.
        is_refusal = getattr(error, "doubtful", True)
        is_refusal = is_refusal and (task.has_skipped or seconds > DOUBTFUL_REFUSAL_SECONDS)
        if is_refusal and not task.uploader.must_retry and task.uploader.is_answered():
            task.has_skipped = True
            return self._handle_refusal(task, cause)
        task.uploader.state.save_outage(cause)
        if not self.trainer_is_alive:
            task.uploader.state.release_lock()  # `runner sync` may take over
        return False

    def _handle_refusal(self, task: JournalTask, message: str) -> bool:
        """Close a journal whose run is refused; of an opened run skip only the refused batch."""
        print(f"{task.uploader.journal}: refused: {message}", file=sys.stderr, flush=True)
        if task.uploader.is_unopened:
            task.uploader.state.save(refused=True, refusal=message)
            self._close(task)
            return False
        task.uploader.state.save_error(message)
        task.uploader.skip()
        task.record_success()
        return True

    def _close(self, task: JournalTask) -> None:
        self.tasks.remove(task)
        task.uploader.state.release_lock()
