"""Follow what a model changes by itself in a step: counters, running averages, hidden states.

No optimizer knows of it. A step that the loss scale skips must leave it as it was, a checkpoint
must hold it, and 16 bits round small changes of it away.
"""

import io
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.core import (
    TrainState,
    fmt,
    gradients,
    module_tape,
    random_streams,
    tensor_facts,
    train_state,
)
from runner.precision.weight_updates import Nearest, WideForward

OWN_BUFFERS_KEY = "own_buffers"
"""Of a checkpoint's content: the buffers that the model has changed outside of the state dict, or
made, or given another shape."""

OWN_UPDATES_KEY = "own_updates"
"""Of a checkpoint's content: what precision.update keeps beside tensors that the model changes."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNCOUNTED = ("running_mean", "running_var")  # torch's kernels of batch norm raise no version
# Attributes of torch's own, of modules and of optimizers.
_TORCHS = frozenset({*vars(nn.Module()), "state", "param_groups", "defaults"})

_LIBRARIES = ("torch.", "torchao.", "bitsandbytes.", "runner.")


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
    """Return the places of tensors of a model, and of those that attributes hold; with attributes
    those that hold None, too."""
    places = []
    wanted = {id(tensor) for tensor in tensors}
    seen = {id(tensor) for tensor in (*model.parameters(), *model.buffers())} - wanted
    for path, module in model.named_modules():
        every = [module._buffers, module._parameters]
        for members in [*every, vars(module)] if with_attributes else every:
            named = random_streams.plain_attributes(module) if members is vars(module) else members
            may_be_none = with_attributes and members is not module._parameters
            for key, value in named.items():
                if isinstance(value, Tensor):
                    # An activation belongs to its step. Torch counts no change in inference mode.
                    is_place = (
                        id(value) not in seen
                        and random_streams.is_dense(value)
                        and value.grad_fn is None
                        and (with_attributes or not value.is_inference())
                    )
                else:
                    is_place = value is None and may_be_none and key not in _TORCHS
                if is_place:
                    seen.add(id(value))
                    name = f"{path}.{key}".lstrip(".")
                    pattern = name if module._modules else path or name
                    places.append(_Place(name, pattern, members, key))
    return places


@contextmanager
def _unwatched() -> Iterator[None]:
    """Return a context without gradients, in which no mode of torch's hears of the reads."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


class _Followed:
    """A place of a model, and a copy of what it held.

    Attributes:
        place: the place.
        before: the tensor that was copied; None where the place held none.
        copied: its copy.
        bits: the copy as whole numbers.
        version: of the tensor, when the copy was last known to be that of its values.
    """

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.copy(place.tensor)

    def copy(self, now: Tensor | None) -> None:
        """Copy what the place holds now."""
        self.copied: Any = None if now is None else now.detach().clone()
        self.bits = None if self.copied is None else _as_bits(self.copied)
        # Torch counts no change in inference mode: such a tensor is taken for another one.
        self.before = self.copied if now is not None and now.is_inference() else now
        self.note_version()

    def note_version(self) -> None:
        """Take the copy for that of the tensor's present values."""
        self.version = getattr(self.before, "_version", 0)


