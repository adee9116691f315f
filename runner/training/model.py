"""Build the model of a run: construct, convert and adapt it, and restore it from a checkpoint.

Lazy layers (nn.LazyLinear, nn.LazyConv2d, ...) get their shapes before anything else is done. torch
makes their parameters in the first forward. Here that would be after the conversion, in the
precision's dtype and so with other numbers than in float32, and after the optimizers.

Of a sharded model only the main process makes the weights, in the memory of its host, so that they
are those of a run of one process. The others build the model on the meta device, shard it, and
receive their shards. No device ever holds more than the shards and one unit, and each host holds
one whole model at most.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.core import (
    ConfigError,
    ConversionPlan,
    ConversionReport,
    LoadedCheckpoint,
    Mode,
    Precision,
    RunnerError,
    RunSpec,
    Strategy,
    files,
    fmt,
    model_call,
    module_tree,
    targets,
    tensor_facts,
    terminal,
)
from runner.data.build import RunLoaders, first_inputs
from runner.data.loader import restored_random_state
from runner.precision import casting
from runner.precision.casting import DefaultDtype, cast_floats, cast_nest, cast_tensor
from runner.precision.conversion import is_converted
from runner.precision.layers.conv1d import is_packed
from runner.training.own_state import OWN_BUFFERS_KEY
from runner.training.parameter_groups import freeze_parameters
from runner.training.schedules import Node

if TYPE_CHECKING:
    from runner.training.adapters import Lora
    from runner.training.initial_weights import InitialWeights

META_DEVICE = torch.device("meta")
_CPU = torch.device("cpu")
_EXAMPLES = 2  # of random inputs
# Keywords by which timm, torchvision and the models of the runner load weights.
_LOADING_KEYWORD = re.compile("pretrained(_cfg(_overlay)?)?|weights(_backbone)?|(checkpoint_)?path")
# Packages whose models load weights only where one of these keywords asks for it.
_KNOWN_PACKAGES = ("runner.models.", "timm.", "torchvision.models.")
# Packages whose files of weights hold tensors and plain containers alone.
_LIBRARIES = (*_KNOWN_PACKAGES, "peft.", "transformers.")


class BuiltModel(NamedTuple):
    """A model on its device, converted.

    Attributes:
        model: the model.
        report: what the conversion changed.
        plain_bytes: bytes that its weights and buffers would take in float32.
        initial: what it took from init.weights; None where it took nothing from there.
        plan: by which it was converted, and by which its inputs are cast.
    """

    model: nn.Module
    report: ConversionReport
    plain_bytes: int
    initial: "InitialWeights | None" = None
    plan: ConversionPlan = ConversionPlan()


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the model of a run: constructs it, loads weights, converts and adapts it.

    Attributes:
        spec: its model and adapter nodes are called.
        precision: converts the model.
        start: a checkpoint to take the weights from; None for seeded ones.
        restore_exactly: the model is the one that was saved, with its adapter and packed weights.
        loaders: of the run's data sets, whose first examples give lazy layers their sizes; None
            loads the data where there are such layers. A mode without data makes random examples.
    """

    spec: RunSpec
    precision: Precision
    start: LoadedCheckpoint | None = None
    restore_exactly: bool = False
    loaders: RunLoaders | None = None

    def build(self, device: torch.device, plan: ConversionPlan = ConversionPlan()) -> BuiltModel:
        """Build the model with its seeded weights, converted and on its device.

        All precisions start from the same weights, except with init.low_memory, which draws others.

        Args:
            device: where it ends up. Its parameters are made on the CPU; those of the meta device,
                and with init.low_memory, where they end up.
            plan: what forwards have found out about the model.

        Raises:
            ConfigError: the target returns no model, or its model cannot be converted or does not
                fit the checkpoint or train.freeze.
        """
        spec, precision, start = self.spec, self.precision, self.start
        # In float32, with init.low_memory in the precision's dtype; the conversion rounds later.
        model = self._construct(device)
        # Packed weights, and an adapter's, are loaded unchanged where they are packed alike.
        packed = None
        initial = None
        if start is not None:
            if self.restore_exactly or (
                precision.layout and _fits_as_saved(spec, precision, start)
            ):
                packed = start
            else:
                # Plain weights enter before the conversion, which packs them.
                initial = self._load_plain(model, start)
        size = tensor_facts.float32_bytes(model)
        # Layers that were left unconverted hold plain weights in the checkpoint; converted ones
        # would pack them while they are loaded.
        if packed is not None:
            plan = replace(
                plan,
                bypassed={**plan.bypassed, **packed.content.get("bypassed", {})},
                expert_layouts={**packed.content.get("experts", {}), **plan.expert_layouts},
                finds_experts=False,  # the checkpoint names them
            )
        adapter = build_adapter(spec.adapter)
        notes = _notes_on_parts(model, adapter, plan.expert_layouts)
        if adapter is not None and packed is None:
            adapter.read_plain_weights(model, plan.bypassed)
        model, report = precision.convert(model, device, plan)
        if adapter is not None:
            adapter.split_experts(model, plan.expert_layouts, plan.finds_experts)
            add = adapter.add if packed is None else adapter.add_for_checkpoint
            add(model, precision.storage, plan.bypassed)
        # Packed weights fit the converted layers only, and an adapter's only the adapted ones.
        if packed is not None:
            initial = self._load(model, packed)
        model = model.to(device)
        # After the adapter, which decides by itself what trains, and before strategies and
        # optimizers.
        freeze_parameters(model, spec.train.freeze)
        report = replace(report, kept=(*report.kept, *notes))
        return BuiltModel(model, report, size, initial, plan)

    def build_on_meta(self, plan: ConversionPlan = ConversionPlan()) -> BuiltModel:
        """Build and convert a model on the meta device; on the CPU if its code reads values.

        Args:
            plan: by which the model is converted.

        Raises:
            ConfigError: the model cannot be built, or does not fit the weights that it starts from.
        """
        try:
            return self.build(META_DEVICE, plan)
        except RunnerError:
            raise
        except (NotImplementedError, RuntimeError):
            return self.build(_CPU, plan)

    def build_sharded(
        self, plan: ConversionPlan, strategy: Strategy, device: torch.device
    ) -> BuiltModel:
        """Build a model, shard it, and give every process the main process's values. Collective.

        Args:
            plan: by which the model is converted.
            strategy: shards the model.
            device: of this process, where its shards are.

        Raises:
            ConfigError: the model cannot be built, or does not fit the weights that it starts from.
        """
        from runner.training.strategies.fsdp import named_values, scatter_values

        # What packs weights looks at their values.
        makes_once = strategy.cpu_ram_efficient_loading and not self.precision.freezes
        sends = makes_once and strategy.rank.world_size > 1
        values = {}
        if not sends:
            built = self.build(_CPU, plan)
        elif strategy.rank.is_main:
            built = self.build(_CPU, plan)
            values = {name: tensor.detach() for name, tensor in named_values(built.model)}
        else:
            built = self.build_on_meta(plan)
            if _holds_other_meta_tensors(built.model):
                built = self.build(_CPU, plan)
        model = strategy.wrap(built.model, device)
        if any(tensor.is_meta for _, tensor in named_values(model)):
            model.to_empty(device=device)
        model = model.to(device)
        if sends:
            scatter_values(model, values, device)
        return built._replace(model=model)

    def _construct(self, device: torch.device) -> nn.Module:
        """Call the model's target, and give its lazy layers their shapes.

        Raises:
            ConfigError: the target returns no module.
        """
        # With init.low_memory no float32 copy is ever made: the parameters are drawn on the device,
        # in the precision's dtype.
        spec = self.spec
        low_memory = spec.init.low_memory
        made_on = device if low_memory or device.type == "meta" else _CPU

        @contextmanager
        def makes_parameters() -> Iterator[None]:
            dtype = DefaultDtype(self.precision.storage) if low_memory else nullcontext()
            # The CPU is torch's default; its context would cost each constructor of a tensor time.
            place = nullcontext() if made_on == _CPU else made_on
            with dtype, place:
                yield

        with makes_parameters(), safe_loading(spec.model):
            model = targets.build_group("model", spec.model)
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise ConfigError(
                f"model: {spec.model['_target_']} made a {kind}, not a torch.nn.Module."
            )
        for module in model.modules():
            # torch leaves the copies trainable, and nothing computes a gradient of an average.
            if isinstance(module, AveragedModel):
                module.requires_grad_(False)
        names = lazy_layers(model)
        if names:
            inputs = self._example(names, made_on)
            with makes_parameters():
                materialize_lazy_layers(model, made_on, inputs)
        return model

    def _example(self, names: str, device: torch.device) -> Any:
        """Return the inputs of a few examples, for lazy layers, on the device."""
        if Mode.named(self.spec.mode).needs_data:
            # The weights must not depend on what the data draw.
            with restored_random_state():
                inputs = first_inputs(self.spec, self.loaders)
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
        from runner.training.example_batch import ForecastUnavailable, example_batch

        try:
            with torch.random.fork_rng(devices=[]):
                return example_batch(self.spec, _EXAMPLES, device)[0]
        except ForecastUnavailable as error:
            raise ConfigError(
                f"model: the lazy layers {names} take their sizes from an example: {error} Type "
                "data.meta.input and data.meta.classes, or give these layers their sizes."
            ) from error

    def _load_plain(self, model: nn.Module, saved: LoadedCheckpoint) -> "InitialWeights | None":
        """Load a checkpoint into a plain model; its adapter is merged into the weights."""
        precision = self.precision
        layout = saved.content.get("layout", "")
        if layout and precision.layout:
            trained = saved.content["precision"]
            # A file of another program names no precision.
            key = "checkpoint" if trained else "init.weights"
            own = f"precision={trained} with the adapter that it was trained with, or "
            raise ConfigError(
                f"{key}={saved.path} holds weights packed as {layout}; precision={precision.name} "
                "would round them a second time, or add to them otherwise. Type "
                f"{own if trained else ''}a precision that packs nothing, for example "
                "precision=bf16-mixed."
            )
        from runner.config.trusted_targets import check_trusted, checkpoint_config

        # The adapter's target comes from the file: it is judged before anything is imported by it.
        config = checkpoint_config(saved, "checkpoint")
        check_trusted(config, ["adapter"], self.spec.to_dict())
        adapter = build_adapter(config.values.get("adapter") or {})
        # A checkpoint's float64 would be rounded on its way through a float32 model.
        if precision.storage is torch.float64:
            cast_floats(model, torch.float64, casting.find_kept_tensors(model, torch.float64)[0])
        if adapter is None:
            return self._load(model, saved)
        # The adapter freezes what it is added to, and this run trains the merged weights.
        trains = {name: p.requires_grad for name, p in model.named_parameters()}
        wide = torch.promote_types(precision.storage, torch.float32)
        adapter.note_frozen_parts(model)
        adapter.split_experts(model, saved.content.get("experts", {}))
        adapter.add_for_checkpoint(model, wide, saved.content.get("bypassed", {}))
        initial = self._load(model, saved)
        # A run that starts from them saves the weights under their own names.
        adapter.merge(model, exact=bool(saved.source))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains[name])
        return initial

    def _load(self, model: nn.Module, saved: LoadedCheckpoint) -> "InitialWeights | None":
        """Load a checkpoint; of init.weights what init.skip does not leave out.

        Raises:
            ConfigError: the weights do not fit the model, or packed ones lack a part.
        """
        if not saved.source:
            load_weights(model, saved, self.spec.model)
            return None
        from runner.training.initial_weights import load_selected

        try:
            weights = _unpacked_weights(model, saved)
        except ValueError as error:
            raise ConfigError(
                f"init.weights={saved.path} holds a broken weight: {error}."
            ) from error
        return load_selected(model, weights, self.spec, saved.source)


