"""Write checkpoints in a thread while the training loop runs.

The loop waits only until the tensors are copied. Tensors that only an update changes are waited
for before the next update.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import torch
from torch import Tensor

from runner.checkpoint import checkpoint_file
from runner.utils.errors import CheckpointError
from runner.utils.files import os_error_reason

Key = tuple[str | int, ...]
Pair = tuple[Tensor, Tensor]


class AsyncCheckpointWriter:
    """Writes one checkpoint at a time in a thread; the next one waits for it. Where memory is too
    short for a copy, the loop waits for the file.

    Args:
        folder: where the checkpoints go.
        keep: how many of the newest are kept.
        say: told of a checkpoint that could not be written; training continues.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]) -> None:
        self.folder, self.keep, self.say = folder, keep, say
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._copies: dict[Key, Tensor] = {}
        self._copying: Event | None = None
        for rest in folder.glob("*.partial"):  # of a process that was killed while it wrote
            rest.unlink()

    def save(
        self, content: Mapping[str, Any], best: bool = False, late: Iterable[Tensor] = ()
    ) -> None:
        """Save a checkpoint in the background; return once the tensors may change.

        Args:
            content: what training.state_dict.checkpoint_state_dict returns.
            best: kept as `best.pt`, too.
            late: tensors on the CPU that the loop leaves unchanged until it calls wait_for_copy.
        """
        self._join()
        if _bytes(content) * 2 > psutil.virtual_memory().available:
            self._copies.clear()
            self._write(content, best)
            self._join()
            return
        later: list[Pair] = []
        spared = {tensor.data_ptr() for tensor in late if tensor.device.type == "cpu"}
        copy, device = self._copied(content, spared, later)
        self._copying = copied = Event()

        def work() -> None:
            try:
                for kept, value in later:
                    kept.copy_(value)
            except Exception as error:
                self._error = error
                return
            finally:
                copied.set()  # else the loop would wait for ever
            if device is not None:
                device.synchronize()
            self._write(copy, best)

        self._thread = Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Return once all tensors may change."""
        if self._copying is not None:
            self._copying.wait()
            self._copying = None

    def finish(self, content: Mapping[str, Any] | None = None) -> Path | None:
        """Wait for the current write, write a last checkpoint and return its path.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._join()
        if content is None:
            return None
        self._write(content)
        if (error := self._error) is not None:
            raise CheckpointError(self._trouble(error))
        return checkpoint_file.checkpoint_path(self.folder, content["step"])

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            self.say(f"warning: {self._trouble(self._error)} Training continues.")
            self._error = None

    def _trouble(self, error: Exception) -> str:
        whole = sorted(self.folder.glob("step-*.pt"))
        last = f"the last whole one is {whole[-1]}" if whole else "there is no earlier one"
        return f"A checkpoint could not be written ({os_error_reason(error)}): {last}."

    def _write(self, content: Mapping[str, Any], best: bool = False) -> None:
        try:
            path = checkpoint_file.save(self.folder, content, self.keep)
            if best:
                checkpoint_file.keep_best(path)
        except Exception as error:
            self._error = error

    def _copied(
        self,
        content: Mapping[str, Any],
        spared: Collection[int],
        later: list[Pair],
    ) -> tuple[Any, Any]:
        """Copy the content to reused host memory.

        Args:
            content: plain containers of tensors.
            spared: addresses of tensors that are not copied here.
            later: gets (copy, tensor) of these.

        Returns:
            The copy, and the device's event after which it is whole (None on a CPU).
        """
        seen: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        device = False

        def copy(value: Any, key: Key) -> Any:
            nonlocal device
            if isinstance(value, Mapping):
                return {name: copy(item, (*key, name)) for name, item in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(copy(item, (*key, i)) for i, item in enumerate(value))
            if not isinstance(value, Tensor):
                return value
            if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_contiguous():
                return value.detach().clone()
            # Neither an empty tensor nor one of torch_xla has an address.
            mark = (value.data_ptr() or id(value), value.shape, value.dtype)
            if mark not in seen:
                device |= value.is_cuda
                seen[mark] = kept = self._room(value, key)
                if value.data_ptr() in spared:
                    later.append((kept, value.detach()))
                else:
                    kept.copy_(value.detach(), non_blocking=value.is_cuda)
            return seen[mark]

        whole = copy(content, ())
        if not device:
            return whole, None
        event = torch.cuda.Event()
        event.record()
        return whole, event

    def _room(self, value: Tensor, key: Key) -> Tensor:
        kept = self._copies.get(key)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            pinned = value.is_cuda
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            self._copies[key] = kept
        return kept


def _bytes(value: Any) -> int:
    """Return the bytes of all tensors in plain containers."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
