"""Describe a training of another trainer: its model, its optimizer, and its real precision.

A trainer's setting says little: Accelerate's fp16 computes in float32 on a CPU, Lightning's
16-mixed becomes bf16-mixed there, and transformers loads weights in their checkpoint's dtype.

Beside it what the modules of all trainers share: the keyword arguments of their callbacks, the
errors of a training that cannot be recorded, and the watch on a method where a library has no hook.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.core import (
    ConfigError,
    LossScale,
    TrainState,
    Unavailable,
    accelerators,
    metric_names,
    refuse,
    tensor_facts,
    train_state,
)
from runner.integrations.steps import scale_value
from runner.precision.registry import load_precision, precision_names
from runner.training.tasks.model_loss import ModelLoss

_GROUP_NAME = re.compile(r"\w[\w .-]*")


@dataclass(frozen=True)
class RecordSettings:
    """Where and how a training of another trainer is recorded.

    Attributes:
        folder: of the run; None makes outputs/runs/<time>, or a number in the group's folder. One
            that holds a run is continued by a resumed training.
        group: name of a comparison: its runs are the jobs of outputs/groups/<group>.
        name: stands after the precision in tables; None takes the trainer's name. Runs of one
            precision and name count as repetitions.
        expected: the precision that was asked for, where the trainer does not tell; a run in
            another one warns.
        quality: name of the evaluations' metric that runs are compared by.
        direction: "max" where a greater quality is better, "min" where a smaller one is.
        log_every: optimizer steps whose values are copied from the device together.
        numerics_every: optimizer steps between two measurements of all tensors; None measures
            none.
        tracking_uri: MLflow's store; None takes MLFLOW_TRACKING_URI, then
            sqlite:///outputs/mlflow.db.
        experiment: in the store; None takes MLFLOW_EXPERIMENT_NAME, then "precision-runner".
        patience: seconds that the end of a run waits for a store that does not answer.
    """

    folder: str | Path | None = None
    group: str | None = None
    name: str | None = None
    expected: str | None = None
    quality: str = metric_names.VAL_LOSS
    direction: Literal["max", "min"] = "min"
    log_every: int = 20
    numerics_every: int | None = None
    tracking_uri: str | None = None
    experiment: str | None = None
    patience: float = 60.0

    @classmethod
    def checked(cls, owner: str, options: Mapping[str, Any]) -> "RecordSettings":
        """Return the settings of a callback's keyword arguments.

        Args:
            owner: name of the callback's class, for messages.
            options: the keyword arguments.

        Raises:
            ConfigError: with every problem found.
        """
        allowed = [field.name for field in fields(cls)]
        unknown = [key for key in options if key not in allowed]
        if unknown:
            raise ConfigError(
                f"{owner}({unknown[0]}=...) is not known. Allowed: {', '.join(allowed)}."
            )
        given = cls(**options)
        steps = "it is a number of steps, 1 or more."
        folder = (
            "it becomes a folder in outputs/groups. Type letters, digits, '-', '_', '.' and "
            "spaces, for example group='digits'."
        )
        quality = f"evaluations are recorded under val/. Type quality='val/{given.quality}'."
        place = "its folder is there, which folder= contradicts. Leave one of them out."
        allowed_names = f"allowed are {', '.join(precision_names())}."
        measures = given.numerics_every is not None
        rules = (
            ("log_every", _is_count(given.log_every), steps),
            ("numerics_every", not measures or _is_count(given.numerics_every), steps),
            ("expected", given.expected in (None, *precision_names()), allowed_names),
            ("quality", given.quality.startswith("val/"), quality),
            ("direction", given.direction in ("max", "min"), "allowed are 'max' and 'min'."),
            ("group", given.group is None or _GROUP_NAME.fullmatch(given.group), folder),
            ("group", given.group is None or given.folder is None, place),
        )
        refuse(
            f"{owner}({key}={getattr(given, key)!r}): {remedy}"
            for key, fits, remedy in rules
            if not fits
        )
        return given


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_WORD_BY_DTYPE = {"float16": "16", "bfloat16": "bf16", "float32": "32", "float64": "64"}
_UNSEEN_LABELS = ("fp8-mixed", "transformer-engine", "transformer-engine-float16")
"""Precisions whose products are no operators of torch, so that no probe sees their dtypes."""

_REASONS = {"tf32": "torch is set to run float32 products in TF32 in this process."}
"""Why another precision runs, where the trainer is not known to be the cause; by its label."""

_SHARDING = {
    *("FSDP", "DEEPSPEED", "MEGATRON_LM"),  # of Accelerate
    *("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"),  # of Lightning
}


@dataclass(frozen=True)
class PrecisionRequest:
    """The precision that a trainer was asked for.

    Attributes:
        setting: as the user typed it, for example "TrainingArguments(fp16=True)".
        label: the runner's name of it, for example "16-mixed".
        reasons: why the trainer runs another precision instead, by that precision's label.
    """

    setting: str
    label: str
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDtypes:
    """The dtypes of a training's first step.

    Attributes:
        label: the runner's name of the precision.
        computes: names of the dtypes that matrix products and convolutions took, sorted.
        stores: name of the dtype that holds most of the model's elements.
        has_scale: an enabled GradScaler scaled the loss.
        is_observed: False where no probe sees the dtypes: of a compiled model, of FP8 products.
    """

    label: str
    computes: tuple[str, ...] = ()
    stores: str = ""
    has_scale: bool = False
    is_observed: bool = True


def step_dtypes(
    rows: Sequence[Mapping[str, str]], model: nn.Module, has_scale: bool, request: PrecisionRequest
) -> StepDtypes:
    """Return the dtypes of a step, from the rows of a DtypeProbe that watched it.

    Args:
        rows: of the probe; empty for a compiled model, for which the request counts.
        model: the model after the step.
        has_scale: an enabled GradScaler scaled the loss.
        request: what the trainer was asked for.
    """
    elements: Counter[str] = Counter()
    for param in model.parameters():
        elements[tensor_facts.dtype_name(param.dtype)] += param.numel()
    stores = max(elements, key=elements.__getitem__, default="float32")
    counts = Counter(name for row in rows for name in row["computes"].split())
    if not counts or request.label in _UNSEEN_LABELS:
        return StepDtypes(request.label, (), stores, has_scale, False)
    # Under autocast norms and embeddings compute in float32: one half dtype names the precision.
    halves = [name for name, _ in counts.most_common() if name in ("float16", "bfloat16")]
    compute = halves[0] if halves else counts.most_common(1)[0][0]
    kind = "mixed" if halves and stores != compute else "true"
    label = f"{_WORD_BY_DTYPE.get(compute, compute)}-{kind}"
    first = next(model.parameters(), None)
    if label == "32-true" and first is not None and first.is_cuda:
        # The older switches raise where a trainer has set this one.
        label = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else label
    return StepDtypes(label, tuple(sorted(counts)), stores, has_scale)


def substitution_text(request: PrecisionRequest, dtypes: StepDtypes) -> str:
    """Return a sentence on what the trainer replaced silently; empty where it replaced nothing."""
    if not dtypes.is_observed:
        return ""
    if dtypes.label == request.label:
        if dtypes.label == "16-mixed" and not dtypes.has_scale:
            return "float16 was computed without a loss scale: small gradients become zero."
        if dtypes.label.endswith("-mixed") and dtypes.stores not in ("float32", "float64"):
            return f"{dtypes.label} has its weights in {dtypes.stores}, not in float32."
        return ""
    words = "a loss scale" if dtypes.has_scale else "no loss scale"
    reason = request.reasons.get(dtypes.label, _REASONS.get(dtypes.label, ""))
    return (
        f"{request.setting} asks for {request.label}, and the first step computed in "
        f"{' and '.join(dtypes.computes)} with weights in {dtypes.stores} and {words}: the run is "
        f"recorded as {dtypes.label}. {reason}"
    ).rstrip()


def numeric_switches() -> dict[str, Any]:
    """Return torch's process-wide switches that change the numbers of a step, by name."""
    cuda = torch.backends.cuda.matmul
    return {
        "cuda_matmul_fp32_precision": cuda.fp32_precision,
        "cudnn_conv_fp32_precision": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "cpu_matmul_fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "fp16_reduced_precision_reduction": cuda.allow_fp16_reduced_precision_reduction,
        "bf16_reduced_precision_reduction": cuda.allow_bf16_reduced_precision_reduction,
    }


