"""The journal of a sweep's job, as the sweep's process finds and ends it.

The job only writes the journal into its folder. The sweep's process names it to its writer, so that
MLflow is imported once for all jobs, and ends it for a job that died.
"""

from pathlib import Path

from runner.tracking.journal import append_end_for_owner, latest_journal
from runner.tracking.journal_status import JournalStatus
from runner.tracking.tracker import Status
from runner.tracking.writer_process import shared_writer


class JobJournal:
    """The journal that one job is about to write.

    Args:
        folder: the job's; journals that it holds already are those of earlier runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._earlier = latest_journal(self._folder)
        self._path: Path | None = None

    @property
    def is_found(self) -> bool:
        """Return whether the job's journal has been named to the writer."""
        return self._path is not None

    def find(self) -> None:
        """Name the journal to this process's writer, once the job has created it."""
        if self._path is not None:
            return
        newest = latest_journal(self._folder)
        if newest != self._earlier and newest is not None:
            self._path = newest
            shared_writer().add_journal(newest)

    def end(self, status: Status, error: str, note: str) -> JournalStatus | None:
        """End the journal of a job that died without ending it, so that its run gets a status.

        Returns:
            The journal, for the caller to wait until it is stored; None where nothing is to do.
        """
        self.find()
        if self._path is None:
            return None
        journal = JournalStatus(self._path)
        journal.refresh()
        if journal.is_closed:
            return None
        append_end_for_owner(self._path, note, status, error)
        return journal
