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
    """Writes one checkpoint at a time, while the loop waits. Where nothing is sharded, all but the
    first process have nothing to do. See saving.Saver for its methods."""

    def __init__(
        self, folder: Path, keep: int, say: Callable[[str], None], strategy: Strategy
    ) -> None:
        self.folder, self.keep, self.say, self.strategy = folder, keep, say, strategy
        if strategy.place.is_main:
            for rest in folder.glob("*.partial"):  # of processes that were killed while they wrote
                shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
            for parts in folder.glob(f"*{sharded_tensors.SUFFIX}"):
                if not parts.with_suffix(".pt").exists():
                    shutil.rmtree(parts)

    def save(
        self, content: Mapping[str, Any], best: bool = False, late: Iterable[Tensor] = ()
    ) -> None:
        """Write a checkpoint and return; training continues where it cannot be written."""
        if self.strategy.shards and (error := self._write(content, best)):
            self.say(f"warning: A checkpoint could not be written ({error}). Training continues.")

    def wait_for_copy(self) -> None:
        """Return at once: save() has written all it had to."""

    def finish(self, content: Mapping[str, Any] | None = None) -> Path | None:
        """Write a last checkpoint and return its path.

        Raises:
            CheckpointError: it cannot be written.
        """
        if content is None or not self.strategy.shards:
            return None
        if error := self._write(content):
            raise CheckpointError(f"The checkpoint could not be written ({error}).")
        return checkpoint_file.checkpoint_path(self.folder, content["step"])

    def _write(self, content: Mapping[str, Any], best: bool = False) -> str | None:
        """Write a checkpoint in all processes; return the reason if any of them failed."""
        place, parts, sums = self.strategy.place, dict[str, "DTensor"](), sharded_tensors.Sums()
        path = checkpoint_file.checkpoint_path(self.folder, content["step"])
        aside = checkpoint_file.shards_folder(path).with_suffix(".partial")
        rest, reason = sharded_tensors.extract_shards(dict(content), parts), None
        try:
            sums = sharded_tensors.write_shards(aside, parts)
        except OSError as error:
            reason = os_error_reason(error)
        found = self.strategy.gather_object((reason, sums))
        if place.is_main:
            reason = next((failure for failure, _ in found if failure), None)
            if reason is None:
                every = {name: values for _, part in found for name, values in part.items()}
                reason = self._finish(path, aside, {**rest, "parts": every}, best)
        return self.strategy.broadcast_object(reason)

    def _finish(
        self, path: Path, aside: Path, content: Mapping[str, Any], best: bool
    ) -> str | None:
        try:
            shutil.rmtree(checkpoint_file.shards_folder(path), ignore_errors=True)
            aside.replace(checkpoint_file.shards_folder(path))
            checkpoint_file.save(self.folder, content, self.keep)
            if best:
                checkpoint_file.keep_best(path)
        except OSError as error:
            return os_error_reason(error)
        return None