def restoring_builder(
    spec: RunSpec, precision: Precision, saved: LoadedCheckpoint, loaders: RunLoaders | None = None
) -> ModelBuilder:
    """Return the builder of a model with a checkpoint's weights, whatever precision they were
    trained in.

    Packed weights are loaded unchanged in their own precision, and as the numbers that they stand
    for in one that packs none. An adapter stays one where weights are packed as in training, or
    packed in neither: so the run's own precision computes what it computed then. Elsewhere it is
    merged into the weights.
    """
    exact = keeps_adapter(spec, precision, saved)
    spec = spec if exact else replace(spec, adapter={})
    return ModelBuilder(spec, precision, saved, exact, loaders)


def _fits_as_saved(spec: RunSpec, precision: Precision, saved: LoadedCheckpoint) -> bool:
    """Return whether a checkpoint has this run's adapter, and weights packed as this run packs them
    (or neither packs any)."""
    theirs = saved.content["spec"].get("adapter") or {}
    # Without a target there is no adapter, whatever else the node holds.
    has_adapter = bool(theirs.get("_target_") or spec.adapter.get("_target_"))
    if has_adapter and dict(theirs) != dict(spec.adapter):
        return False
    return saved.content.get("layout", "") == precision.layout


def keeps_adapter(spec: RunSpec, precision: Precision, saved: LoadedCheckpoint) -> bool:
    """Return whether a checkpoint's adapter can be loaded unchanged and need not be merged."""
    return bool(spec.adapter.get("_target_")) and _fits_as_saved(spec, precision, saved)