class SkippedSteps(train_state.StepHook):
    """Undoes what the forwards of a step changed in a model where the loss scale skips the step.

    Nothing waits for the device: the flag chooses there between new values and copies. Numbers of
    Python that a forward counts are not undone.

    Args:
        model: of the run; looked at from the first step on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        # A tensor whose version is the same is unchanged, unless the model changes `tensor.data`.
        self._trusts_versions = False
        self._found_inf = None  # of the last step
        self._followed = None

    def _follow(self) -> list[_Followed]:
        """Copy what the model holds now."""
        self._followed = []
        for place in _places(self._model, random_streams.own_tensors(self._model), True):
            # After the first step no attributes: there may be many, which stay None.
            is_none = place.tensor is None
            is_none &= not (self._trusts_versions and "_buffers" in place.members)
            if is_none or self._is_followed(place.tensor):
                self._followed.append(_Followed(place))
        return self._followed

    def end_first_step(self, counts_all: bool) -> None:
        """Follow what the first step has left.

        Args:
            counts_all: torch has counted all changes of tensors in it.
        """
        # A skipped step has left no change to compare.
        self._trusts_versions = counts_all and not self._found_inf
        self._follow()

    def _is_followed(self, tensor: Any) -> bool:
        # The flag is on the model's device; to read it elsewhere would wait.
        return (
            isinstance(tensor, Tensor)
            and random_streams.is_dense(tensor)
            and tensor.device == self._device
        )

    def begin(self, step: int) -> None:
        """Copy what has changed since the last copy."""
        followed = self._follow() if self._followed is None else self._followed
        with _unwatched():
            for copies, tensors in self._written(followed):
                torch._foreach_copy_(copies, tensors)
            for one in followed:
                now = one.place.tensor
                if now is not one.before and (now is None or self._is_followed(now)):
                    one.copy(now)
                one.note_version()

    def end(self, found_infs: Sequence[Tensor | None]) -> None:
        """Restore the copies where the step of any optimizer is skipped; see StepHook."""
        found_inf = gradients.any_found_inf(found_infs)
        followed = self._followed
        assert found_inf is not None  # there is a loss scale
        assert followed is not None  # begin() has found them
        self._found_inf = found_inf
        with _unwatched():
            # In whole numbers, whose differences are exact and have no NaN; a kernel for all.
            for copies, tensors in self._written(followed):
                torch._foreach_sub_(tensors, copies)
                torch._foreach_mul_(tensors, (found_inf == 0).to(tensors[0].dtype))
                torch._foreach_add_(tensors, copies)
            for one in followed:
                place, copied = one.place, one.copied
                now: Any = place.tensor
                if now is one.before:
                    continue
                is_alike = self._is_followed(now) and self._is_followed(copied)
                if is_alike and (now.shape, now.dtype) == (copied.shape, copied.dtype):
                    place.members[place.key] = torch.where(found_inf != 0, copied, now)
                # No kernel chooses between a tensor and None, or between shapes: the host waits.
                # For an activation, or what is neither, it does not wait.
                elif (
                    getattr(now, "grad_fn", now) is None and tensor_facts.HostFlag(found_inf).is_set
                ):
                    place.members[place.key] = copied

    def _written(
        self, followed: Sequence[_Followed]
    ) -> Collection[tuple[list[Tensor], list[Tensor]]]:
        """Return copies and tensors, by dtype and as whole numbers, of the places where the model
        has written since the last copy."""
        groups = {}
        for one in followed:
            tensor = one.place.tensor
            if tensor is None or tensor is not one.before:
                continue
            is_written = one.place.key in _UNCOUNTED or tensor._version != one.version
            if is_written or not self._trusts_versions:
                bits = _as_bits(tensor)
                copies, tensors = groups.setdefault(bits.dtype, ([], []))
                copies.append(one.bits)
                tensors.append(bits)
        return groups.values()


def _as_bits(tensor: Tensor) -> Tensor:
    # `data`: what is written here does not count as a change by the model.
    plain = tensor.data
    if plain.is_complex():
        plain = torch.view_as_real(plain.conj() if plain.is_conj() else plain)
    return plain.view(_BITS[plain.itemsize])


class OwnUpdates(train_state.StepHook):
    """Has what forwards write in 16 bits follow precision.update; see WideForward.

    Args:
        model: of the run; looked at from the first step on, when it is known whether it is
            compiled: nothing of a compiled one is followed.
        rule: value of precision.update; not nearest.
        optimizers: of the run.
        seed: of the run, the same in all processes.
    """

    def __init__(
        self, model: nn.Module, rule: str, optimizers: Sequence[Optimizer], seed: int
    ) -> None:
        self._model = model
        self._rule = rule
        self._optimizers: Sequence[Any] = optimizers
        self._seed = seed

    @cached_property
    def _forward(self) -> WideForward | None:
        if any(module._compiled_call_impl is not None for module in self._model.modules()):
            return None
        stores = [o.weight_store for o in self._optimizers if hasattr(o, "weight_store")]
        return WideForward(self._model, self._rule, stores)

    @property
    def rule_state(self) -> dict[str, Tensor]:
        """Return what the rule keeps beside each tensor that a forward has written, by name."""
        return {} if self._forward is None else self._forward.kept

    def begin(self, step: int) -> None:
        """Seed the draws of a step."""
        if self._forward is not None:
            self._forward.seed(self._seed, step)

    def around_forwards(self) -> AbstractContextManager[object]:
        """Return the context in which writes are followed."""
        return nullcontext() if self._forward is None else self._forward

    def saved_content(self) -> dict[str, Any]:
        """Return what the rule keeps; see StepHook."""
        return {OWN_UPDATES_KEY: dict(self.rule_state)}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restore what the rule kept; see StepHook."""
        kept = self.rule_state
        for name, value in content.get(OWN_UPDATES_KEY, {}).items():
            kept[name] = value.to(next(self._model.parameters()).device, copy=True)


