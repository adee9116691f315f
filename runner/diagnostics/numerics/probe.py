"""Measure the tensors of an optimizer step: hooks take samples, which are measured at its end.

NumericsCallback does so every few steps of a run, records the shares that the precision loses, and
writes the numerics report at the end.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runner.core import (
    ConfigError,
    RunCallback,
    RunOutput,
    TrainState,
    accelerators,
    fmt,
    layout,
    module_tape,
    tensor_facts,
)
from runner.diagnostics.module_tensors import named_modules, tensors_in
from runner.diagnostics.numerics.measure import (
    BLOCK_ELEMENTS,
    MAX_SAMPLE_ELEMENTS,
    ExponentCounts,
    Sample,
    SampledTensor,
    count_exponents,
    is_measurable,
    quantization_losses,
    take_sample,
)
from runner.diagnostics.numerics.results import KINDS, Numerics, NumericsSnapshot, TensorStats, read
from runner.precision.layers.experts import by_expert, expert_names, stack_names

MAX_OUTPUT_SAMPLES = 4
"""Output tensors of one module in a forward after which no further call of it is measured."""
MAX_INNER_OPERATIONS = 16
"""Results of inner operations that are measured of one module in a forward of the model."""


def modules_holding_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Sequence[Tensor]]]:
    """Yield the modules that hold parameters of their own: dotted name, module, its parameters.

    Each module comes once; a parameter that several modules share belongs to the first of them.
    """
    seen: set[int] = set()
    for name, module in named_modules(model):
        held = list(module.parameters(recurse=False))
        unseen = [p for p in held if id(p) not in seen]
        seen.update(map(id, held))
        if held:
            yield name, module, unseen


class Probe(TorchFunctionMode):
    """Context around an optimizer step that measures its tensors.

    The step computes the same bits as without the probe, and nothing is read from the device before
    the step ends.

    Args:
        state: of the run.
        record: called with the measurements of a step that ended without an exception.
    """

    def __init__(self, state: TrainState, record: Callable[[NumericsSnapshot], None]) -> None:
        super().__init__()
        self.state = state
        self.record = record
        self._tape = module_tape.ModuleTape()

    def __enter__(self) -> "Probe":
        # The scale is read now: the step itself may change it.
        self._scale = self.state.scale.value
        self._activations: dict[str, list[Sample]] = defaultdict(list)
        self._inner: dict[str, list[Sample]] = defaultdict(list)
        self._inner_tensors: dict[str, list[Tensor]] = defaultdict(list)
        self._gradients: dict[int, list[Sample]] = {}
        self._weights: list[tuple[Tensor, list[Sample]]] = []
        self._routed: dict[str, tuple[Tensor, Tensor]] = {}
        model = self.state.plain_model
        trainable = {*map(id, self.state.trainable_parameters)}
        holders = set()
        # The name of each parameter's module, of a stacked weight its own, by the parameter's id.
        self._names: dict[int, str] = {}
        self._stacks = stack_names(model)
        own_names = {id(p): name for name, p in model.named_parameters()}
        for name, module, params in modules_holding_tensors(model):
            holders.add(module)
            for p in filter(is_measurable, params):
                # Before the step: the update is the difference to a second sample after it, so no
                # optimizer has to cooperate.
                own = own_names[id(p)]
                self._names[id(p)] = own if own in self._stacks else name
                self._weights.append((p, self._samples(p, p)))
                if id(p) in trainable:
                    self._tape.watch_gradient(p, self._record_gradient)
        # The modules that are not torch's own.
        self._user_code: set[str] = set()
        names_of_experts = expert_names(model)
        # The whole model is called once for each micro-batch.
        begins: dict[str, Callable[..., None]] = {"": self._begin_forward}
        begins |= {name.rpartition(".")[0]: self._record_tokens for name in self._stacks}
        for dotted_name, module in model.named_modules():
            name = names_of_experts.get(module, dotted_name or module_tape.ROOT)
            if not type(module).__module__.startswith("torch."):
                self._user_code.add(name)
            end = self._record_output if module in holders else None
            self._tape.watch_calls(name, module, begins.get(dotted_name), end)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tape.close()
        snapshot = self._measure() if error[0] is None else None
        # Samples are freed now: a probe lives as long as its run.
        del self._activations, self._inner, self._inner_tensors, self._gradients, self._weights
        del self._routed
        if snapshot:
            self.record(snapshot)

    def _begin_forward(self, *_: object) -> None:
        """Drop the activations of the micro-batch before: the last one of a step is measured."""
        self._activations.clear()
        self._inner.clear()

    def _record_tokens(self, name: str, inputs: Any) -> None:
        """Copy what a layer of experts takes: the tokens, and the numbers of their experts."""
        tensors = tensors_in(inputs)
        if len(tensors) < 2:
            return
        tokens, chosen, *_ = tensors
        is_routed = chosen.dtype is torch.int64 and chosen.ndim == 2 and len(chosen) == len(tokens)
        if is_routed and is_measurable(tokens):
            # They are split at the end of the step: how many there are is known on the device.
            self._routed[name] = (tokens.detach().clone(), chosen)

    def _samples(self, p: Tensor, tensor: Tensor) -> list[Sample]:
        """Return samples of a parameter or what is as large: of a stacked weight of each expert."""
        parts = by_expert(self._names[id(p)], tensor.detach(), self._stacks)
        return [take_sample(part, most=self._sample_size(p)) for _, part in parts]

    def _sample_size(self, p: Tensor) -> int:
        """Return how many elements are measured of a parameter; of one expert fewer the more there
        are, so that a layer of many takes about the time of any other."""
        if self._names[id(p)] not in self._stacks:
            return MAX_SAMPLE_ELEMENTS
        return max(MAX_SAMPLE_ELEMENTS // len(p), BLOCK_ELEMENTS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Numbers may leave a format's range inside the forward of a module although inputs and
        # outputs fit. torch's own modules are single operations, sampled at the end of their call.
        name = self._tape.running[-1] if self._tape.running else ""
        if name not in self._user_code or len(self._inner[name]) >= MAX_INNER_OPERATIONS:
            return result
        if isinstance(result, Tensor) and is_measurable(result):
            self._inner[name].append(take_sample(result, masked=True))
            # The tensor itself is held, because a freed one's id may be reused.
            self._inner_tensors[name].append(result)
        return result

    def _record_output(self, name: str, output: Any) -> None:
        """Sample a module's outputs."""
        samples = self._activations[name]
        if len(samples) < MAX_OUTPUT_SAMPLES:
            # An output that is also the result of a measured operation counts once.
            counted = {id(t) for t in self._inner_tensors[name]}
            for tensor in tensors_in(output):
                if is_measurable(tensor) and id(tensor) not in counted:
                    samples.append(take_sample(tensor, masked=name in self._user_code))
        self._inner_tensors[name].clear()

    def _record_gradient(self, param: Tensor) -> None:
        """Sample a gradient as the backward leaves it.

        It is multiplied by the loss scale, not clipped, and holds the sum over the micro-batches so
        far. A sparse one is measured as the dense one that it stands for.
        """
        grad = param.grad
        if grad is not None and grad.layout is torch.sparse_coo:
            grad = grad.detach().to_dense()
        if grad is not None and is_measurable(grad):
            # The last call of several micro-batches overwrites the others, with the whole sum.
            self._gradients[id(param)] = self._samples(param, grad)

    @torch.no_grad()
    def _measure(self) -> NumericsSnapshot:
        """Measure all samples, in the order of the model's modules and of KINDS."""
        named = self._named_samples()
        counted = count_exponents([tensor for _, _, tensor in named])
        counts: dict[tuple[str, str], list[ExponentCounts]] = defaultdict(list)
        has_update = False
        for (name, kind, _), count in zip(named, counted, strict=True):
            counts[name, kind].append(count)
            has_update |= kind == "updates" and bool(count.largest)
        # Where the optimizer skipped the step, updates of zero would read as swallowed ones.
        kinds = [kind for kind in KINDS if has_update or kind != "updates"]
        pairs = (*named_modules(self.state.plain_model), *counts)
        names = dict.fromkeys(name for name, _ in pairs)
        order = [(name, kind) for name in names for kind in kinds if (name, kind) in counts]
        scale = None if self._scale is None else self._scale.item()
        measured = []
        for name, kind in order:
            # A module's tensors of one kind, taken together.
            group = counts[name, kind]
            elements = sum(c.elements for c in group)
            largest = float(np.max([c.largest for c in group]))
            histogram = np.sum([c.exponents for c in group], axis=0)
            stats = TensorStats(
                name,
                kind,
                elements,
                zeros=sum(c.zeros for c in group) / elements,
                not_finite=sum(c.not_finite for c in group) / elements,
                largest=largest if np.isfinite(largest) else None,
                # Indices are float32's biased exponents.
                exponents={int(i) - 127: round(histogram[i]) for i in np.flatnonzero(histogram)},
                formats=quantization_losses(group),
            )
            measured.append(stats)
        return NumericsSnapshot(self.state.step, scale, tuple(measured))

    def _named_samples(self) -> list[tuple[str, str, SampledTensor]]:
        """Return the module, the kind and the sample of each tensor of the step."""
        named: list[tuple[str, str, SampledTensor]] = []
        for samples_by_module in (self._activations, self._inner):
            for name, samples in samples_by_module.items():
                named += [(name, "activations", SampledTensor(sample)) for sample in samples]
        for module, (tokens, chosen) in self._routed.items():
            for expert in chosen.unique().tolist():
                sample = take_sample(tokens[(chosen == expert).any(-1)])
                named.append((f"{module}[{expert}]", "activations", SampledTensor(sample)))
        for p, samples in self._weights:
            gradients = self._gradients.get(id(p), [None] * len(samples))
            parts = by_expert(self._names[id(p)], p, self._stacks)
            for (name, part), before, gradient in zip(parts, samples, gradients, strict=True):
                named.append((name, "weights", SampledTensor(before)))
                if gradient is not None:
                    named.append((name, "gradients", SampledTensor(gradient)))
                    named.append(
                        (name, "updates", _update(part, before, gradient, self._sample_size(p)))
                    )
        return named