@dataclass(frozen=True)
class TrainingSource:
    """A training that another trainer runs.

    Attributes:
        trainer: the library's name, for example "transformers".
        request: the precision that it was asked for.
        model: without the trainer's wrappers.
        optimizer: torch's own, without the trainer's wrapper.
        scaler: scales the loss; None for none.
        arguments: the trainer's settings, for config.yaml and MLflow's params.
        seed: of the training; None where it is not known.
        start_step: optimizer steps before this training; 0 unless it is resumed.
        planned_steps: of the whole training; 0 where it is not known.
    """

    trainer: str
    request: PrecisionRequest
    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    start_step: int = 0
    planned_steps: int = 0

    @property
    def version_text(self) -> str:
        """Return the library's name and version."""
        package = "lightning" if self.trainer == "fabric" else self.trainer
        return f"{self.trainer} {version(package)}"

    @property
    def accelerator(self) -> accelerators.Accelerator:
        """Return the device of the model's first parameter."""
        first = next(self.model.parameters(), torch.empty(0))
        return accelerators.Accelerator(first.device)

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """Return the scaler if it is enabled; None where the loss is not scaled."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def train_state(self, label: str) -> TrainState:
        """Return the training in the form that the runner's own callbacks read.

        Args:
            label: of the precision that the steps have.
        """
        scaler = self.loss_scaler
        scale = LossScale() if scaler is None else TrainerLossScale(scaler)
        return TrainState(
            self.model,
            load_precision(label if label in precision_names() else "32-true"),
            ModelLoss(),  # the trainer computes the loss, and no callback of a record asks for it
            scale,
            [train_state.ScheduledOptimizer(self.optimizer)],
            self.accelerator.device,
            step=self.start_step,
        )


@final
class TrainerLossScale(LossScale):
    """The scale of a trainer's enabled GradScaler: its value is read, the trainer applies it."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    @property
    def value(self) -> Tensor:
        return scale_value(self.scaler)


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return torch's optimizer inside a library's wrapper, which calls it `optimizer`."""
    return getattr(optimizer, "optimizer", optimizer)


def watch_method(owner: object, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Have each call of an object's method pass through a function; return what ends that.

    Only this object is changed, not its class.

    Args:
        owner: the object.
        name: of the method.
        around: takes the method and the arguments of the call, and returns the call's result.
    """
    method = getattr(owner, name)
    attribute = vars(owner).get(name)

    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    def end() -> None:
        # Another library may have replaced the method since; its function then stays.
        if vars(owner).get(name) is not watched:
            return
        if attribute is None:
            delattr(owner, name)
        else:
            setattr(owner, name, attribute)

    setattr(owner, name, watched)
    return end


