"""Write a run's files, print its messages, and upload its artifacts."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from runner.tracking.tracker import Tracker
from runner.utils.files import os_error_reason, prepare_output, write_json, write_text
from runner.utils.formatting import relative_path
from runner.utils.secrets import redact


@dataclass(frozen=True)
class RunOutput:
    """What a run writes to.

    Attributes:
        out: the folder of this process; that of the first process is the run's.
        console: where progress and the summary are printed.
        tracker: records metrics, tags and artifacts.
    """

    out: Path
    console: Console
    tracker: Tracker

    def say(self, message: str) -> None:
        """Print a line to the run's console."""
        self.console.print(message, markup=False, soft_wrap=True)

    def write_file(self, path: Path, write: Callable[[Path], object]) -> bool:
        """Write a file of the run's folder; return whether it was written.

        A file that cannot be written is reported on the console and does not end the run.
        """
        try:
            write(prepare_output(path))
        except OSError as error:
            # What was written until then would be taken for the whole file.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self.say(f"warning: {relative_path(path)} was not written: {os_error_reason(error)}.")
            return False
        return True

    def save_artifact(self, path: Path, write: Callable[[Path], object], folder: str = "") -> bool:
        """Write a file and upload it as an artifact; return whether it was written.

        Args:
            path: of the file, in the run's folder.
            write: writes the file at a path.
            folder: of the artifact in the store.
        """
        written = self.write_file(path, write)
        if written:
            self.tracker.artifact(path, folder)
        return written

    def save_json(self, name: str, content: object) -> None:
        """Write a JSON file into the run's folder and upload it as an artifact."""
        self.save_artifact(self.out / name, lambda path: write_json(path, content))

    def save_traceback(self) -> str:
        """Write the traceback of the error being handled to error.txt.

        Returns:
            A sentence that names the file; empty where it could not be written.
        """
        # An error's message may hold a URI with its credentials.
        text = redact(traceback.format_exc())
        path = self.out / "error.txt"
        if not self.write_file(path, lambda path: write_text(path, text)):
            return ""
        return f"The traceback is in {relative_path(path)}."
