"""mode=plan device=<card>: what a precision holds, costs and gains on a card that is not here."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from runner.core import (
    ConfigError,
    ConversionPlan,
    ConversionReport,
    Fate,
    Precision,
    RunnerError,
    RunSpec,
    module_tree,
    targets,
    tensor_facts,
    terminal,
)
from runner.data.task_target import build_task
from runner.diagnostics.memory.forecast import build_rehearsal, largest_fitting_batch
from runner.diagnostics.memory.limits import USABLE_MEMORY_SHARE
from runner.diagnostics.memory.memory_tracker import (
    GRADIENTS,
    OPTIMIZER,
    TEMPORARIES,
    WEIGHTS,
    MemoryBreakdown,
)
from runner.diagnostics.module_tensors import tensors_in
from runner.planning.card_speed import (
    FIT,
    LAUNCH_SECONDS,
    StepSeconds,
    baseline_of,
    narrowest_width,
    product_format,
    recipe_change,
    recipe_of,
    speed_ratio,
    step_seconds,
)
from runner.planning.hardware_layers import as_on_hardware
from runner.planning.room import DeviceSpec, PlanSpec
from runner.planning.step_cost import StepCost, StepTracker
from runner.precision.registry import precision_config
from runner.training.example_batch import example_batch
from runner.training.tasks.language import Language

CPU = torch.device("cpu")


@dataclass(frozen=True)
class CardPlan:
    """What a precision does on a card, as plan.json has it.

    Attributes:
        precision, card: their names.
        settings: what a sweep varies beside them.
        reason: why it does not run there, or why its speed is not said; empty where it is.
        baseline: the precision that speeds are relative to.
        ratio: speed over the baseline's: the least, expected and greatest of the 80 % interval.
        most: the greatest ratio that there could be, with casts that take no time; None where no
            product changes its format.
        covered: share of the baseline's step in products that change their format.
        narrowest: width of a layer below which the format is slower.
        seconds: of an optimizer step: least, expected, greatest.
        parts: seconds of an expected step, by what they are for.
        hours: of train.max_steps: least, expected, greatest; None without it.
        price: of all cards for these hours.
        peak: bytes at the peak of one card, by kind.
        memory: bytes of the card.
        memory_of: the precision whose memory is planned in its place; empty for its own.
        largest_batch: examples of a micro-batch that fit one card; None where one does not.
        quality: verdict of trials, with how it was tested; empty where it was not.
        trains_worse: whether it measurably does.
        step_ratio: steps of the baseline to the loss of 32-true over those of the precision: the
            least, expected and greatest; 0 where it does not reach that loss; None where they were
            not compared.
    """

    precision: str
    card: str
    settings: str = ""
    reason: str = ""
    baseline: str = ""
    ratio: tuple[float, float, float] | None = None
    most: float | None = None
    covered: float = 0.0
    narrowest: float | None = None
    seconds: tuple[float, float, float] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    hours: tuple[float, float, float] | None = None
    price: tuple[float, float, float] | None = None
    peak: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.0
    memory_of: str = ""
    largest_batch: int | None = None
    quality: str = ""
    trains_worse: bool = False
    step_ratio: tuple[float, float, float] | None = None

    @property
    def place(self) -> str:
        """Return the card, with what else a sweep varies: plans of one place are compared."""
        return " ".join(filter(None, (self.card, self.settings)))

    @property
    def peak_gib(self) -> float:
        """Return the peak of one card in GiB."""
        return sum(self.peak.values()) / tensor_facts.GIB

    @property
    def fits(self) -> bool:
        """Return whether the configured micro-batch fits the card."""
        return sum(self.peak.values()) <= USABLE_MEMORY_SHARE * self.memory


class StepTrace(NamedTuple):
    """A step on tensors without values.

    Attributes:
        model: converted.
        timeline: what is held after each operator.
        cost: of the step, without the evaluation that may follow.
    """

    model: nn.Module
    timeline: Sequence[MemoryBreakdown]
    cost: StepCost


def plan_card(
    spec: RunSpec, precision: Precision, report: ConversionReport, found: ConversionPlan
) -> CardPlan:
    """Return what a precision does on the card of a spec's device section.

    Args:
        spec: of the run.
        precision: of the spec, which runs on the CPU, emulated if need be.
        report: of the conversion.
        found: by which the model is converted.

    Raises:
        ForecastUnavailable: data.meta does not give the shapes.
        ConfigError: the step does not run on tensors without values.
    """
    card, settings = spec.section(DeviceSpec), spec.section(PlanSpec)
    precision = planned_precision(spec, precision)
    size = spec.train.batch_size // settings.gpus
    baseline = baseline_of(card)
    # What computes beside converted layers, or all of it.
    plain = baseline.replace("mixed", "true") if precision.storage.itemsize == 2 else baseline
    try:
        memory = _memory(spec, precision, found, size)
    except ConfigError:
        if not recipe_of(precision):
            raise
        # Layers of experts want values; weights and activations are those of 16 bits.
        planned = _plain_spec(spec, plain)
        beside = targets.build_group("precision", planned.precision)
        memory = {**_memory(planned, beside, ConversionPlan(), size), "memory_of": plain}
    reason = _obstacle(precision, card, bool(spec.train.compile))
    known = CardPlan(precision.name, card.name or "", reason=reason, baseline=baseline, **memory)
    if reason:
        return known
    converted = report.names(Fate.CONVERTED) if precision.converts_layers else []
    single = replace(spec, train=replace(spec.train, accumulate=1))
    base = rehearse(_plain_spec(single, baseline), None, ConversionPlan(), size, converted)
    host = base
    if not precision.converts_layers and precision.name != baseline:
        host = rehearse(single, precision, found, size)
    elif precision.converts_layers and plain != baseline:
        host = rehearse(_plain_spec(single, plain), None, ConversionPlan(), size, converted)
    return replace(known, **_speed(spec, precision, host, base))


def planned_precision(spec: RunSpec, precision: Precision) -> Precision:
    """Return a precision as a card computes it: emulated products hold more than its own, and so do
    emulated layers that are fused with their norms, which are planned apart."""
    if precision.emulated and not precision.converts_layers:
        return targets.build_group("precision", {**spec.precision, "emulate": False})
    if spec.precision.get("fuse"):
        return targets.build_group("precision", {**spec.precision, "fuse": False})
    return precision


def rehearse(
    spec: RunSpec,
    precision: Precision | None,
    found: ConversionPlan,
    size: int,
    watched: Collection[str] = (),
    evaluates: bool = False,
) -> StepTrace:
    """Rehearse a step on tensors without values.

    Args:
        spec: of the run.
        precision: that the model is converted by; None for the spec's own.
        found: by which it is converted.
        size: examples of a micro-batch.
        watched: modules whose products are noted.
        evaluates: whether an evaluation follows the step.

    Raises:
        ConfigError: its operators want values.
    """
    own: Precision = precision or targets.build_group("precision", spec.precision)

    def micro_batches(count: int) -> list[Any]:
        # Further ones hold what the second does.
        return [example_batch(spec, count, CPU) for _ in range(min(spec.train.accumulate, 2))]

    # Operators without a rule for such tensors would log a traceback each.
    quiet = terminal.suppress_warnings(logging.ERROR)
    try:
        rehearsal = build_rehearsal(spec, own, CPU, found, micro_batches, fake=True)
        model = rehearsal.state.plain_model
        gradients: dict[str, int] = {}
        has_gradient = dict.fromkeys(watched, False)
        modules = dict(model.named_modules())
        with as_on_hardware(model, own) as tape, _NoDropout(), quiet:

            def begin(name: str, call: Any) -> None:
                has_gradient[name] |= any(tensor.requires_grad for tensor in tensors_in(call))

            for name in watched:
                # A stack of experts is named by its weight.
                module = modules.get(name) or modules[name.rpartition(".")[0]]
                weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
                gradients[name] = int(any(p.requires_grad for p in weights))
                tape.watch_calls(name, module, begin, recomputed=True)

            def tracker(**options: Any) -> StepTracker:
                return StepTracker(tape.running, **options)

            rehearsal = replace(rehearsal, tracker=tracker, making=(), evaluates=evaluates)
            tracked: Any = rehearsal.track(size)
    except RunnerError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"device={spec.section(DeviceSpec).name}: a step of {size} examples with precision="
            f"{own.name} and optimizer={spec.optimizer.get('_target_')} does not run on "
            f"tensors without values: {reason.rstrip('.')}. Type another one, optimizer=adamw, or "
            "mode=plan without device=, which takes real steps."
        ) from error
    counts = {name: count + has_gradient[name] for name, count in gradients.items()}
    return StepTrace(model, tracked.timeline, StepCost.of_operators(tracked.operators, counts))


class _NoDropout(TorchFunctionMode):
    """A context in which attention has no dropout, for which a CPU has no fused kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention and len(args) < 5:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _plain_spec(spec: RunSpec, name: str) -> RunSpec:
    """Return the spec in another precision, with the keys that both have."""
    node = precision_config(name)
    shared = {key: value for key, value in spec.precision.items() if key in ("keep_fp32", "update")}
    return replace(spec, precision={**node, **{k: v for k, v in shared.items() if k in node}})


