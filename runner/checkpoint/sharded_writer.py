"""Write a checkpoint from all processes of a run.

Each process writes its shards of the sharded tensors; the main process writes everything else.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runner.checkpoint import checkpoint_file, sharded_tensors
from runner.distributed.strategy import Strategy
from runner.utils.errors import CheckpointError
from runner.utils.files import os_error_reason

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedCheckpointWriter:
    """Writer of one checkpoint at a time, from all processes, while the loop waits.

    It has the methods of AsyncCheckpointWriter; all processes must call them alike. With a strategy
    that shards nothing it writes nothing: the processes other than the main one have it then.

    Args:
        folder: of the checkpoints; the same for all processes.
        keep: number of the newest checkpoints that stay.
        say: prints a line; called where a checkpoint could not be written and training continues.
        strategy: of the run.
    """

    def __init__(
        self, folder: Path, keep: int, say: Callable[[str], None], strategy: Strategy
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.say = say
        self.strategy = strategy
        if strategy.place.is_main:
            self._remove_incomplete()

    def _remove_incomplete(self) -> None:
        """Remove the files of processes that were killed while they wrote."""
        for draft in self.folder.glob("*.partial"):
            if draft.is_dir():
                shutil.rmtree(draft)
            else:
                draft.unlink()
        # Shards get their final name before the .pt file is written.
        for shards in self.folder.glob(f"*{sharded_tensors.SHARDS_SUFFIX}"):
            if not shards.with_suffix(".pt").exists():
                shutil.rmtree(shards)

    def save(
        self,
        content: Mapping[str, Any],
        best: bool = False,
        changed_by_update: Iterable[Tensor] = (),
    ) -> None:
        """Write a checkpoint and return; training continues where it cannot be written.

        Args:
            content: what training.state_dict.checkpoint_state_dict returns.
            best: the checkpoint becomes `best.pt`, too.
            changed_by_update: not used, because the loop waits for the files.
        """
        if not self.strategy.shards:
            return
        error = self._write(content, best)
        if error:
            self.say(f"warning: A checkpoint could not be written ({error}). Training continues.")

    def wait_for_copy(self) -> None:
        """Return at once: nothing reads the tensors after save() has returned."""

    def finish(self, content: Mapping[str, Any] | None = None) -> Path | None:
        """Write a last checkpoint and return its path.

        Args:
            content: as for save(); None writes nothing, and None is returned.

        Raises:
            CheckpointError: it cannot be written.
        """
        if content is None or not self.strategy.shards:
            return None
        error = self._write(content)
        if error:
            raise CheckpointError(f"The checkpoint could not be written ({error}).")
        return checkpoint_file.checkpoint_path(self.folder, content["step"])

    def _write(self, content: Mapping[str, Any], best: bool = False) -> str | None:
        """Write a checkpoint in all processes; return the reason if any of them failed.

        All processes return the same.
        """
        path = checkpoint_file.checkpoint_path(self.folder, content["step"])
        draft = checkpoint_file.shards_folder(path).with_suffix(".partial")
        sharded: dict[str, DTensor] = {}
        content_without_shards = sharded_tensors.extract_shards(dict(content), sharded)
        checksums: sharded_tensors.Checksums = {}
        reason = None
        try:
            checksums = sharded_tensors.write_shards(draft, sharded)
        except OSError as error:
            # Not raised here: the other processes wait in the calls below.
            reason = os_error_reason(error)
        outcomes = self.strategy.gather_object((reason, checksums))
        if self.strategy.place.is_main:
            reason = next((failure for failure, _ in outcomes if failure), None)
            if reason is None:
                all_checksums: sharded_tensors.Checksums = {}
                for _, part in outcomes:
                    all_checksums |= part
                complete = {**content_without_shards, "parts": all_checksums}
                reason = self._publish(path, draft, complete, best)
        # Also a barrier: no process continues before the checkpoint has its final name.
        return self.strategy.broadcast_object(reason)

    def _publish(
        self, path: Path, draft: Path, content: Mapping[str, Any], best: bool
    ) -> str | None:
        """Give the shards their final name and write the .pt file; return the reason of a failure.

        The file is last: a checkpoint is found by it, and the shards are complete by then.
        """
        shards = checkpoint_file.shards_folder(path)
        try:
            # A run that was resumed before this step may find those of its earlier attempt.
            shutil.rmtree(shards, ignore_errors=True)
            draft.replace(shards)
            checkpoint_file.save(self.folder, content, self.keep)
            if best:
                checkpoint_file.keep_best(path)
        except OSError as error:
            return os_error_reason(error)
        return None
