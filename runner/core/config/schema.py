"""Define the run spec: frozen dataclasses that state what one run does.

Hydra checks the types of overrides against these classes; `problems()` checks the values. Each
entry under Attributes is the text of its key in docs/commands.md, so it must be clear by itself.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, ClassVar, TypeVar

from omegaconf import OmegaConf

from runner.core.base.errors import count_problems, nearest_names
from runner.core.base.fmt import leaves
from runner.core.base.secrets import redact_values
from runner.core.config.room import Mode, Room

T = TypeVar("T")

GUARD_ACTIONS = ("stop", "warn", "ignore")
COMPILE_ROUNDINGS = ("fused", "eager")
"""Values of train.compile_rounding."""


@dataclass(frozen=True)
class TrainSpec:
    """Length of a training, its batches, and how the model is run.

    Attributes:
        epochs: passes over the training data; ignored if train.max_steps is set.
        max_steps: number of optimizer steps, including those that the loss scale skips; null trains
            for train.epochs.
        max_seconds: seconds of training after which the run stops; the current step is finished and
            evaluated; null sets no limit; for a run of one process.
        batch_size: examples in a micro-batch, summed over all processes.
        accumulate: micro-batches whose gradients are accumulated for one optimizer step.
        accumulate_float32: add micro-batches' gradients of 16-bit weights in float32, which takes 2
            more bytes a weight; false adds them in the weights' dtype.
        clip_norm: largest 2-norm of the unscaled gradients, to which larger ones are scaled down;
            null does not clip.
        clip_value: largest magnitude of each element of the unscaled gradients, to which larger
            ones are set; null does not clip; not together with train.clip_norm.
        ema: decay of an exponential moving average of the weights, above 0 and below 1, which the
            evaluations use and checkpoints hold beside the weights; null averages nothing.
        freeze: patterns of dotted names of parameters or modules that do not train, as in
            [embeddings,*.norm].
        eval_every: optimizer steps between evaluations; null evaluates at the end of each epoch.
        log_every: optimizer steps between transfers of the metrics from the device to the host.
        compile: compile the model with torch.compile: true or default, another mode of
            torch.compile (reduce-overhead, max-autotune, max-autotune-no-cudagraphs; the first two
            replay CUDA graphs), or regional, which compiles each kind of repeated block once; false
            does not compile.
        compile_rounding: how compiled operations that are fused into one kernel round half
            precision between them: fused, which leaves these roundings out as torch.compile does
            by default, or eager, which rounds after each operation as the uncompiled model does.
        activation_checkpointing: keep only the inputs of modules for the backward pass, which
            computes their activations again: true for the repeated blocks, or a list of patterns
            of module names, as in [blocks,head].
        channels_last: keep 4-d tensors in channels-last memory format.
        data_on_device: keep an in-memory data set on the device: true, false, or auto, which does
            so on a CUDA GPU if the data take less than a tenth of its free memory.
        num_workers: processes that load data; none are started for a TensorDataset or for data on
            the device, and at most 1 can read a stream (an IterableDataset).
        early_stop: evaluations in a row without improvement after which the run stops; null never
            stops early.
    """

    CUDA_GRAPH_MODES: ClassVar = ("reduce-overhead", "max-autotune")
    """Modes of torch.compile that replay CUDA graphs."""

    epochs: int = 10
    max_steps: int | None = None
    max_seconds: float | None = None
    batch_size: int = 64
    accumulate: int = 1
    accumulate_float32: bool = True
    clip_norm: float | None = None
    clip_value: float | None = None
    ema: float | None = None
    freeze: list[str] = field(default_factory=list)
    eval_every: int | None = None
    log_every: int = 20
    compile: bool | str = False
    compile_rounding: str = "fused"
    activation_checkpointing: Any = False
    channels_last: bool = False
    data_on_device: bool | str = "auto"
    num_workers: int = 0
    early_stop: int | None = None

    def problems(self) -> Iterator[str]:
        """Yield a message for each value that the types allow and training does not."""
        for key in ("clip_norm", "clip_value"):
            limit = getattr(self, key)
            if limit is not None and not limit > 0:
                yield f"train.{key}={limit} does not clip. Allowed: above 0, or null for none."
        if self.clip_norm is not None and self.clip_value is not None:
            both = f"train.clip_norm={self.clip_norm} and train.clip_value={self.clip_value}"
            yield f"{both} exclude each other. Type one of them as null."
        if self.ema is not None and not 0 < self.ema < 1:
            yield f"train.ema={self.ema} is no decay. Allowed: above 0 and below 1, or null."
        if not all(isinstance(pattern, str) and pattern for pattern in self.freeze):
            yield f"train.freeze={self.freeze} does not fit. Allowed: names, as in [blocks,head]."
        # `not x > 0` instead of `x <= 0`: it is true for NaN, too.
        if self.max_seconds is not None and not self.max_seconds > 0:
            yield f"train.max_seconds={self.max_seconds} must be above 0, or null."
        rounding = f"train.compile_rounding={self.compile_rounding}"
        if self.compile_rounding not in COMPILE_ROUNDINGS:
            yield f"{rounding} is not known. Allowed: {', '.join(COMPILE_ROUNDINGS)}."
        elif self.compile_rounding == "eager" and not self.compile:
            yield (
                f"{rounding} is for a compiled model, and train.compile=false compiles nothing. "
                "Type train.compile=default, or leave train.compile_rounding out."
            )
        modes = ("default", *self.CUDA_GRAPH_MODES, "max-autotune-no-cudagraphs", "regional")
        for key, words in (("compile", modes), ("data_on_device", ("auto",))):
            value = getattr(self, key)
            if value not in (True, False, *words):
                allowed = ", ".join(("true, false", *words))
                yield f"train.{key}={value} is not known. Allowed: {allowed}."
        modules = self.activation_checkpointing
        # OmegaConf cannot type "bool or list", and a module's name may be a number, as in [0,1].
        is_list = isinstance(modules, list) and len(modules) > 0
        is_pattern_list = is_list and all(isinstance(item, str | int) for item in modules)
        if not (isinstance(modules, bool) or is_pattern_list):
            key = "train.activation_checkpointing"
            yield f"{key}={modules} does not fit. Allowed: true, false, names as in [blocks,head]."


@dataclass(frozen=True)
class InitSpec:
    """Where the parameters of a model come from.

    Attributes:
        low_memory: make the parameters on the device in the precision's dtype, which changes the
            seeded weights; false makes them in float32 on the CPU and casts them.
        weights: weights that the model starts from: a checkpoint, run folder or MLflow run id of
            this runner, a .safetensors file, a state dict of torch.save (.pt, .pth, .bin) or a
            folder of save_pretrained; null starts from seeded weights.
        skip: patterns of dotted names of parameters or modules, as in [head], that keep their fresh
            values, and of names in the file that are not used.
        rename: prefixes of names in the file and what stands in their place in the model, as in
            {backbone:encoder}; null removes a prefix, as in {module:null}; * puts one in front of
            every name, as in {*:model}; several apply one after the other.
    """

    low_memory: bool = False
    weights: str | None = None
    skip: list[Any] = field(default_factory=list)
    rename: dict[Any, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """Yield a message for each key that has no weights to apply to, or a wrong value."""
        for key in ("skip", "rename"):
            if getattr(self, key) and self.weights is None:
                yield f"init.{key} applies to init.weights, which is not given. Leave it out."
        if not all(isinstance(pattern, str | int) and pattern != "" for pattern in self.skip):
            yield f"init.skip={self.skip} does not fit. Allowed: names, as in [head,*.norm]."
        for old, new in self.rename.items():
            if not isinstance(old, str | int) or not isinstance(new, str | int | None):
                allowed = "prefixes of names, as in {backbone:encoder} or {module:null}"
                yield f"init.rename={self.rename} does not fit. Allowed: {allowed}."


@dataclass(frozen=True)
class CheckpointSpec:
    """Checkpoints that a run loads and those that it saves.

    Attributes:
        path: checkpoint that mode=evaluate loads: a file, a run folder or an MLflow run id;
            `checkpoint=` is short for it.
        resume: run to resume: `last` (the newest interrupted run), a file, a run folder or an
            MLflow run id; `auto` resumes from this run's own folder if it has a checkpoint, else
            starts from the beginning; null starts a new run.
        every_steps: optimizer steps between checkpoints; null saves only at the end.
        keep: number of newest checkpoints to keep; older ones are deleted.
        best: also keep the checkpoint of the best evaluation, as `best.pt`.
        final: save a checkpoint when the run ends or is stopped.
        safetensors: write the weights as `model.safetensors` when the run ends.
        adapter: write a LoRA adapter as a folder of peft, `adapter/`, when a run with adapter=lora
            ends.
        pretrained: write a model of transformers as a folder that from_pretrained loads,
            `pretrained/`, when the run ends, with packed weights unpacked and an adapter merged.
    """

    path: str | None = None
    resume: str | None = None
    every_steps: int | None = None
    keep: int = 1
    best: bool = False
    final: bool = True
    safetensors: bool = False
    adapter: bool = True
    pretrained: bool = False


@dataclass(frozen=True)
class AcceleratorSpec:
    """Device that a run computes on.

    Attributes:
        name: kind of device: auto (the best one of the machine), cpu, cuda, mps or tpu.
        index: number of the device among those of its kind, from 0.
    """

    name: str = "auto"
    index: int = 0


@dataclass(frozen=True)
class DebugSpec:
    """Diagnostic settings of a run; each option of `debug=` sets some of them.

    Attributes:
        overfit: number of training examples that the run trains and evaluates on, in place of all
            data; null uses all data.
        anomaly: use autograd's anomaly mode, which names the operation that made a NaN; slow.
        profile: number of optimizer steps to record with torch.profiler; null records none.
    """

    overfit: int | None = None
    anomaly: bool = False
    profile: int | None = None


@dataclass(frozen=True)
class GuardSpec:
    """Action for each kind of failure that a run's guard looks for: stop, warn or ignore.

    Attributes:
        non_finite: action (stop, warn or ignore) if the loss or the gradients of a step are not
            finite; steps that the loss scale skips do not count.
        overflow: action (stop, warn or ignore) if guard.overflow_steps consecutive steps overflow,
            so that the loss scale skips all of them.
        overflow_steps: number of consecutive overflowing steps at which guard.overflow acts.
        scale_floor: action (stop, warn or ignore) if the loss scale falls below 1.
        spike: action (stop, warn or ignore) if a loss exceeds guard.spike_factor times the running
            median of the last 50 losses, twice the largest of them, and half of the way from the
            median to the run's first loss, which counts as 100 times the second at most.
        spike_factor: factor above the running median of the loss at which guard.spike acts.
        data: action (stop, warn or ignore) if a check before training finds inputs that are not
            finite, labels outside the classes, or a data set none of whose labels counts.
    """

    non_finite: str = "stop"
    overflow: str = "stop"
    overflow_steps: int = 30
    scale_floor: str = "warn"
    spike: str = "warn"
    spike_factor: float = 10.0
    data: str = "stop"

    def problems(self) -> Iterator[str]:
        """Yield a message for each action or factor that is not allowed."""
        for key in ("non_finite", "overflow", "scale_floor", "spike", "data"):
            action = getattr(self, key)
            if action not in GUARD_ACTIONS:
                yield f"guard.{key}={action} is not known. Allowed: {', '.join(GUARD_ACTIONS)}."
        if not self.spike_factor > 1:
            yield f"guard.spike_factor={self.spike_factor} is too small. Allowed: above 1."


_AT_LEAST_ONE = (
    ("train", ("epochs", "max_steps", "batch_size", "accumulate")),
    ("train", ("eval_every", "log_every", "early_stop")),
    ("checkpoint", ("every_steps", "keep")),
    ("debug", ("overfit", "profile")),
    ("guard", ("overflow_steps",)),
)
"""Sections with keys that count something: null or at least 1."""


@dataclass(frozen=True)
class RunSpec:
    """All settings of one run. A group (precision, model, ...) holds a `_target_` and its keywords.

    The keys of rooms (numerics, diff, ...) are in `sections`; see runner.core.config.room.

    Attributes:
        mode: what the command does: train, evaluate, plan, explain, replay, diff, mismatch,
            advise or gate.
        seed: seed of Python's, NumPy's and torch's generators and of the order of training data.
        deterministic: stop at operations whose result can differ between runs.
        vars: values of your own, as in vars.size=3, which any yaml reads as ${vars.size}; the
            runner itself does not use them.
    """

    AUTO: ClassVar = "auto"
    """Value of checkpoint.resume and train.data_on_device that leaves the choice to the run."""
    PRECISION_ALIASES: ClassVar = {
        "64": "64-true",
        "32": "32-true",
        "16": "16-mixed",
        "bf16": "bf16-mixed",
    }

    mode: str = "train"
    seed: int = 0
    deterministic: bool = False
    train: TrainSpec = field(default_factory=TrainSpec)
    init: InitSpec = field(default_factory=InitSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    accelerator: AcceleratorSpec = field(default_factory=AcceleratorSpec)
    strategy: dict[str, Any] = field(default_factory=dict)
    debug: DebugSpec = field(default_factory=DebugSpec)
    guard: GuardSpec = field(default_factory=GuardSpec)
    vars: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    tracking: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Return whether the mode trains."""
        return Mode.named(self.mode).trains

    def section(self, kind: type[T]) -> T:
        """Return a room's section, by its class; with its defaults where the spec has none."""
        found = (value for value in self.sections.values() if isinstance(value, kind))
        return next(found, None) or kind()

    def value(self, key: str) -> Any:
        """Return a room's single value, by its key; None where the spec has none."""
        return self.sections.get(key)

    def with_value(self, key: str, value: Any) -> "RunSpec":
        """Return the spec with another single value of a room."""
        return replace(self, sections={**self.sections, key: value})

    def to_dict(self) -> dict[str, Any]:
        """Return all keys as plain containers, the sections of rooms among them."""
        values = asdict(self)
        return values | values.pop("sections")

    def redacted_dict(self) -> dict[str, Any]:
        """Return all keys as plain containers without secrets, to store or show them."""
        return redact_values(self.to_dict())

    def flat(self) -> dict[str, str]:
        """Return the spec without secrets as dotted keys and texts, the form of MLflow's params."""
        return {key: str(value) for key, value in leaves(self.redacted_dict())}

    def to_yaml(self) -> str:
        """Return the spec as YAML, without its secrets."""
        return OmegaConf.to_yaml(OmegaConf.create(self.redacted_dict()))

    def mode_problems(self) -> Iterator[str]:
        """Yield a message for an unknown mode, and for each key that contradicts the mode."""
        modes = Mode.all()
        names = [*modes]
        if self.mode not in names:
            near = "".join(f" Type mode={name}." for name in nearest_names(self.mode, names))
            yield f"mode={self.mode} is not known.{near} Allowed: {', '.join(names)}."
        for mode in modes.values():
            yield from mode.key_problems(self)

    def problems(self) -> Iterator[str]:
        """Yield a message for each value, or pair of values, that cannot run."""
        yield from self.mode_problems()
        # Others are made from it, seed * 1_000_003 + epoch for example, and torch takes 64 bits.
        if not 0 <= self.seed < 2**43:
            yield f"seed={self.seed} is out of range. Allowed: 0 to {2**43 - 1}."
        shuffle = self.data.get("shuffle", True)
        if not isinstance(shuffle, bool):
            yield f"data.shuffle={shuffle} does not fit. Allowed: true or false."
        yield from self.guard.problems()
        yield from self.train.problems()
        yield from self.init.problems()
        for section, keys in _AT_LEAST_ONE:
            yield from count_problems(section, getattr(self, section), keys)
        for section in self.sections.values():
            if is_dataclass(section):
                yield from section.problems(self)  # type: ignore[attr-defined]
        if self.train.num_workers < 0:
            yield f"train.num_workers={self.train.num_workers} is negative. Allowed: 0 and up."

    def all_problems(self) -> Iterator[str]:
        """Yield the message of each problem, those that rooms find included."""
        yield from self.problems()
        for room in Room.installed:
            yield from room.problems(self)
