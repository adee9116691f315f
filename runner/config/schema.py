"""The run spec: what one run does, frozen. Hydra validates overrides against these classes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runner.config.schema_advise import AdviseSpec

MODES = ("train", "evaluate", "plan", "replay", "advise")
ACTIONS = ("stop", "warn", "ignore")
AUTO = "auto"
"""checkpoint.resume: from the own folder; train.data_on_device: where it fits."""
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
COMPILE = ("default", *CUDA_GRAPHS, "max-autotune-no-cudagraphs", "regional")


@dataclass(frozen=True)
class TrainSpec:
    """How long and in what portions to train.

    Attributes:
        epochs: passes over the training data; ignored where max_steps is set.
        max_steps: optimizer steps in all (attempted, skipped ones included).
        max_seconds: the step that is under way when so much time has gone since the first one is
            the last, and is evaluated.
        batch_size: examples in a micro-batch, over all processes.
        accumulate: micro-batches per optimizer step.
        clip_norm: largest 2-norm of the unscaled gradients; null does not clip.
        eval_every: optimizer steps between evaluations; null evaluates at each epoch's end.
        log_every: optimizer steps between transfers of the records from the device.
        compile: run the model through torch.compile: true or default, a mode of torch's
            (reduce-overhead and max-autotune replay CUDA graphs), or regional for the repeated
            blocks alone, each kind compiled once.
        activation_checkpointing: keep the inputs of modules alone for the backward, and compute the
            rest anew there: true for the repeated blocks, or a list of patterns on modules' names.
        channels_last: keep 4-d tensors in channels-last memory format.
        data_on_device: hold data that is in memory on the device: true, false, or auto for a GPU
            of whose free memory it takes less than a tenth.
        num_workers: processes that load data; none for a TensorDataset or data held on the device.
        early_stop: evaluations without improvement before the run stops; null never stops.
    """

    epochs: int = 10
    max_steps: int | None = None
    max_seconds: float | None = None
    batch_size: int = 64
    accumulate: int = 1
    clip_norm: float | None = None
    eval_every: int | None = None
    log_every: int = 20
    compile: bool | str = False
    activation_checkpointing: Any = False
    channels_last: bool = False
    data_on_device: bool | str = "auto"
    num_workers: int = 0
    early_stop: int | None = None

    def problems(self) -> Iterator[str]:
        """What is wrong with the values that are words, one message each."""
        if self.max_seconds is not None and not self.max_seconds > 0:
            yield f"train.max_seconds={self.max_seconds} is no time. Allowed: above 0, or null."
        for key, words in (("compile", COMPILE), ("data_on_device", (AUTO,))):
            if (value := getattr(self, key)) not in (True, False, *words):
                allowed = ", ".join(("true, false", *words))
                yield f"train.{key}={value} is not known. Allowed: {allowed}."
        what = self.activation_checkpointing
        patterns = isinstance(what, list) and what and all(isinstance(p, str | int) for p in what)
        if not (isinstance(what, bool) or patterns):
            yield (
                f"train.activation_checkpointing={what} does not fit. Allowed: true, false, or "
                "modules' names as in [blocks,head]."
            )


@dataclass(frozen=True)
class InitSpec:
    """How parameters are made.

    Attributes:
        low_memory: on the device in the precision's dtype, which changes the seeded weights;
            otherwise in float32 on the CPU, and cast. A precision that packs weights keeps the
            seeded ones, in files until it packs them.
        weights: start from a checkpoint's weights: a file, a run's folder, or an MLflow run id.
    """

    low_memory: bool = False
    weights: str | None = None


@dataclass(frozen=True)
class CheckpointSpec:
    """What is kept on disk.

    Attributes:
        path: what mode=evaluate loads: a file, a run's folder, or an MLflow run id.
        resume: a run to go on with: `last` (the newest that was cut), or one of the same; `auto`
            goes on with what this run's own folder holds, and begins where that is nothing.
        every_steps: optimizer steps between checkpoints; null saves only at the end.
        keep: newest checkpoints that are kept.
        best: keep the one of the best evaluation, too, as `best.pt`.
        final: save one when the run ends or is stopped.
        safetensors: leave the weights as `model.safetensors` when the run ends.
    """

    path: str | None = None
    resume: str | None = None
    every_steps: int | None = None
    keep: int = 1
    best: bool = False
    final: bool = True
    safetensors: bool = False


@dataclass(frozen=True)
class AcceleratorSpec:
    """Where a run computes.

    Attributes:
        name: auto, cpu, cuda, mps or tpu.
        index: which device of that kind, from 0.
    """

    name: str = "auto"
    index: int = 0


@dataclass(frozen=True)
class DebugSpec:
    """Ways to look into a run; `debug=<preset>` sets them.

    Attributes:
        overfit: train and evaluate on this many examples of the training set.
        anomaly: autograd's anomaly mode.
        profile: optimizer steps to record with torch.profiler.
    """

    overfit: int | None = None
    anomaly: bool = False
    profile: int | None = None


@dataclass(frozen=True)
class GuardSpec:
    """What a run watches for; each finding stops it, warns or is ignored.

    Attributes:
        non_finite: a step without overflow whose loss or gradients are not finite.
        overflow: so many steps in a row that the loss scale skipped.
        overflow_steps: how many.
        scale_floor: a loss scale that falls under 1.
        spike: a loss so many times the median of the last 50, and twice the largest of them.
        spike_factor: how many.
        data: before training, inputs that are not finite, labels that are no class and sets
            without a label that counts.
    """

    non_finite: str = "stop"
    overflow: str = "stop"
    overflow_steps: int = 30
    scale_floor: str = "warn"
    spike: str = "warn"
    spike_factor: float = 10.0
    data: str = "stop"

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, one message each."""
        for key in ("non_finite", "overflow", "scale_floor", "spike", "data"):
            if (action := getattr(self, key)) not in ACTIONS:
                yield f"guard.{key}={action} is not known. Allowed: {', '.join(ACTIONS)}."
        if not self.spike_factor > 1:
            yield f"guard.spike_factor={self.spike_factor} is too small. Allowed: above 1."


