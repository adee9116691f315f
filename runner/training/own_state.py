"""Follow what a model changes by itself in a step: counters, running averages, hidden states.

No optimizer knows of it. A step that the loss scale skips must leave it as it was, a checkpoint
must hold it, and 16 bits round small changes of it away.
"""

import io
import pickle
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.utils.formatting import first_names
from runner.utils.reproducibility import is_dense, own_tensors, plain_attributes
from runner.utils.tensors import dtype_name

OWN_BUFFERS_KEY = "own_buffers"
"""Of a checkpoint's content: the buffers outside of the state dict that the model has changed."""

OWN_UPDATES_KEY = "own_updates"
"""Of a checkpoint's content: what precision.update keeps beside tensors that the model changes."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNCOUNTED = ("running_mean", "running_var")  # torch's kernels of batch norm raise no version


class _Place(NamedTuple):
    """A place in a module that holds a tensor.

    Attributes:
        name: dotted, of the tensor.
        pattern: what precision.keep_fp32 names to have the model compute with it in float32: a
            layer, which multiplies tensors of one dtype, or the tensor.
        members: the module's buffers, parameters or attributes.
        key: name of the tensor among them.
    """

    name: str
    pattern: str
    members: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Any:
        """Return what is in the place now."""
        return self.members.get(self.key)


def _places(model: nn.Module, tensors: Sequence[Tensor], with_attributes: bool) -> list[_Place]:
    """Return the places of tensors of a model, and of those that attributes hold."""
    places = []
    wanted = {id(tensor) for tensor in tensors}
    seen = {id(tensor) for tensor in (*model.parameters(), *model.buffers())} - wanted
    for path, module in model.named_modules():
        every = [module._buffers, module._parameters]
        for members in [*every, vars(module)] if with_attributes else every:
            named = plain_attributes(module) if members is vars(module) else members
            for key, value in named.items():
                is_new = isinstance(value, Tensor) and is_dense(value) and id(value) not in seen
                # An activation belongs to its step.
                if is_new and value.grad_fn is None and not value.is_inference():
                    seen.add(id(value))
                    name = f"{path}.{key}".lstrip(".")
                    pattern = name if module._modules else path or name
                    places.append(_Place(name, pattern, members, key))
    return places


class SkippedSteps:
    """Undoes what the forwards of a step changed in a model where the loss scale skips the step.

    Nothing waits for the device: the flag chooses there between new values and copies. Numbers of
    Python that a forward counts are not undone.

    Args:
        model: of the run.
        trusts_versions: a tensor whose version is the same is unchanged, as it is unless the model
            changes `tensor.data`.

    Attributes:
        found_inf: of the last step; None before.
    """

    def __init__(self, model: nn.Module, trusts_versions: bool = False) -> None:
        self.found_inf: Tensor | None = None
        self._trusts_versions = trusts_versions
        self._device = next(model.parameters()).device
        places = _places(model, own_tensors(model), True)
        self._places = [place for place in places if self._is_followed(place.tensor)]
        self._before: list[Tensor] = [place.tensor for place in self._places]
        self._copies = [tensor.detach().clone() for tensor in self._before]
        self._copied_bits = [_as_bits(tensor) for tensor in self._copies]
        self._versions = [tensor._version for tensor in self._before]

    def _is_followed(self, tensor: Any) -> bool:
        # The flag is on the model's device; to read it elsewhere would wait.
        return isinstance(tensor, Tensor) and is_dense(tensor) and tensor.device == self._device

    @torch.no_grad()
    def begin(self) -> None:
        """Copy what has changed since the last copy, before the first forward of a step."""
        for copies, tensors in self._written():
            torch._foreach_copy_(copies, tensors)
        for i, place in enumerate(self._places):
            now = place.tensor
            if now is not self._before[i] and self._is_followed(now):
                self._before[i] = now
                self._copies[i] = now.detach().clone()
                self._copied_bits[i] = _as_bits(self._copies[i])
            self._versions[i] = self._before[i]._version

    @torch.no_grad()
    def end(self, found_inf: Tensor) -> None:
        """Restore the copies where a step is skipped.

        Args:
            found_inf: float32 [], not 0 where gradients overflowed.
        """
        self.found_inf = found_inf
        # In whole numbers, whose differences are exact and have no NaN; a kernel for all tensors.
        for copies, tensors in self._written():
            torch._foreach_sub_(tensors, copies)
            torch._foreach_mul_(tensors, (found_inf == 0).to(tensors[0].dtype))
            torch._foreach_add_(tensors, copies)
        for place, before, copied in zip(self._places, self._before, self._copies, strict=True):
            now = place.tensor
            if now is before or not self._is_followed(now):
                continue
            if (now.shape, now.dtype) == (before.shape, before.dtype):
                place.members[place.key] = torch.where(found_inf != 0, copied, now)

    def _written(self) -> Collection[tuple[list[Tensor], list[Tensor]]]:
        """Return copies and tensors, by dtype and as whole numbers, of the places where the model
        has written since the last copy."""
        groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for i, place in enumerate(self._places):
            tensor = place.tensor
            if tensor is not self._before[i]:
                continue
            is_written = place.key in _UNCOUNTED or tensor._version != self._versions[i]
            if is_written or not self._trusts_versions:
                bits = _as_bits(tensor)
                copies, tensors = groups.setdefault(bits.dtype, ([], []))
                copies.append(self._copied_bits[i])
                tensors.append(bits)
        return groups.values()


def _as_bits(tensor: Tensor) -> Tensor:
    # `data`: what is written here does not count as a change by the model.
    plain = tensor.data
    if plain.is_complex():
        plain = torch.view_as_real(plain.conj() if plain.is_conj() else plain)
    return plain.view(_BITS[plain.itemsize])


class OwnState:
    """What a model has changed by itself since the training began, from values on the host.

    Reading them waits for the device, so it is for the first step and for checkpoints.

    Args:
        model: of the run, before its first step.
        world_size: processes of the run.

    Attributes:
        restored: names of the buffers outside of the state dict that a checkpoint has set.
    """

    def __init__(self, model: nn.Module, world_size: int = 1) -> None:
        self._model = model
        frozen = [p for p in model.parameters() if not p.requires_grad and type(p) is nn.Parameter]
        narrow = [p for p in frozen if p.itemsize == 2]
        self._places = _places(model, [*own_tensors(model), *narrow], False)
        self._tensors = [place.tensor for place in self._places]
        self._versions = [tensor._version for tensor in self._tensors]
        self._digests = [_digest(tensor) for tensor in self._tensors]
        # DDP writes every buffer in each forward, changed or not.
        self._counts_writes = world_size == 1
        self._unsaved = {name: _digest(buffer) for name, buffer in _unsaved_buffers(model)}
        self._at_start = dict(_attributes(model))
        self._after_first: dict[str, bytes] = {}
        self._changed: set[int] = set()  # indices of places, in the first step
        self.restored: set[str] = set()

    def end_first_step(self) -> bool:
        """Note what the first step has made; return whether torch has counted all changes of
        tensors in it."""
        self._after_first = dict(_attributes(self._model))
        digests = [_digest(place.tensor) for place in self._places]
        self._changed = {i for i, digest in enumerate(digests) if digest != self._digests[i]}
        return all(self._is_written(i) or self._places[i].key in _UNCOUNTED for i in self._changed)

    def _is_written(self, i: int) -> bool:
        tensor = self._places[i].tensor
        return tensor is not self._tensors[i] or tensor._version != self._versions[i]

    def changed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers outside of the state dict that have changed, by name; not copied."""
        return {
            name: buffer
            for name, buffer in _unsaved_buffers(self._model)
            if name in self.restored or _digest(buffer) != self._unsaved.get(name)
        }

    def narrow_warning(self, update: str, covered: Collection[str]) -> str:
        """Return a warning that names the 16-bit tensors that the model wrote in the first step and
        no optimizer steps; empty without any.

        Args:
            update: what to type beside precision.keep_fp32, see Precision.update_remedy.
            covered: names of the tensors whose changes are computed in float32.
        """
        patterns: dict[str, str] = {}
        for i, place in enumerate(self._places):
            dtype = self._tensors[i].dtype
            # What is rounded away leaves no other trace than the write.
            is_written = i in self._changed or (self._counts_writes and self._is_written(i))
            is_narrow = dtype.itemsize == 2 and dtype.is_floating_point
            if is_narrow and is_written and place.name not in covered:
                patterns[f"{place.name} ({dtype_name(dtype)})"] = place.pattern
        if not patterns:
            return ""
        if any(".running_" in f".{name}" for name in patterns):
            update = ""  # a rule leaves the kernel of batch norm out
        kept = ",".join(dict.fromkeys(patterns.values()))
        return (
            f"warning: the model itself changes {first_names([*patterns], 4)}, and 16 bits round "
            f"small changes away. Type {update}precision.keep_fp32=[{kept}], or a -mixed precision."
        )

    def unsaved_attributes(self) -> list[str]:
        """Return the attributes that change between steps and that no checkpoint holds."""
        saved = [*self._model.state_dict().keys()]
        extra = set[bytes]()
        for module in self._model.modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                state = module.get_extra_state()
                extra |= {_digest(v) for v in (state.values() if isinstance(state, dict) else [])}
        names = []
        for name, digest in _attributes(self._model):
            # What a first step makes, such as a table of positions, the next run makes again,
            # unless a flag says that it is made.
            before = self._at_start.get(name)
            if before not in (_digest(False), _digest(True)):
                before = self._after_first.get(name, digest)
            if digest != before and name not in saved and digest not in extra:
                names.append(name)
        return names


