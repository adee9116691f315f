"""Write the checkpoints of a run: in a thread, or from all processes.

In one process the loop waits only until the tensors are copied. Of tensors that only an update
changes, the copy is made while the loop computes the next gradients, and waited for before the next
update. Of a sharded model each process writes its shards, and the main process everything else.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.core import Strategy, checkpoint_file, errors, files

Content = Mapping[str, Any]
"""What training.state_dict.checkpoint_state_dict returns."""
TensorKey = tuple[str | int, ...]
"""Place of a tensor in the content: the keys and indices that lead to it."""
CopyPair = tuple[Tensor, Tensor]
"""A tensor on the host, and the tensor that is to be copied into it."""


def _delete_drafts(folder: Path) -> None:
    """Delete the drafts of processes that were killed while they wrote.

    Drafts of shards are folders. What cannot be deleted is reported by the checkpoint that needs
    its name.
    """
    for draft in folder.glob("*.partial"):
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):
            draft.unlink(missing_ok=True)


@dataclass(eq=False)
class AsyncCheckpointWriter:
    """Writer of one checkpoint at a time in a thread; the next one waits for it.

    Args:
        folder: of the checkpoints.
        keep: number of the newest checkpoints that stay.
        say: prints a line; called where a checkpoint could not be written and training continues.
    """

    folder: Path
    keep: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._thread = None
        self._error = None
        # Reused by all checkpoints: pinned memory is slow to allocate.
        self._host_buffers: dict[TensorKey, Tensor] = {}
        self._copy_complete = None
        _delete_drafts(self.folder)

    def save(
        self, content: Content, best: bool = False, changed_by_update: Iterable[Tensor] = ()
    ) -> None:
        """Save a checkpoint in the background; return once the tensors may change.

        Args:
            content: what training.state_dict.checkpoint_state_dict returns.
            best: the checkpoint becomes `best.pt`, too.
            changed_by_update: tensors of the content that the loop leaves unchanged until it calls
                wait_for_copy. Those on the CPU are copied in the thread.
        """
        self._wait_for_thread()
        # A copy may take half of the memory that is available. Without one, the loop waits until
        # the file is written.
        tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size * 2 > psutil.virtual_memory().available:
            self._host_buffers.clear()
            self._write(content, best)
            self._wait_for_thread()
            return
        deferred = []
        # A device's tensors are not deferred: the device copies them in the order of its stream,
        # so that the loop's next kernels cannot overtake the copy.
        deferrable = {
            tensor.data_ptr() for tensor in changed_by_update if tensor.device.type == "cpu"
        }
        copy, device_copied = self._copy_content(content, deferrable, deferred)
        copy_complete = Event()
        self._copy_complete = copy_complete

        def copy_and_write() -> None:
            try:
                for target, source in deferred:
                    target.copy_(source)
            except Exception as error:
                self._error = error
                return
            finally:
                # After an error, too: the loop would wait for ever.
                copy_complete.set()
            if device_copied is not None:
                device_copied.synchronize()
            self._write(copy, best)

        self._thread = Thread(target=copy_and_write, name="checkpoint")
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Return once all tensors may change."""
        if self._copy_complete is not None:
            self._copy_complete.wait()
            self._copy_complete = None

    def finish(self, content: Content | None = None) -> Path | None:
        """Wait for the current write, write a last checkpoint and return its path.

        Args:
            content: as for save(); None writes nothing, and None is returned.

        Raises:
            CheckpointError: the last checkpoint cannot be written.
        """
        self._wait_for_thread()
        if content is None:
            return None
        self._write(content)
        if self._error is not None:
            raise errors.CheckpointError(self._failure_message())
        return checkpoint_file.checkpoint_path(self.folder, content["step"])

    def _wait_for_thread(self) -> None:
        """Wait until the checkpoint before is written, and report it if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            self.say(f"warning: {self._failure_message()} Training continues.")
            self._error = None

    def _failure_message(self) -> str:
        assert self._error is not None
        complete = checkpoint_file.checkpoints_in(self.folder)
        last = f"the last whole one is {complete[-1]}" if complete else "there is no earlier one"
        return f"A checkpoint could not be written ({files.os_error_reason(self._error)}): {last}."

    def _write(self, content: Content, best: bool = False) -> None:
        try:
            checkpoint_file.save(self.folder, content, self.keep, best)
        except Exception as error:  # torch reports a full disk as a RuntimeError, too
            self._error = error

    def _copy_content(
        self, content: Content, deferrable: Collection[int], deferred: list[CopyPair]
    ) -> tuple[Any, Any]:
        """Copy the content to reused host memory.

        Args:
            content: plain containers of tensors.
            deferrable: addresses of tensors that are not copied here.
            deferred: gets a pair for each of these.

        Returns:
            The copy, and the device's event after which it is complete (None on a CPU).
        """
        # Weights that layers share are one tensor in the content's copy, too, so that the file
        # holds them once.
        copies = {}
        on_device = False

        def copy(value: Any, key: TensorKey) -> Any:
            nonlocal on_device
            if isinstance(value, Mapping):
                return {name: copy(item, (*key, name)) for name, item in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(copy(item, (*key, i)) for i, item in enumerate(value))
            if not isinstance(value, Tensor):
                return value
            # A buffer of torch.empty has neither a subclass's parts nor other strides.
            if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_contiguous():
                return value.detach().clone()
            # An empty tensor has no address. The shape and the dtype, because a view can begin at
            # the address of another tensor.
            address = value.data_ptr() or id(value)
            identity = (address, value.shape, value.dtype)
            if identity not in copies:
                on_device |= value.is_cuda
                # The buffer of the checkpoint before is reused if it fits.
                buffer = self._host_buffers.get(key)
                if buffer is None or (buffer.shape, buffer.dtype) != identity[1:]:
                    # A device copies without the host's help into pinned memory only.
                    buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                    self._host_buffers[key] = buffer
                copies[identity] = buffer
                if value.data_ptr() in deferrable:
                    deferred.append((buffer, value.detach()))
                else:
                    buffer.copy_(value.detach(), non_blocking=value.is_cuda)
            return copies[identity]

        content_copy = copy(content, ())
        if not on_device:
            return content_copy, None
        event = torch.cuda.Event()
        event.record()
        return content_copy, event


@dataclass(eq=False)
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

    folder: Path
    keep: int
    say: Callable[[str], None]
    strategy: Strategy

    def __post_init__(self) -> None:
        if not self.strategy.rank.is_main:
            return
        _delete_drafts(self.folder)
        # Shards get their final name before the .pt file is written.
        for shards in self.folder.glob(f"*{checkpoint_file.SHARDS_SUFFIX}"):
            if not shards.with_suffix(".pt").exists():
                shutil.rmtree(shards)

    def save(
        self, content: Content, best: bool = False, changed_by_update: Iterable[Tensor] = ()
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

    def finish(self, content: Content | None = None) -> Path | None:
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
            raise errors.CheckpointError(f"The checkpoint could not be written ({error}).")
        return checkpoint_file.checkpoint_path(self.folder, content["step"])

    def _write(self, content: Content, best: bool = False) -> str | None:
        """Write a checkpoint in all processes; return the reason if any of them failed.

        All processes return the same.
        """
        path = checkpoint_file.checkpoint_path(self.folder, content["step"])
        shards = checkpoint_file.shards_folder(path)
        draft = shards.with_suffix(".partial")
        sharded = {}
        content_without_shards = checkpoint_file.extract_shards(dict(content), sharded)
        checksums = {}
        reason = None
        try:
            checksums = checkpoint_file.write_shards(draft, sharded)
        except OSError as error:
            # The error is raised later: the other processes wait in the calls below.
            reason = files.os_error_reason(error)
        outcomes = self.strategy.gather_object((reason, checksums))
        if self.strategy.rank.is_main:
            reason = next((failure for failure, _ in outcomes if failure), None)
            if reason is None:
                all_checksums = {}
                for _, part in outcomes:
                    all_checksums |= part
                complete = {**content_without_shards, "parts": all_checksums}
                try:
                    # A run that was resumed before this step may find those of its earlier attempt.
                    shutil.rmtree(shards, ignore_errors=True)
                    draft.replace(shards)
                    # Last: a checkpoint is found by this file.
                    checkpoint_file.save(self.folder, complete, self.keep, best)
                except OSError as error:
                    reason = files.os_error_reason(error)
        # This is a barrier, too: no process continues before the checkpoint has its final name.
        return self.strategy.broadcast_object(reason)