def check_only_callback(callbacks: Sequence[object], kind: type) -> None:
    """Raise ConfigError where several of a Trainer's callbacks are of a kind that records it."""
    count = sum(isinstance(callback, kind) for callback in callbacks)
    if count > 1:
        raise ConfigError(
            f"The Trainer has {count} {kind.__name__}s, and each step would be recorded {count} "
            "times. Pass one in callbacks=[...]."
        )


def check_sharding(owner: str, strategy: Sequence[str]) -> None:
    """Raise ConfigError for a training whose processes shard the gradients.

    Args:
        owner: name of the class that records trainings.
        strategy: the library's name of how the training is distributed, and names of which this
            is a kind.
    """
    if _SHARDING.intersection(strategy):
        raise ConfigError(
            f"{owner} does not record a training with {strategy[0]}: each process has a part of "
            f"every gradient only. Leave it out, or train on one device or with DDP."
        )


def missing_package(module: str, package: str, extra: str) -> Unavailable:
    """Return the error of a module whose library is not installed.

    Args:
        module: the module that was imported.
        package: the library that it needs.
        extra: of this project, that installs it.
    """
    return Unavailable(
        f"{module} needs the package {package}, which is not installed here.",
        f'Type pip install {package}; in a checkout pip install -e ".[{extra}]" does the same, '
        f"with a wheel pip install '<the wheel's path>[{extra}]'.",
    )
