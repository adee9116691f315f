"""Upload status of one journal as reported by the writer, and the warnings shown to the user.

The writer's events arrive in the trainer; the thread that reads them calls JournalStatus.update,
and the trainer reads the attributes. Second stage of the way that runner/tracking/__init__.py
describes, in the direction back.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass
class JournalStatus:
    """One journal's upload, as seen from the process that asked for it.

    Attributes:
        journal: the journal's path.
        forward_event: called with every event, for the process whose run it is. Only that process
            warns its user, so with it this one does not.
        opened_event: set when the store has opened the run, or has refused it.
        closed_event: set when the writer has finished with the journal.
        refusal: why the store does not take the run; None while it does.
        last_error: the last error, even if it did not concern the whole run.
        is_complete: everything in the journal is stored and the run has its status.
        has_warned: the user was shown an error of this journal.
        outage: why the store does not answer at the moment; None while it does.
        sending_file: a file is being uploaded, which may take long.
        offset: bytes of the journal that are stored.
        dashboard: path, after the server's address, of the page that compares the run.
        progress_at: time.monotonic() of the last sign of progress.
    """

    journal: Path
    forward_event: Callable[[dict[str, Any]], None] | None = None
    opened_event: threading.Event = field(default_factory=threading.Event)
    closed_event: threading.Event = field(default_factory=threading.Event)
    run_id: str | None = None
    experiment_id: str | None = None
    refusal: str | None = None
    last_error: str | None = None
    is_complete: bool = False
    has_warned: bool = False
    outage: str | None = None
    sending_file: bool = False
    offset: int = 0
    dashboard: str | None = None
    progress_at: float = field(default_factory=time.monotonic)

    def update(self, event: dict[str, Any]) -> None:
        """Apply one event of the writer."""
        kind = event["event"]
        if self.forward_event is not None:
            self.forward_event(event)
        self.sending_file = kind == "sending"
        if kind in ("waiting", "away"):
            self.outage = event["message"]
        if kind == "away" and self.forward_event is None:
            self._warn_of_outage(event["seconds"])
        if kind in ("sending", "waiting", "away"):
            return  # a started or failed attempt is no progress
        self.progress_at = time.monotonic()
        self.outage = None
        self._apply_progress(event)

    def waiting_message(self, store: str, patience: float) -> str:
        """Return the message shown while the end of a run waits for its upload."""
        if self.outage:
            return (
                f"Uploading the last records to {store}: no answer yet ({self.outage}). Gives up "
                f"after {patience:.0f} s without one; `python -m runner sync` then uploads the "
                "rest."
            )
        percent = self._stored_percent()
        progress = f" ({percent} % done)" if percent else ""
        return f"Uploading the last records to {store}{progress} ..."

    def _stored_percent(self) -> int:
        return 100 * self.offset // max(1, self.journal.stat().st_size)

    def _apply_progress(self, event: dict[str, Any]) -> None:
        """Apply an event that reports what the writer has achieved or given up."""
        kind = event["event"]
        if kind == "opened":
            self.run_id = event["run_id"]
            self.experiment_id = event["experiment_id"]
            self.dashboard = event["dashboard"]
            self.opened_event.set()
        elif kind == "progress":
            self.offset = event["offset"]
        elif kind == "back" and self.forward_event is None:
            log.warning("The tracking store answers again; the records kept meanwhile follow.")
        elif kind == "notice" and self.forward_event is None:
            log.warning(event["message"])
        elif kind == "error":
            self._record_error(event)
        elif kind == "closed":
            self.is_complete = event["complete"]
            self.closed_event.set()

    def _record_error(self, event: dict[str, Any]) -> None:
        """Keep an error; warn of the first one that does not end the run.

        A fatal error is reported by the tracker's check and close.
        """
        self.last_error = event["message"]
        if event["fatal"]:
            self.refusal = event["message"]
            self.opened_event.set()
        elif not (self.has_warned or self.forward_event):
            self.has_warned = True
            log.warning("%s The records are kept in %s.", event["message"], self.journal)

    def _warn_of_outage(self, seconds: int) -> None:
        log.warning(
            "No answer from the tracking store for %d s: %s. Training continues; the records are "
            "kept in %s and are uploaded when the store answers. What is missing when the run has "
            "ended, `python -m runner sync` uploads.",
            seconds,
            self.outage,
            self.journal,
        )