def _update(param: Tensor, before: Sample, gradient: Sample, most: int) -> SampledTensor:
    """Return the change that the step made to a parameter.

    Args:
        param: after the step.
        before: sample of the parameter from before the step.
        gradient: sample of its gradient, of the same elements.
        most: elements of these samples at most.
    """
    after = take_sample(param, most=most)
    # float64 weights differ by less than float32 resolves: subtract before narrowing.
    wide = torch.float64 if before.values.dtype is torch.float64 else torch.float32
    update = (after.values.to(wide) - before.values.to(wide)).float()
    sample = Sample(update, update.abs().amax(), before.elements)
    has_gradient = gradient.values != 0
    if before.values.itemsize >= 4:
        # float32 has swallowed an update of zero itself, or the learning rate is zero: that says
        # nothing about a narrower format. Half-precision weights are asked about such updates, too.
        has_gradient &= update != 0
    return SampledTensor(sample, before.values.float(), has_gradient)


class NumericsCallback(RunCallback):
    """Measures a run's tensors at an interval; only the first process has one.

    Args:
        state: of the training.
        every: optimizer steps between two measurements.
        output: the run's folder, tracker and console.
        label: of the run, the title of the report.
        note: of the user, tracking.note.
    """

    key = "numerics"

    def __init__(
        self, state: TrainState, every: int, output: RunOutput, label: str, note: str = ""
    ) -> None:
        self.state = state
        self.every = every
        self.output = output
        self.label = label
        self.note = note
        self.snapshots: list[NumericsSnapshot] = []
        self._probe = Probe(state, self._record)

    def around_step(self, step: int) -> AbstractContextManager[object] | None:
        """Return the context around a step: the probe where a measurement is due."""
        return self._probe if step % self.every == 0 else None

    @property
    def numerics(self) -> Numerics:
        """All measurements so far."""
        precision = self.state.precision
        return Numerics(
            self.every,
            precision.name,
            tensor_facts.dtype_name(precision.storage),
            tensor_facts.dtype_name(precision.compute),
            tuple(self.snapshots),
        )

    def _record(self, snapshot: NumericsSnapshot) -> None:
        """Keep a snapshot, and record the worst shares of its tensors as metrics."""
        self.snapshots.append(snapshot)
        # The worst module of each share: a mean over a whole model would hide one bad layer.
        numerics = self.numerics
        shares = [stats.formats[numerics.stored_in].swallowed for stats in snapshot.measured]
        swallowed = [share for share in shares if share is not None]
        # An update is added to a weight: it is lost by being swallowed, not by underflow.
        measured = [stats for stats in snapshot.measured if stats.kind != "updates"]
        losses = [numerics.quantization_loss(stats, numerics.computed_in) for stats in measured]
        values = {
            "numerics/underflow_share": max((lost.vanishing for lost in losses), default=0.0),
            "numerics/overflow_share": max((lost.overflow for lost in losses), default=0.0),
        }
        if swallowed:
            values["numerics/swallowed_share"] = max(swallowed)
        self.output.tracker.log_metrics([(snapshot.step, fmt.now_ms(), values)])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """On resume, read the snapshots up to the checkpoint's step from the run's folder."""
        # Later ones are measured again, of the steps that are trained again.
        with suppress(ConfigError):  # the file is missing or damaged: the report begins here
            earlier = read(self.output.out).probes
            self.snapshots = [snap for snap in earlier if snap.step <= self.state.step]

    def close(self) -> None:
        """Write the numerics report: numbers, heat maps and a page."""
        if not self.snapshots:
            self.output.say(f"warning: numerics.every={self.every}: no step was measured.")
            return
        # Matplotlib takes a second to import, which a run without measurements need not pay.
        from runner.diagnostics.numerics import numerics_page

        numerics = self.numerics
        output = self.output
        device = accelerators.Accelerator(self.state.device).name
        head = numerics_page.page_head(output, device, self.note)
        page = output.out / "numerics.html"
        output.save_artifact(output.out / layout.NUMERICS, numerics.write)
        output.save_artifact(
            page, lambda path: numerics_page.write_page(numerics, self.label, head, path)
        )
        answer, *lines = numerics_page.answer_lines(numerics)
        output.tracker.tags({"numerics": answer})
        output.say("\n  ".join([f"numerics: see {fmt.relative_path(page)}", answer, *lines]))
