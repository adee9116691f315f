"""A precision in a training loop of one's own.

A loop over a Policy computes what this runner's own loop computes, bit by bit: it enters the same
contexts of the same Precision, with the same loss scale (a test compares their losses).
What a model itself changes is its own: a skipped step does not undo what its forward wrote into
buffers. For weights that a forward changes between two uses, autocast's cache stays on.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner.core import (
    ConfigError,
    ConversionReport,
    Precision,
    RunSpec,
    Unavailable,
    accelerators,
    fmt,
    refuse,
    targets,
    tensor_facts,
)
from runner.precision import PolicyError
from runner.precision.conversion import is_converted
from runner.precision.forward_watch import ForwardWatch, converted_layers, expert_layouts
from runner.precision.gradient_hooks import describe_hooks, gradient_hooks
from runner.precision.registry import precision_config
from runner.precision.scaled_gradients import ScaledGradients
from runner.precision.wide_step import attach_update, check_state_dtype

_STATE_KEYS = {"precision", "loss_scale", "precision_state", "steps", "skipped_steps"}


def precision(
    name: str | int,
    /,
    device: str | torch.device = "cpu",
    *,
    config_dir: str | Path | None = None,
    **keys: Any,
) -> "Policy":
    """Return the policy of a precision for a training loop of one's own.

    Args:
        name: of a yaml in conf/precision/, as "16-mixed"; "16", "bf16", "32" and "64" are short
            names, as on the command line.
        device: where the model will compute: auto, cpu, cuda, cuda:1, mps or tpu.
        config_dir: folder whose `precision/<name>.yaml` is a precision of one's own.
        keys: those under `precision.` on the command line, such as keep_fp32=["head"],
            loss_scale={"init_scale": 1024.0} or emulate=True.

    Raises:
        ConfigError: the name, a key, a value or the device is not known.
        Unavailable: this machine lacks what the precision or the device needs.
    """
    text = RunSpec.PRECISION_ALIASES.get(str(name), str(name))
    folder = None if config_dir is None else Path(config_dir)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"config_dir={config_dir} is no folder in {Path.cwd()}.")
    node = _merged(precision_config(text, folder), keys)
    path = node.get("_target_")
    if not isinstance(path, str):
        raise ConfigError(f"precision={text} has no _target_. Name a class in its yaml.")
    passed = targets.Arguments("precision", path, [], targets.keywords(node), 0, False)
    refuse([*passed.problems(targets.locate(path))])
    return Policy(targets.build_group("precision", node), device)


def _merged(current: Any, value: Any) -> Any:
    """Return a value in place of another; of a mapping, such as loss_scale, the given keys."""
    if isinstance(current, Mapping) and isinstance(value, Mapping):
        return {**current, **{key: _merged(current.get(key), part) for key, part in value.items()}}
    # The checks of values expect what a yaml has.
    return list(value) if isinstance(value, tuple) else value


class Policy:
    """A precision in a training loop of one's own.

    Calls in a wrong order, or with other objects, raise PolicyError before they compute anything.

    Args:
        precision: converts the model, and makes the contexts and the loss scale.
        device: where the model computes, see precision().

    Attributes:
        precision: the precision.
        device: the device.
        report: what the conversion changed, a row per layer; empty before convert(), and for
            precisions that replace no layers.
    """

    def __init__(self, precision: Precision, device: str | torch.device = "cpu") -> None:
        self.precision = precision
        self.device = _resolve_device(device)
        precision.require(self.device)
        self.report = ConversionReport()
        self._model: nn.Module | None = None
        self._gradients = ScaledGradients(precision.scale(self.device), self.device)
        self._checked: WeakSet[Optimizer] = WeakSet()
        self._place: Literal["outside", "session", "forward"] = "outside"
        self._has_forward = False
        # Converted layers, until it is proven that the model calls them.
        self._unproven: dict[str, nn.Module] = {}

    def __str__(self) -> str:
        """Return what is stored and computed in which format, and what was converted."""
        chosen = self.precision
        text = (
            f"{chosen.name} on {self.device}: weights {chosen.storage_format}, products "
            f"{chosen.compute_format}"
        )
        if self.loss_scale is not None:
            text += f", loss scale {self.loss_scale:g}"
        if chosen.emulated:
            text += ", emulated"
        # In a session: the model's layers decide.
        if self._model is not None and self._place != "outside":
            kernels = chosen.kernels(self._model, self.device)
            text += f", kernels {kernels}" if kernels else ""
        return "\n".join([text, *self.report.lines()])

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model in this precision and on the policy's device.

        Call it once, with the weights to start from and before the optimizers are made. Several
        models of one loop are converted together, as parts of an nn.ModuleDict.

        Args:
            model: changed in place; in float32.

        Raises:
            ConfigError: a pattern matches nothing, or a module cannot be converted.
            PolicyError: a model was converted already.
        """
        if not isinstance(model, nn.Module):
            raise PolicyError(f"policy.convert takes a torch.nn.Module, not {_kind_of(model)}.")
        if self._model is not None:
            raise PolicyError(
                "policy.convert was called already. Convert several models together: "
                'policy.convert(nn.ModuleDict({"one": one, "other": other})).'
            )
        if any(is_converted(module) for module in model.modules()):
            raise PolicyError(
                "policy.convert was given a model that a precision has converted already. Convert "
                "a new one."
            )
        if any(is_lazy(parameter) for parameter in model.parameters()):
            raise PolicyError(
                "policy.convert was given lazy layers, which have no weights yet. Call the model "
                "on a batch before."
            )
        converted, self.report = self.precision.convert(model, self.device)
        self._model = converted.to(self.device)
        self._unproven = converted_layers(self._model, self.report)
        return self._model

    def check(self, *optimizers: Optimizer, state_dtype: torch.dtype | None = None) -> None:
        """Refuse optimizers that cannot work in this precision or do not train the model.

        step() checks each optimizer itself; call this to learn it before the first step.

        Args:
            optimizers: of the model.
            state_dtype: of their state between steps, float32 or bfloat16; None for their own.

        Raises:
            ConfigError: an optimizer's setting cannot work in this precision.
            PolicyError: an optimizer holds parameters that are not the model's, or are elsewhere.
        """
        model = self._converted_model("check")
        for optimizer in optimizers:
            _check_optimizer(optimizer, model, self.device)
            if optimizer not in self._checked:
                if state_dtype is not None:
                    check_state_dtype("state_dtype", optimizer, state_dtype)
                attach_update(optimizer, self.precision.update, state_dtype, torch.initial_seed())
            elif state_dtype is not None:
                raise PolicyError(
                    "policy.check(optimizer, state_dtype=...) after the optimizer was checked or "
                    "stepped. Call it once, before the first policy.step."
                )
        self.precision.check_optimizers(optimizers)
        self._checked.update(optimizers)

    @contextmanager
    def session(self) -> Iterator["Policy"]:
        """Return the context around the whole loop, which sets the process-wide switches that the
        precision needs, such as TF32's, and restores them after."""
        model = self._converted_model("session")
        if self._place != "outside":
            raise PolicyError("policy.session() is open already. Write it once, around the loop.")
        if self._gradients.scale.value is not None and gradient_hooks(model):
            warnings.warn(describe_hooks(gradient_hooks(model)), stacklevel=3)
        with self.precision.session(model, self.device):
            hook = register_optimizer_step_pre_hook(self._gradients.check_own_step)
            self._place = "session"
            try:
                yield self
            finally:
                self._place = "outside"
                hook.remove()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return the context around a forward of the model, in training and in evaluation."""
        model = self._check_place("forward")
        proof: AbstractContextManager[Any] = nullcontext()
        if self._unproven:
            proof = _prove_layers_called(self.precision.name, model, self._unproven)
        self._place = "forward"
        self._has_forward = True
        try:
            with proof, self.precision.forward(self.device):
                yield
            self._unproven = {}
        finally:
            self._place = "session"

    def cast(self, inputs: Any) -> Any:
        """Return the model's inputs, a nest of tensors, in the dtype that the model needs."""
        return self.precision.cast(inputs)

    def loss(self, function: Callable[..., Tensor], output: Any, *targets: Any) -> Tensor:
        """Return the loss, computed in float32 (64-true: float64), or in this precision where
        autocast_loss=True asks for it.

        Args:
            function: called with the output and the targets, as torch.nn.functional.cross_entropy.
            output: of the model, a nest of tensors.
            targets: further arguments, nests of tensors.
        """
        self._check_place("loss")
        if self.precision.autocast_loss:
            with self.forward():
                return function(output, *map(self.precision.cast_target, targets))
        output, cast = self.precision.loss_pair(output, targets)
        return function(output, *cast)

    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradients of a loss, times the loss scale, to those of the parameters.

        Args:
            loss: scalar, not multiplied by the scale.
            weight: share of this micro-batch in the step, as 1 / 4 for each of four.
            retain_graph: as in Tensor.backward.
        """
        model = self._check_place("backward")
        self._check_loss(loss)
        self._gradients.check_backward()
        if self._gradients.is_pending:
            self._gradients.widen(model.parameters())
        gradient = None
        if weight is not None:
            gradient = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        scaled = self._gradients.scale.multiply(loss)
        with self.precision.backward(self.device):
            scaled.backward(gradient, retain_graph=retain_graph)
        self._gradients.record_backward(model.parameters())

    def unscale(self, *optimizers: Optimizer) -> None:
        """Divide the optimizers' gradients by the loss scale, for code that reads or changes them;
        once per step, after its last backward."""
        self._check_step("unscale", optimizers)
        for optimizer in optimizers:
            self._gradients.unscale(optimizer)

    def clip(
        self, *optimizers: Optimizer, norm: float | None = None, value: float | None = None
    ) -> Tensor:
        """Unscale and clip the gradients of optimizers together.

        Args:
            optimizers: of this step.
            norm: largest 2-norm of all gradients, to which larger ones are scaled down.
            value: largest magnitude of each element, to which larger ones are set.

        Returns:
            The 2-norm before the clipping, a scalar on the device.
        """
        limits = [limit for limit in (norm, value) if limit is not None]
        if len(limits) != 1 or not limits[0] > 0:
            raise PolicyError(
                f"Clipping by norm={norm} and value={value} cannot work. Allowed: one of them, "
                "above 0."
            )
        self.unscale(*optimizers)
        return self._gradients.clip(optimizers, norm, value)

    def step(
        self,
        *optimizers: Optimizer,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Unscale, clip, step the optimizers, update the loss scale and drop the gradients.

        An optimizer whose gradients overflowed is not stepped. Call it once per step with all
        optimizers whose parameters the backwards reached.

        Args:
            optimizers: to step.
            clip_norm: largest 2-norm of all gradients together; None does not clip.
            clip_value: largest magnitude of each element; None does not clip.
        """
        self.unscale(*optimizers)
        if clip_norm is not None or clip_value is not None:
            self.clip(*optimizers, norm=clip_norm, value=clip_value)
        self._gradients.step(optimizers)
        self._has_forward = False

    @property
    def loss_scale(self) -> float | None:
        """Return the present loss scale, None without one; waits for the device."""
        value = self._gradients.scale.value
        return None if value is None else float(value.item())

    @property
    def steps(self) -> int:
        """Return how many steps were attempted, those that were skipped included."""
        return self._gradients.steps

    @property
    def skipped_steps(self) -> int:
        """Return how many steps were skipped for an overflow; waits for the device."""
        return self._gradients.skipped_steps

    @property
    def was_last_step_skipped(self) -> bool:
        """Return whether an optimizer's gradients overflowed in the last step; waits for the
        device. A schedule that counts applied steps is stepped where this is False."""
        return self._gradients.was_last_step_skipped

    def eval_context(self) -> AbstractContextManager[Any]:
        """Return the context around an evaluation during training, so that it does not change the
        training that follows. It neither turns gradients off nor calls model.eval()."""
        return self.precision.eval_context(self._converted_model("eval_context"))

    def gauges(self) -> dict[str, float]:
        """Return what the precision shows now, such as the scales of FP8, by metric name; waits
        for the device."""
        model = self._converted_model("gauges")
        return {name: float(value) for name, value in self.precision.gauges(model).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and the precision's own state, for a checkpoint beside those of
        the model and the optimizers: tensors and plain values."""
        model = self._converted_model("state_dict")
        self._check_no_gradients("state_dict")
        return {
            "precision": self.precision.name,
            "loss_scale": self._gradients.scale.state_dict(),
            "precision_state": self.precision.state_dict(model),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what state_dict returned; after convert().

        Raises:
            ConfigError: the state is not one of this precision's.
        """
        model = self._converted_model("load_state_dict")
        self._check_no_gradients("load_state_dict")
        if not isinstance(state, Mapping) or not state.keys() >= _STATE_KEYS:
            raise ConfigError(
                f"This is no state of a policy: {_kind_of(state)}. Pass policy.state_dict()'s."
            )
        if state["precision"] != self.precision.name:
            raise ConfigError(
                f"The state is of precision={state['precision']}, and this policy is "
                f"{self.precision.name}. Make the policy of that precision, or leave "
                "policy.load_state_dict out to begin with a new loss scale."
            )
        self._gradients.scale.load_state_dict(state["loss_scale"])
        self.precision.load_state_dict(model, state["precision_state"])
        self._gradients.restore_counts(state["steps"], state["skipped_steps"])

    def _check_no_gradients(self, method: str) -> None:
        if self._gradients.is_pending:
            raise PolicyError(
                f"policy.{method} between policy.backward and policy.step would lose the "
                "gradients or their scale. Call it after policy.step."
            )

    def _converted_model(self, method: str) -> nn.Module:
        if self._model is None:
            raise PolicyError(
                f"policy.{method} before policy.convert. Write model = policy.convert(model) "
                "before the optimizers are made."
            )
        return self._model

    def _check_place(self, method: str) -> nn.Module:
        """Refuse a call outside the session, or within forward(); return the model."""
        model = self._converted_model(method)
        if self._place == "outside":
            raise PolicyError(
                f"policy.{method} outside of policy.session(). Write `with policy.session():` "
                "around the loop: it sets what the precision needs in this process."
            )
        if self._place == "forward":
            raise PolicyError(
                f"policy.{method} within policy.forward(). Call it after that `with` block."
            )
        return model

    def _check_loss(self, loss: Any) -> None:
        """Refuse a loss that was computed elsewhere, or in another way, than the policy's."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PolicyError(f"policy.backward takes a loss of one number, not {_kind_of(loss)}.")
        if loss.device != self.device:
            raise PolicyError(
                f"The loss is on {loss.device}, and this policy computes on {self.device}. Leave "
                "the model where policy.convert put it, and move the inputs there."
            )
        if not self._has_forward:
            raise PolicyError(
                "policy.backward without policy.forward() since the last step. Call the model in "
                "`with policy.forward():`, which computes it in this precision."
            )
        if loss.dtype.itemsize < 4 and not self.precision.autocast_loss:
            raise PolicyError(
                f"The loss is {tensor_facts.dtype_name(loss.dtype)}, too coarse or too narrow "
                "for a mean. Write policy.loss(function, output, target), which computes it in "
                "float32, or make the policy with autocast_loss=True."
            )

    def _check_step(self, method: str, optimizers: tuple[Optimizer, ...]) -> None:
        self._check_place(method)
        if not optimizers:
            raise PolicyError(f"policy.{method}() needs the optimizers of this step.")
        self.check(*(optimizer for optimizer in optimizers if optimizer not in self._checked))
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise PolicyError(
                "LBFGS evaluates the loss itself, several times in a step, which policy.step does "
                "not offer. Take another optimizer, or python -m runner optimizer=lbfgs."
            )
        if not self._gradients.is_pending:
            raise PolicyError(
                "No gradients: policy.backward(loss) was not called since the last policy.step."
            )


def _resolve_device(device: str | torch.device) -> torch.device:
    """Return a device of this machine, with its index where its kind has one.

    Raises:
        ConfigError: the device is not known.
        Unavailable: this machine has no such device.
    """
    if device in ("auto", "tpu"):
        return accelerators.choose_accelerator(str(device)).device
    unknown = ConfigError(
        f"device={str(device)!r} is not known. Allowed: auto, cpu, cuda, cuda:<index>, mps, tpu."
    )
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise unknown from None
    if wanted.type == "cuda" and wanted.index is None and torch.cuda.is_available():
        # The one that torch.cuda.set_device chose for this process.
        return torch.device("cuda", torch.cuda.current_device())
    if accelerators.is_tpu(wanted):
        return wanted
    if wanted.type not in accelerators.KINDS:
        raise unknown
    try:
        return accelerators.choose_accelerator(wanted.type, wanted.index or 0).device
    except Unavailable as error:
        what, remedy = (t.replace("accelerator", "device") for t in (error.what, error.remedy))
        raise Unavailable(what, remedy) from error


def _check_optimizer(optimizer: Optimizer, model: nn.Module, device: torch.device) -> None:
    """Raise PolicyError unless an optimizer holds whole parameters of a model, on its device."""
    if not isinstance(optimizer, Optimizer):
        raise PolicyError(f"A torch.optim.Optimizer is needed, not {_kind_of(optimizer)}.")
    kind = type(optimizer).__name__
    own = {*model.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p not in own:
                raise PolicyError(
                    f"{kind} holds a parameter {list(p.shape)} that the converted model does not "
                    "have. Make the optimizer after model = policy.convert(model), from "
                    "model.parameters(), and convert all models that it trains."
                )
            if p.device != device:
                raise PolicyError(
                    f"{kind} holds a parameter on {p.device}, and this policy computes on "
                    f"{device}. Leave the model where policy.convert put it, or make the policy "
                    f'with device="{p.device}".'
                )
            if type(p).__name__ == "DTensor":
                raise PolicyError(
                    f"{kind} holds sharded parameters, over which a policy cannot agree on "
                    "overflows and norms. Train with python -m runner strategy=fsdp."
                )


@contextmanager
def _prove_layers_called(
    name: str, model: nn.Module, layers: Mapping[str, nn.Module]
) -> Iterator[None]:
    """Return the context around a model's first forward, which must call its converted layers.

    Args:
        name: of the precision.
        model: converted.
        layers: converted modules by their names.

    Raises:
        PolicyError: the model reads the weight of a layer and does not call the layer, so that
            nothing would be computed in the precision, or multiplies experts along the dimension
            that they are not packed along.
    """
    # Compiled code runs past the watch; it is compiled in the second forward.
    with torch.compiler.set_stance("force_eager"), ForwardWatch(model, layers) as watch:
        yield
    layouts = expert_layouts(model)
    wrong = [stack for stack, found in watch.experts().items() if layouts[stack] is not found]
    if wrong:
        layout, other = ("in, out", "") if layouts[wrong[0]] else ("out, in", ":in_out")
        raise PolicyError(
            f"experts says that {wrong[0]} is [experts, {layout}], and the model multiplies its "
            f"other dimension. Make the policy with experts=['{wrong[0]}{other}']."
        )
    if watch.bypassed:
        names = sorted(watch.bypassed)
        raise PolicyError(
            f"The model reads the weight of {fmt.first_names(names)} and does not call the layer, "
            f"which computes in precision={name}. Leave such layers as they are: make the policy "
            f"with ignore_modules={names}."
        )


def _kind_of(value: object) -> str:
    """Return an object's class, and a tensor's shape, as a phrase."""
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