def build_adapter(node: Node) -> "Lora | None":
    """Return the adapter of a config node; None where it names none."""
    return targets.instantiate(node) if node.get("_target_") else None


def _notes_on_parts(
    model: nn.Module, adapter: "Lora | None", layouts: Mapping[str, bool]
) -> list[str]:
    """Note what a model did to its parts, where training and an adapter obey it; return lines for
    the console."""
    notes = []
    evaluated = module_tree.note_evaluation_parts(model)
    if evaluated:
        notes.append(
            f"stays in evaluation mode, as the model built it: {fmt.first_names(evaluated)}"
        )
    if adapter is None:
        return notes
    left = adapter.note_frozen_parts(model)
    if left:
        notes.append(
            f"the adapter leaves out what the model froze: {fmt.first_names(left)}; "
            f"adapter.modules=[{left[0]}] adds to it"
        )
    experts = adapter.find_left_experts(model, layouts)
    if experts:
        kind = next(iter(experts)).rpartition(".")[2] or "<stack>"
        notes.append(
            f"the adapter leaves out the {sum(experts.values()):,} weights of experts; "
            f"adapter.modules=[*.{kind},<other layers>] adds to them"
        )
    return notes


def restore_precision_state(
    model: nn.Module, precision: Precision, saved: LoadedCheckpoint
) -> None:
    """Give a precision the state that a checkpoint holds of it, such as histories of amax."""
    if saved.content["precision"] == precision.name:
        precision.load_state_dict(model, saved.content.get("precision_state", {}))