def own_hooks(state: TrainState, seed: int = 0) -> list[train_state.StepHook]:
    """Return the hooks of a training's steps for what its model changes by itself.

    Args:
        state: of the run.
        seed: of the run, the same in all processes.
    """
    hooks = []
    model = state.plain_model
    rule = state.precision.update
    if state.scale.value is not None:
        hooks.append(SkippedSteps(model))
    if rule != Nearest.name:
        optimizers = [scheduled.optimizer for scheduled in state.optimizers]
        hooks.append(OwnUpdates(model, rule, optimizers, seed))
    return hooks


class OwnState(train_state.StepHook):
    """What a model has changed by itself since the training began, from values on the host.

    Reading them waits for the device, so it is for the first step and for checkpoints.

    Args:
        state: of the run, before its first step; of optimizers of libraries no attribute is looked
            at.

    Attributes:
        restored: names of the buffers that a checkpoint has set, beside the state dict.
    """

    def __init__(self, state: TrainState) -> None:
        model = state.plain_model
        self._model = model
        self._hooks = state.hooks
        every = [scheduled.optimizer for scheduled in state.optimizers]
        self._optimizers = [o for o in every if not type(o).__module__.startswith(_LIBRARIES)]
        narrow = [
            p
            for p in model.parameters()
            if type(p) is nn.Parameter and p.itemsize == 2 and not p.requires_grad
        ]
        # The tensor of each place before the first step, its version and its digest.
        self._starts: list[tuple[_Place, Tensor, int, bytes]] = []
        for place in _places(model, [*random_streams.own_tensors(model), *narrow], False):
            tensor = place.tensor
            self._starts.append((place, tensor, tensor._version, _digest(tensor)))
        # DDP writes every buffer in each forward, changed or not.
        self._counts_writes = state.strategy.rank.world_size == 1
        self._buffer_marks = {name: mark for name, _, mark in _marked_buffers(model)}
        self._at_start = {name: _digest(value) for name, value in self._attributes()}
        self._after_first: dict[str, bytes] = {}
        # What the model wrote in the first step, with the dtype before it.
        self._written: list[tuple[_Place, torch.dtype]] = []
        # Attributes whose tensors the second step read (True), or replaced without reading them.
        self._reads: dict[str, bool] = {}
        self.restored: set[str] = set()

    def saved_content(self) -> dict[str, Any]:
        """Return the changed buffers; see StepHook."""
        return {OWN_BUFFERS_KEY: self.changed_buffers()}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Note which buffers a checkpoint has set; see StepHook."""
        self.restored.update(content.get(OWN_BUFFERS_KEY, {}))

    def end_first_step(self) -> None:
        """Note what the first step has made."""
        self._after_first = {name: _digest(value) for name, value in self._attributes()}
        counts_all = True
        for place, before, version, digest in self._starts:
            now = place.tensor
            is_changed = _digest(now) != digest
            is_written = now is not before or now._version != version
            counts_all &= is_written or not is_changed or place.key in _UNCOUNTED
            # What is rounded away leaves no other trace than the write.
            if is_changed or (is_written and self._counts_writes):
                self._written.append((place, before.dtype))
        skipped_steps = self._hooks.find(SkippedSteps)
        if skipped_steps is not None:
            skipped_steps.end_first_step(counts_all)

    @contextmanager
    def watched_reads(self) -> Iterator[None]:
        """Return the context of the second step, which shows which attributes carry values from
        step to step: what a step replaces without having read it does not."""
        held = {name: _tensors_in(value) for name, value in self._attributes()}
        unread = {*map(id, chain.from_iterable(held.values()))}
        watch = module_tape.FunctionWatch(
            lambda _, leaves: unread.difference_update(map(id, leaves))
        )
        with watch if unread else nullcontext():
            yield
        for name, value in self._attributes():
            before = held.get(name, [])
            read = [tensor for tensor in before if id(tensor) not in unread]
            if any(tensor.grad_fn is not None for tensor in read):
                self._reads[name] = True
            elif before and not read and not {*map(id, before)} & {*map(id, _tensors_in(value))}:
                self._reads[name] = False

    def changed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that OWN_BUFFERS_KEY holds, by name; not copied."""
        return {
            name: buffer
            for name, buffer, mark in _marked_buffers(self._model)
            if name in self.restored or mark != self._buffer_marks.get(name)
        }

    def end_second_step(self, update: str) -> str:
        """Follow the model's writes by precision.update no longer where there are none; return a
        warning of those in 16 bits that neither a rule nor an optimizer computes in float32.

        In the first step a moving average may be a copy.

        Args:
            update: what to type beside precision.keep_fp32, see Precision.update_remedy.

        Returns:
            The warning; empty without such a tensor.
        """
        updates = self._hooks.find(OwnUpdates)
        covered = {} if updates is None else updates.rule_state
        if updates is not None and not covered:
            self._hooks.remove(updates)
        patterns = {}
        for place, dtype in self._written:
            is_narrow = dtype.itemsize == 2 and dtype.is_floating_point
            if is_narrow and place.name not in covered:
                patterns[f"{place.name} ({tensor_facts.dtype_name(dtype)})"] = place.pattern
        if not patterns:
            return ""
        if any(".running_" in f".{name}" for name in patterns):
            update = ""  # a rule leaves the kernel of batch norm out
        kept = ",".join(dict.fromkeys(patterns.values()))
        return (
            f"warning: the model itself changes {fmt.first_names([*patterns], 4)}, and 16 bits "
            "round "
            f"small changes away. Type {update}precision.keep_fp32=[{kept}], or a -mixed precision."
        )

    def unsaved_attributes(self) -> list[str]:
        """Return the attributes that change between steps and that no checkpoint holds."""
        saved = [*self._model.state_dict().keys()]
        states = []
        for module in self._model.modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                states.append(module.get_extra_state())
        for optimizer in self._optimizers:
            own = optimizer.state_dict()
            states += [own[key] for key in own.keys() - _TORCHS]
        extra = _leaf_digests(states)
        names = []
        for name, value in self._attributes():
            digest = _digest(value)
            # What a first step makes, such as a table of positions, the next run makes again,
            # unless a flag says that it is made.
            before = self._at_start.get(name)
            if before not in (_digest(False), _digest(True)):
                before = self._after_first.get(name, digest)
            is_changed = self._reads.get(name, digest != before)
            if is_changed and name not in saved and not _leaf_digests(value) <= extra:
                names.append(name)
        return names

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each attribute of modules and optimizers, torch's own left
        out."""
        owners: list[tuple[str, Any]] = [*self._model.named_modules()]
        owners += [(type(optimizer).__name__, optimizer) for optimizer in self._optimizers]
        for path, owner in owners:
            for key, value in random_streams.plain_attributes(owner).items():
                if key not in _TORCHS and not _is_in_state(value, owner):
                    yield f"{path}.{key}".lstrip("."), value


def _marked_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield the name and the tensor of each buffer, and what shows that a model must be given it
    before it can load a state dict: its values outside of the state dict, else its shape."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                is_saved = key not in module._non_persistent_buffers_set
                mark = buffer.shape if is_saved else _digest(buffer)
                yield f"{path}.{key}".lstrip("."), buffer, mark


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an attribute and of containers in it, but no parameters."""
    return [v for v in tree_leaves(value) if isinstance(v, Tensor) and type(v) is not nn.Parameter]