def _obstacle(precision: Precision, card: DeviceSpec, is_compiled: bool) -> str:
    """Return why a precision does not run on a card, or why its speed there is not said."""
    recipe = recipe_of(precision)
    needed = recipe.number_format if recipe else product_format(precision)
    if needed not in card.tflops:
        return f"it lacks {needed} products"
    least, limit = precision.capabilities if recipe else ((), ())  # type: ignore[attr-defined]
    own = tuple(card.capability or ())
    if least and (own < least or (limit and own >= limit)):
        text = f"it needs an NVIDIA GPU of compute capability {'.'.join(map(str, least))} or higher"
        return text + (f", below {'.'.join(map(str, limit))}" if limit else "")
    if recipe and recipe.needs_compile and not is_compiled:
        return "its speed is not said without train.compile=true, with which it is trained"
    if needed == "float64" or (precision.converts_layers and not recipe):
        return "its speed is not said, for no published step supports it"
    return ""


def _memory(
    spec: RunSpec, precision: Precision, found: ConversionPlan, size: int
) -> dict[str, Any]:
    """Return the fields of a CardPlan on memory, for micro-batches of so many examples."""
    card, settings = spec.section(DeviceSpec), spec.section(PlanSpec)
    is_sharded = settings.gpus > 1 and settings.strategy == "fsdp"
    # The same operators on twice the examples: each moment of a step is a line in their number. Of
    # a single one some operators copy nothing.
    first = max(size, 2)
    small, large = (
        rehearse(spec, precision, found, count, (), not is_sharded) for count in (first, 2 * first)
    )
    least, more = (torch.tensor(each.timeline, dtype=torch.float64) for each in (small, large))
    if len(least) != len(more):
        raise ConfigError(
            f"device={card.name}: steps of {first} and {2 * first} examples differ in their "
            "operators, so that no other size is predicted. Type another train.batch_size."
        )
    shares = torch.ones(least.shape[1], dtype=torch.float64)
    gathered = 0.0
    if is_sharded:
        shares[[WEIGHTS, OPTIMIZER]] /= settings.gpus
        if spec.train.accumulate == 1:  # FSDP shares gradients once all are added up
            shares[GRADIENTS] /= settings.gpus
        model = small.model
        blocks = [tensor_facts.stored_bytes(each) for each in module_tree.repeated_blocks(model)]
        whole = tensor_facts.stored_bytes(model)
        # The block that computes and the next one, with the gradients of one; and what is in none.
        gathered = whole - sum(blocks) + 3 * max(blocks, default=0)
        if precision.loses_updates:
            # For an evaluation the weights are copied, and where they have gradients is noted.
            gathered += 1.5 * whole / settings.gpus

    def peak(count: int) -> MemoryBreakdown:
        moments = (least + (more - least) * (count - first) / first) * shares
        moments[:, TEMPORARIES] += gathered
        return MemoryBreakdown(*map(int, moments[moments.sum(1).argmax()]))

    memory = card.memory_gib * tensor_facts.GIB
    return {
        "memory": memory,
        "peak": peak(size)._asdict(),
        "largest_batch": largest_fitting_batch(peak, size, USABLE_MEMORY_SHARE * memory),
    }