def load_weights(model: nn.Module, saved: LoadedCheckpoint, node: Mapping[str, Any] = {}) -> None:
    """Copy a checkpoint's weights into a model, casting to the model's dtypes.

    A packed weight is copied into a layer that is packed the same way, and is unpacked for a model
    of plain layers.

    Args:
        model: changed in place.
        saved: the checkpoint.
        node: the config node that the model was made from, for the message.

    Raises:
        ConfigError: names, shapes or packing differ.
    """
    try:
        # First, for a forward may have made a buffer, or given it another shape.
        for name, value in saved.content.get(OWN_BUFFERS_KEY, {}).items():
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            if key not in module._buffers:
                module.register_buffer(key, None, persistent=name in saved.content["model"])
            before = module._buffers[key]
            like = value if before is None else cast_tensor(value, before.dtype).to(before.device)
            module._buffers[key] = like.clone()
        model.load_state_dict(_unpacked_weights(model, saved), strict=True)
    except (RuntimeError, ValueError, AttributeError) as error:
        from runner.training.initial_weights import misfit_reason

        remedy = _model_remedy(saved, node)
        if any(map(is_converted, model.modules())):
            remedy += " For packed weights take its own precision.ignore_modules, too."
        raise ConfigError(
            f"checkpoint={saved.path} does not fit the model: {misfit_reason(error)} {remedy}"
        ) from error


def _unpacked_weights(model: nn.Module, saved: LoadedCheckpoint) -> Mapping[str, Any]:
    """Return a checkpoint's weights, unpacked for a model of plain layers.

    Raises:
        ValueError: a packed weight lacks its scales.
    """
    weights = saved.content["model"]
    if not saved.content.get("layout") or any(map(is_packed, model.modules())):
        return weights
    from runner.training.initial_weights import unpack_weights

    return unpack_weights(model, weights)


def _model_remedy(saved: LoadedCheckpoint, node: Node) -> str:
    """Return what to type for the model that a checkpoint was trained with."""
    theirs = saved.content["spec"].get("model") or {}
    if str(theirs.get("_target_")).startswith("runner.api.objects."):
        return f"It was trained with a model object of a Python program, {theirs.get('name')}."
    if node.get("_target_") == theirs.get("_target_"):
        changed = [key for key, value in theirs.items() if node.get(key) != value]
        keys = [key for key in changed if "target" not in str(key)]
        if keys:
            words = [f"model.{key}={str(theirs[key]).replace(' ', '')}" for key in keys]
            return (
                "The checkpoint's model has other values: type "
                f"{terminal.quote_command(words)}, or in "
                "mode=evaluate leave model= out."
            )
    return (
        "Take the checkpoint's own model: in mode=evaluate leave model= out, elsewhere type its "
        "model=."
    )