def _is_in_state(value: Any, optimizer: Any) -> bool:
    """Return whether a value is an optimizer that another one wraps, and whose state the other's
    state dict holds."""
    if not isinstance(value, Optimizer):
        return False
    inner, outer = ({*map(id, _tensors_in(o.state_dict()))} for o in (value, optimizer))
    return inner <= outer


def _leaf_digests(value: Any) -> set[bytes]:
    """Return the digests of the members of containers, however these are nested."""
    return {_digest(v.detach() if isinstance(v, Tensor) else v) for v in tree_leaves(value)}


class _Pickler(pickle.Pickler):
    """Writes tensors as sums of their bits, and weights, activations, modules and code as names."""

    def persistent_id(self, value: Any) -> Any:
        kind = type(value).__name__
        if isinstance(value, Tensor) and not value.requires_grad and random_streams.is_dense(value):
            bits = _as_bits(value).flatten()
            sums = []
            # Sums of parts show another order, too; a sum on the CPU makes a copy in int64.
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


@contextmanager
def saved_state(state: TrainState) -> Iterator[None]:
    """Return a context at whose end what a computation changes is restored, and its gradients are
    dropped."""
    model = state.plain_model
    # Scales of FP8, which are no buffers.
    scales = tree_map_only(Tensor, Tensor.clone, state.precision.state_dict(model))
    with ExitStack() as stack:
        stack.callback(state.precision.load_state_dict, model, scales)
        stack.enter_context(random_streams.saved_forward_state(model, state.device))
        stack.callback(nn.Module.zero_grad, model)
        yield