def _speed(spec: RunSpec, precision: Precision, host: StepTrace, base: StepTrace) -> dict[str, Any]:
    """Return the fields of a CardPlan on speed and price.

    Args:
        spec: of the run.
        precision: of the run.
        host: its step, but for converted layers, which compute in 16 bits and are watched.
        base: the step of the baseline.
    """
    card, settings = spec.section(DeviceSpec), spec.section(PlanSpec)
    recipe = recipe_of(precision) if precision.converts_layers else None
    is_fused = bool(spec.train.compile)
    baseline = _step(spec, base, step_seconds(base.cost, card, False, is_fused))
    fields: dict[str, Any] = {}
    if recipe:
        plain = step_seconds(host.cost, card, False, is_fused and settings.fuses)
        change = recipe_change(host.cost, card, recipe)
        step = _step(spec, host, replace(plain, gain=change.gain, casts=change.casts))
        count = spec.train.accumulate
        fields["covered"] = count * change.covered / baseline.total
        least = step.total + step.gain - step.casts - count * change.limit
        fields["most"] = baseline.total / least
        fields["narrowest"] = narrowest_width(card, recipe)
    else:
        tf32 = product_format(precision) == "tf32"
        step = _step(spec, host, step_seconds(host.cost, card, tf32, is_fused))
    launches = LAUNCH_SECONDS * max(base.cost.operators, host.cost.operators)
    if not is_fused and launches * spec.train.accumulate > min(step.total, baseline.total):
        reason = "its speed is not said, for launching operators takes longer than they do"
        return {"reason": reason, "parts": vars(step)}
    low, value, high = speed_ratio(baseline.total, step)
    if host is base and not recipe:
        low = high = value
    ratio = low, value, min(high, fields.get("most", high))
    if settings.anchor:
        count = spec.train.batch_size * spec.train.accumulate * _tokens_of_example(spec)
        time = count / (settings.anchor * settings.gpus)
        seconds = (time / ratio[2], time / ratio[1], time / ratio[0])
    else:
        ends = (FIT.fastest * step.total, FIT.slowest * step.total)
        seconds = (ends[0], (ends[0] * ends[1]) ** 0.5, ends[1])
    if spec.train.max_steps:
        hours = [spec.train.max_steps * each / 3600 for each in seconds]
        fields["hours"] = hours
        if card.price is not None:
            fields["price"] = [card.price * settings.gpus * each for each in hours]
    return fields | {"ratio": ratio, "seconds": seconds, "parts": vars(step)}