def materialize_lazy_layers(model: nn.Module, device: torch.device, inputs: Any) -> None:
    """Make the parameters of a model's lazy layers by one forward in evaluation mode.

    Args:
        model: not converted yet; changed in place.
        device: where its parameters are.
        inputs: of a few examples, on the device.

    Raises:
        ConfigError: the forward fails or does not reach every lazy layer.
        NotImplementedError: the forward fails on the meta device.
    """
    dtypes = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    inputs = cast_nest(inputs, next(dtypes, torch.get_default_dtype()))
    modes = {module: module.training for module in model.modules()}
    model.eval()  # in which norms keep their statistics
    try:
        with torch.no_grad():
            model_call.call_model(model, inputs)
    except RunnerError:
        raise
    except Exception as error:
        if device.type == "meta":
            raise NotImplementedError("lazy layers of this model need real numbers") from error
        shape = list(getattr(inputs, "shape", [])) or type(inputs).__name__
        raise ConfigError(
            f"model: the lazy layers {lazy_layers(model)} take their sizes from a first forward, "
            f"which fails on inputs {shape}: {type(error).__name__}: {error}. Give these "
            "layers their sizes (nn.Linear in place of nn.LazyLinear), or type a data= whose "
            "examples the model takes."
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    names = lazy_layers(model)
    if names:
        raise ConfigError(
            f"model: the lazy layers {names} are not called by a forward in evaluation mode, from "
            "which they would take their sizes. Give them their sizes (nn.Linear in place of "
            "nn.LazyLinear)."
        )


def lazy_layers(model: nn.Module) -> str:
    """Return the names of the layers that are still lazy, three at most; empty without any."""
    lazy = []
    for name, module in model.named_modules():
        tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if any(map(is_lazy, tensors)):
            lazy.append(name or "(the model itself)")
    return fmt.first_names(lazy, 3)


def starts_random(node: Node) -> bool:
    """Return whether a model's weights are known to be random.

    They are for a model of the runner, timm or torchvision that is not asked to load any. False
    claims nothing: transformers' from_pretrained and a user's own code load weights in ways that
    the node does not show.

    Args:
        node: the model's config node, with its `_target_`.
    """
    target = str(node.get("_target_", ""))
    if "_args_" in node:
        return False  # one of them may be `pretrained`
    if not target.startswith(_KNOWN_PACKAGES):
        return False
    parameters = {}
    with suppress(ConfigError, TypeError, ValueError):
        parameters = signature(targets.locate(target)).parameters
    arguments = targets.target_arguments(node)
    # torchvision's detection models load their backbone unless weights_backbone=None is given.
    values = {key: parameter.default for key, parameter in parameters.items()} | arguments
    return not any(value for key, value in values.items() if _LOADING_KEYWORD.fullmatch(key))


@contextmanager
def safe_loading(node: Node) -> Iterator[None]:
    """Have the library that builds a model unpickle nothing but tensors and plain containers, and
    import installed packages alone.

    One's own code reads its files as it says.

    Args:
        node: the model's config node, with its `_target_`.

    Raises:
        ConfigError: a file of weights holds more.
    """
    target = str(node.get("_target_", ""))
    if not target.startswith(_LIBRARIES):
        yield
        return
    try:
        with files.read_as_data():
            yield
    except (UnpicklingError, RuntimeError) as error:
        # timm raises an error of its own from torch's.
        if not isinstance(error.__cause__ or error, UnpicklingError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: {target} loads a file that holds more than tensors, and a pickle is not "
            f"executed here. Where you trust it, save its state_dict() with "
            f"safetensors.torch.save_file. (torch: {reason})"
        ) from error


def _holds_other_meta_tensors(model: nn.Module) -> bool:
    """Return whether a module has a meta tensor that is neither a parameter nor a buffer.

    Nothing gives such a tensor its values later.
    """
    registered = ("_parameters", "_buffers", "_modules")
    for module in model.modules():
        attributes = {key: value for key, value in vars(module).items() if key not in registered}
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(attributes)):
            return True
    return False