@dataclass(frozen=True)
class NumericsSpec:
    """What is measured of the numbers themselves while a run trains.

    Attributes:
        every: optimizer steps between two looks at activations, weights, gradients and updates of
            every module; null never looks.
    """

    every: int | None = None


@dataclass(frozen=True)
class RunSpec:
    """One run. The group nodes (precision, model, ...) hold a `_target_` and its keywords."""

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
    numerics: NumericsSpec = field(default_factory=NumericsSpec)
    advise: AdviseSpec = field(default_factory=AdviseSpec)
    batch: str | None = None
    precision: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    tracking: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """What is wrong with the values themselves, one message each."""
        if self.mode not in MODES:
            yield f"mode={self.mode} is not known. Allowed: {', '.join(MODES)}."
        if self.mode == "evaluate" and self.checkpoint.path is None:
            yield "mode=evaluate needs what to load: checkpoint=<file, folder or run id>."
        if self.mode == "evaluate" and self.init.weights is not None:
            yield "mode=evaluate loads checkpoint=, not init.weights=. Leave init.weights= out."
        if self.mode != "evaluate" and self.checkpoint.path is not None:
            yield (
                f"mode={self.mode} does not load checkpoint={self.checkpoint.path}. Type "
                "init.weights=<it> to start from its weights, checkpoint.resume=<it> to go on with "
                "its run, or mode=evaluate."
            )
        if self.mode != "train" and self.checkpoint.resume is not None:
            yield f"mode={self.mode} resumes nothing. Leave checkpoint.resume= out."
        if (self.mode == "replay") != (self.batch is not None):
            yield (
                "debug=replay and batch= belong together: a batch that a run saved. Type "
                "debug=replay batch=outputs/runs/<time>/guard/batch-<step>.json."
            )
        if self.seed < 0:
            yield f"seed={self.seed} is negative. Allowed: 0 and up."
        if not isinstance(shuffle := self.data.get("shuffle", True), bool):
            yield f"data.shuffle={shuffle} does not fit. Allowed: true or false."
        if self.numerics.every is not None and self.train.compile:
            yield (
                f"numerics.every={self.numerics.every} watches modules by hooks, which "
                f"train.compile={str(self.train.compile).lower()} would compile in. "
                "Type train.compile=false."
            )
        yield from self.guard.problems()
        yield from self.advise.problems()
        yield from self.train.problems()
        yield from self._not_positive()

    def _not_positive(self) -> Iterator[str]:
        least_one = {
            "train": (
                "epochs",
                "max_steps",
                "batch_size",
                "accumulate",
                "eval_every",
                "log_every",
                "early_stop",
            ),
            "checkpoint": ("every_steps", "keep"),
            "debug": ("overfit", "profile"),
            "guard": ("overflow_steps",),
            "numerics": ("every",),
            "advise": ("steps",),
        }
        for part, keys in least_one.items():
            for key in keys:
                value = getattr(getattr(self, part), key)
                if value is not None and value < 1:
                    yield f"{part}.{key}={value} is too small. Allowed: 1 and up."
        clip = self.train.clip_norm
        if clip is not None and not clip > 0:
            yield f"train.clip_norm={clip} does not clip. Allowed: above 0, or null for none."
        if self.train.num_workers < 0:
            yield f"train.num_workers={self.train.num_workers} is negative. Allowed: 0 and up."


LARGEST_FORECAST_BATCH = 2**16
"""The largest batch size that is tried."""