def _unsaved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each buffer outside of the state dict."""
    for path, module in model.named_modules():
        for key in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers[key]
            if buffer is not None:
                yield f"{path}.{key}".lstrip("."), buffer


def _attributes(model: nn.Module) -> Iterator[tuple[str, bytes]]:
    """Yield the name and digest of each attribute of a model's modules, torch's own left out."""
    torchs = vars(nn.Module()).keys()
    for path, module in model.named_modules():
        for key, value in plain_attributes(module).items():
            if key not in torchs:
                yield f"{path}.{key}".lstrip("."), _digest(value)


class _Pickler(pickle.Pickler):
    """Writes tensors as sums of their bits, and weights, activations, modules and code as names."""

    def persistent_id(self, value: Any) -> Any:
        kind = type(value).__name__
        if isinstance(value, Tensor) and not value.requires_grad and is_dense(value):
            bits = _as_bits(value).flatten()
            sums = []
            # Of parts, too, which another order changes; a sum on the CPU makes a copy in int64.
            for step in (1, 2, 3):
                chunks = bits[::step].split(2**22)
                sums.append(torch.stack([c.sum(dtype=torch.int64) for c in chunks]).sum())
            return kind, value.shape, torch.stack(sums).tolist()
        return kind if isinstance(value, Tensor | nn.Module) or callable(value) else None


def _digest(value: Any) -> bytes:
    """Return bytes that are equal for equal values; of what cannot be pickled, none."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.fast = True  # else equal values differ where one object is in two places
    try:
        pickler.dump(value)
    except Exception:
        return b""
    return file.getvalue()
