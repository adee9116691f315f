"""The upload of one journal as its trainer sees it, and the warnings that the user is shown.

The trainer reads the state file that the writer saves (upload_state.py): the last stage of the way
that runner/tracking/__init__.py describes. Nothing is sent to the trainer, and no thread listens,
so a warning appears when the trainer next asks: MlflowTracker.check is called with every block.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from runner.tracking.upload_state import UploadState

log = logging.getLogger(__name__)

OUTAGE_SECONDS = 30.0
"""Seconds without an answer of the store after which the user is warned."""
_FILE_PATIENCE_FACTOR = 30
"""How much longer a wait may last while a file is being uploaded: a file reports no progress."""
_STOPPED_SECONDS = 4.0
"""Upper bound on waiting for the store after a stop signal: batch systems kill after about 10 s."""
_RETRY_SECONDS = 5.0
"""Upper bound on waiting once an earlier wait has failed: time for one more attempt."""
_SILENT_SECONDS = 5.0
"""Seconds after which a wait is announced."""
_POLL_SECONDS = 0.05

_last_wait_failed = False
"""Whether the last run of this process to wait for its store gave up."""


class JournalStatus:
    """One journal's upload, as last read from its state file.

    Args:
        journal: its path.

    Attributes:
        state: the writer's state as last read.
        progress_at: time.monotonic() of the last sign of progress.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.state = UploadState(journal)
        self.progress_at = time.monotonic()
        self._outage_shown = False
        self._error_shown = False
        self._notices_shown = 0

    @property
    def is_closed(self) -> bool:
        """Return whether the writer has finished with the journal: stored it, or given it up."""
        return self.state.done or bool(self.state.refusal or self.state.failure)

    def refresh(self) -> None:
        """Read the state file again."""
        before = self.state
        state = UploadState(self.journal)
        if not state.read():
            return
        self.state = state
        if (state.offset, state.run_id) != (before.offset, before.run_id) or self.is_closed:
            self.progress_at = time.monotonic()

    def warn(self) -> None:
        """Show the user what is new in the state; a refusal is the tracker's to report."""
        state = self.state
        for notice in state.notices[self._notices_shown :]:
            log.warning(notice)
        self._notices_shown = len(state.notices)
        if state.first_error and not self._error_shown:
            self._error_shown = True
            log.warning("%s The records are kept in %s.", state.first_error, self.journal)
        if state.outage is None:
            if self._outage_shown:
                self._outage_shown = False
                log.warning("The tracking store answers again; the records kept meanwhile follow.")
            return
        seconds = time.time() - (state.outage_since or time.time())
        if seconds > OUTAGE_SECONDS and not self._outage_shown:
            self._outage_shown = True
            log.warning(
                "No answer from the tracking store for %d s: %s. Training continues; the records "
                "are kept in %s and are uploaded when the store answers. What is missing when the "
                "run has ended, `python -m runner sync` uploads.",
                seconds,
                state.outage,
                self.journal,
            )

    def wait(
        self,
        patience: float,
        stopped: Callable[[], bool],
        store: str,
        keep_writer_alive: Callable[[], str | None],
    ) -> bool:
        """Wait until the journal is stored; announce it if that takes long.

        Gives up after `patience` seconds without progress, or thirty times as many while a file is
        being uploaded; after a few seconds once the run is asked to stop.

        Args:
            patience: seconds; 0 does not wait.
            stopped: returns whether the run was asked to stop; called repeatedly.
            store: the store's name in the announcement.
            keep_writer_alive: restarts a dead writer, and returns why no writer runs any more;
                called repeatedly.

        Returns:
            Whether everything is stored.
        """
        global _last_wait_failed
        # The runs of one process must not all wait for a server that is gone.
        patience = min(patience, _RETRY_SECONDS) if _last_wait_failed else patience
        started_at = self.progress_at = time.monotonic()
        stop_deadline = float("inf")
        is_announced = False
        while True:
            failure = keep_writer_alive()
            self.refresh()
            if self.is_closed or failure:
                break
            now = time.monotonic()
            if stopped():
                stop_deadline = min(stop_deadline, now + min(patience, _STOPPED_SECONDS))
            longest = patience * (_FILE_PATIENCE_FACTOR if self.state.sending_file else 1)
            if now >= stop_deadline or now >= self.progress_at + longest:
                break
            if not is_announced and now - started_at > _SILENT_SECONDS:
                is_announced = True
                log.warning(self.waiting_message(store, patience))
            time.sleep(_POLL_SECONDS)
        self.warn()
        # With patience=0 nothing was waited for, so nothing failed.
        _last_wait_failed = patience > 0 and not self.is_closed
        return self.state.done

    def waiting_message(self, store: str, patience: float) -> str:
        """Return the message shown while the end of a run waits for its upload."""
        if self.state.outage:
            return (
                f"Uploading the last records to {store}: no answer yet ({self.state.outage}). "
                f"Gives up after {patience:.0f} s without one; `python -m runner sync` then "
                "uploads the rest."
            )
        percent = 100 * self.state.offset // max(1, self.journal.stat().st_size)
        progress = f" ({percent} % done)" if percent else ""
        return f"Uploading the last records to {store}{progress} ..."