def _step(spec: RunSpec, rehearsed: StepTrace, micro: StepSeconds) -> StepSeconds:
    """Return the time of a step of all micro-batches on all cards, from that of one.

    Args:
        spec: of the run.
        rehearsed: whose weights and gradients go over the link.
        micro: one micro-batch and the update, on one card.
    """
    card, settings = spec.section(DeviceSpec), spec.section(PlanSpec)
    update = micro.update
    step = StepSeconds(**{k: spec.train.accumulate * v for k, v in vars(micro).items()})
    if settings.gpus > 1:
        parameters = [*rehearsed.model.parameters()]
        # Gradients are added up in float32.
        reduced = sum(4 * p.numel() for p in parameters if p.requires_grad)
        if settings.strategy == "fsdp":
            update /= settings.gpus
            # They end in shards; weights are gathered for each forward and each backward.
            gathers = 2 * spec.train.accumulate * tensor_facts.tensor_bytes(*parameters)
            sent = reduced + gathers
        else:
            sent = 2 * reduced
        seconds = sent * (1 - 1 / settings.gpus) / (1e9 * card.link)
        step = replace(step, waiting=max(seconds - (step.total - step.update), 0))
    return replace(step, update=update)


def _tokens_of_example(spec: RunSpec) -> int:
    """Return the tokens of an example; 1 where examples are no sequences of tokens."""
    return spec.data["meta"]["input"][0] if isinstance(build_task(spec.task), Language) else 1
