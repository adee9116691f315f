"""Adapters: small trainable additions to a frozen model, so that quantised weights can be tuned.

Source: Hu et al., LoRA, arXiv:2106.09685; Dettmers et al., QLoRA, arXiv:2305.14314; Liu et al.,
DoRA, arXiv:2402.09353; Kalajdzievski, rsLoRA, arXiv:2312.03732.

Start values that are computed from the weights (PiSSA, OLoRA, LoftQ) are the formulas of peft,
which has them, too, but not for every layer here: its PiSSA refuses float64, its OLoRA takes a
Conv1D's weight for a transposed one, its LoftQ needs a GPU, and with 16-bit additions its sums
differ by the rounding of the additions.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor, nn

from runner.core import ConfigError, Precision, Unavailable, module_tree, refuse, terminal
from runner.precision.casting import no_op_hook
from runner.precision.conversion import ROOT_NAME, ConversionRules, find_shared_weights
from runner.precision.layers import derived_weight
from runner.precision.layers.conv1d import is_packed, is_transposed, linear_classes, unpacked_matrix
from runner.precision.layers.experts import (
    Experts,
    Stack,
    convert_experts,
    expert_matrices,
    expert_stacks,
    is_known_mixture,
    possible_stacks,
    restore_stacks,
)
from runner.precision.layers.te_layers import FusedNormLinear
from runner.training.pretrained_folder import lora_layers, merged

INITS = ("default", "gaussian", "pissa", "pissa_niter_16", "olora", "loftq")
CHANGES_BASE = ("pissa", "pissa_niter_16", "olora")
"""Values of adapter.init that take the additions' start out of the base weights."""
ADAPTER = "default"
"""peft's name of the only adapter of a model."""
# Power iterations of the randomised decomposition of pissa_niter_16.
#
# Source: peft, LoraConfig.init_lora_weights, which finds it equivalent to the exact one in
# training.
_ITERATIONS = 16


@final
@dataclass(eq=False)
class Lora:
    """Low-rank additions to linear layers, made by peft.

    They are added to a model after its conversion and before its optimizer is built.

    Args:
        rank: of each addition.
        alpha: the addition is scaled by alpha / rank, with use_rslora by alpha / sqrt(rank).
        dropout: probability on the addition's input, in [0, 1).
        modules: patterns of linear layers and of stacked weights of experts; None: every linear
            layer that shares its weight with no other, and no experts.
        train: patterns of modules that also train, in full (norms, a head).
        use_dora: train the norm of each row of a weight, and its direction by the addition.
        use_rslora: scale so that the size of updates does not depend on the rank.
        init: start values of the additions, one of INITS.

    Raises:
        ConfigError: a value is out of range.
        Unavailable: peft is not installed.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    modules: Sequence[str] | None = None
    train: Sequence[str] = ()
    use_dora: bool = False
    use_rslora: bool = False
    init: str = "default"

    def __post_init__(self) -> None:
        self._plain_weights: dict[str, Tensor] = {}
        self._frozen_parts: list[str] = []
        rules = (
            ("rank", self.rank >= 1, "is out of range. Allowed: 1 and up."),
            ("alpha", self.alpha > 0, "is out of range. Allowed: above 0."),
            ("dropout", 0 <= self.dropout < 1, "is out of range. Allowed: 0 and up, below 1."),
            ("init", self.init in INITS, f"is not known. Allowed: {', '.join(INITS)}."),
        )
        refuse(f"adapter.{key}={getattr(self, key)} {why}" for key, fits, why in rules if not fits)
        if find_spec("peft") is None:
            raise Unavailable(
                "adapter=lora needs peft, which is not installed.",
                'Type pip install "precision-runner[lora]".',
            )

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError for a precision in which the adapter cannot be added."""
        if self.init in CHANGES_BASE and precision.freezes:
            raise ConfigError(
                f"adapter.init={self.init} moves a part of each weight into the addition, and "
                f"precision={precision.name} packs the weights, whose codes cannot be changed. "
                "Allowed here: default, gaussian, loftq. Type adapter.init=loftq, which starts "
                "from what the packing rounds away, or precision=bf16-true."
            )
        if self.init == "loftq" and not precision.freezes:
            raise ConfigError(
                f"adapter.init=loftq starts from what packing rounds away, and precision="
                f"{precision.name} packs no weights. Allowed here: default, gaussian, "
                f"{', '.join(CHANGES_BASE)}. Type adapter.init=pissa, or precision=bnb-nf4."
            )

    def note_frozen_parts(self, model: nn.Module) -> list[str]:
        """Note the parts that a model froze, which only a pattern that names one adapts or trains.

        Called before the conversion, which freezes what it packs.

        Args:
            model: not changed.

        Returns:
            The names of those with linear layers that no pattern of the adapter names.
        """
        parts = module_tree.frozen_parts(model)
        self._frozen_parts = [*parts]
        patterns = (*(self.modules or ()), *self.train)
        return [
            name
            for name, part in parts.items()
            if self._is_left_frozen(name, patterns)
            and any(isinstance(module, linear_classes()) for module in part.modules())
        ]

    def _is_left_frozen(self, name: str, patterns: Sequence[str]) -> bool:
        """Return whether a module is in a part that the model froze and no pattern names."""
        holders = [part for part in self._frozen_parts if f"{name}.".startswith(f"{part}.")]
        # A pattern that begins with `*` is meant for what trains.
        named = [part for part in holders for p in patterns if f"{p}.".startswith(f"{part}.")]
        return bool(holders) and not named

    def read_plain_weights(self, model: nn.Module, bypassed: Collection[str] = ()) -> None:
        """Keep what add() needs of the weights that the conversion is about to pack.

        Called before the conversion, and not where a checkpoint's values follow.

        Args:
            model: unchanged.
            bypassed: as for add().
        """
        if self.init != "loftq":
            return
        stacks = {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if parameter.ndim == 3 and self._names_experts(name)
        }
        self._plain_weights.update(stacks)
        for name in self._chosen_layers(model, bypassed, stacks):
            # The tensor and not the parameter, whose data the conversion moves to the device.
            matrix = derived_weight.current_matrix(model.get_submodule(name))
            check_rank(self.init, self.rank, name, matrix)
            self._plain_weights[name] = matrix

    def _names_experts(self, stack: str) -> bool:
        """Return whether adapter.modules names a stacked weight, by its dotted name."""
        patterns = [*map(str, self.modules or ())]
        named = any(module_tree.matches_pattern(pattern, stack) for pattern in patterns)
        return named and not self._is_left_frozen(stack, patterns)

    def find_left_experts(self, model: nn.Module, layouts: Mapping[str, bool]) -> dict[str, int]:
        """Return the modules of experts that get no addition for lack of adapter.modules, by dotted
        name, and how many weights each has.

        Args:
            model: not converted; unchanged.
            layouts: as for split_experts().
        """
        rules = ConversionRules("adapter", experts=layouts)
        left = {}
        for path, module in model.named_modules() if self.modules is None else ():
            stacks = rules.stacks(path or ROOT_NAME, module)
            if stacks:
                left[path] = sum(module.get_parameter(stack).numel() for stack in stacks)
        return left

    def split_experts(
        self, model: nn.Module, layouts: Mapping[str, bool], finds: bool = False
    ) -> None:
        """Give the experts that adapter.modules names a layer each, as a precision does that
        converts them, in place.

        Args:
            model: after its conversion; its outputs stay the same.
            layouts: dotted names of stacked weights of experts, and whether each is transposed,
                beside those that modules say they have.
            finds: a forward follows that shows which of the other stacked weights are experts.
        """
        rules = ConversionRules("adapter", experts=layouts)
        for path, module in [*model.named_modules()]:
            if isinstance(module, Experts):
                continue
            known = rules.stacks(path or ROOT_NAME, module)
            stacks = known or (possible_stacks(module) if finds else {})
            named = {
                stack: transposed
                for stack, transposed in stacks.items()
                if self._names_experts(f"{path}.{stack}".removeprefix("."))
            }
            if named and known:
                convert_experts(module, named, lambda layer: None)
            elif named:
                convert_experts(module, stacks, None)

    def add(self, model: nn.Module, dtype: torch.dtype, bypassed: Collection[str] = ()) -> None:
        """Freeze the model and add trainable parameters.

        The model's outputs stay the same, up to rounding where the additions take over a part of
        the base weights (adapter.init=pissa, olora). Additions that start from the error of packed
        weights (adapter.init=loftq) move the outputs towards those of the plain weights.

        Args:
            model: changed in place.
            dtype: of the additions.
            bypassed: names of layers whose forward the model never calls; they get no addition.
        """
        stacks = _stacks_by_layer(model)
        for stack in expert_stacks(model):
            if stack.name in self._plain_weights:
                matrices = expert_matrices(self._plain_weights[stack.name], stack.transposed)
                self._plain_weights.update(zip(stack.layers, matrices, strict=True))
        for name in self._chosen_layers(model, bypassed):
            layer = model.get_submodule(name)
            if self.use_dora:
                check_dora(name, layer, name in stacks)
            matrix = self._plain_weights.get(name)
            if self.init in CHANGES_BASE:
                matrix = derived_weight.current_matrix(layer)
            if matrix is not None:
                check_rank(self.init, self.rank, name, matrix)
        self.add_for_checkpoint(model, dtype, bypassed)
        for name, layer in lora_layers(model).items():
            if self.init in CHANGES_BASE:
                start_from_base(name, layer, self.init)
                # Elsewhere peft's own magnitudes are right: the addition is 0.
                if self.use_dora:
                    start_magnitudes(layer)
            elif self.init == "loftq" and is_packed(layer.get_base_layer()):
                start_from_packing_error(layer, self._plain_weights[name])
        self._plain_weights.clear()

    def add_for_checkpoint(
        self, model: nn.Module, dtype: torch.dtype, bypassed: Collection[str] = ()
    ) -> None:
        """Add as add() does, in a model whose values a checkpoint replaces afterwards.

        Nothing has to be computed from the weights. Names and shapes are those of add().
        """
        with terminal.suppress_warnings():
            from peft import LoraConfig

        modules = dict(model.named_modules())
        selected = module_tree.select_modules("adapter.train", self.train, modules)
        # Looked up before peft renames the modules that it wraps.
        names = [n for n in sorted(selected) if not self._is_left_frozen(n, self.train)]
        trained = {name: modules[name] for name in names}
        trained_in_full = [p for module in trained.values() for p in module.parameters()]
        packed = [name for name, module in trained.items() if is_packed(module)]
        if packed:
            raise ConfigError(
                f"adapter.train names {', '.join(packed)}, whose weight is quantised and cannot "
                f"train. Type precision.ignore_modules=[{','.join(packed)}], too."
            )
        if any(isinstance(module, FusedNormLinear) for module in modules.values()):
            raise ConfigError(
                "adapter=lora would add to the inputs of layers that compute their norm "
                "themselves. Type precision.fuse=false."
            )
        chosen = self._chosen_layers(model, bypassed)
        stacks = _stacks_by_layer(model)
        # The experts of a stack all have one, and are many.
        patterns = dict.fromkeys(
            re.escape(name.rpartition(".")[0]) + r"\.\d+" if name in stacks else re.escape(name)
            for name in chosen
        )
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            # A regular expression, which peft matches with full names; of a list it would match
            # the ends of names, too.
            target_modules="|".join(patterns),
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
            init_lora_weights="gaussian" if self.init == "gaussian" else True,
        )
        # A trial that is to find the experts names none.
        if chosen:
            _inject(config, model, chosen)
        # peft has frozen everything else, and made the additions in the layers' compute dtype.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        if self.init in CHANGES_BASE:
            # W + s B A - s B0 A0: the base weights lack what the additions start with, so that a
            # folder of peft that fits the original weights needs these start values. Parameters
            # and not buffers, which strategy=ddp would send in every forward.
            for layer in lora_layers(model).values():
                for part, source in (("start_A", layer.lora_A), ("start_B", layer.lora_B)):
                    zeros = torch.zeros_like(source[ADAPTER].weight)
                    layer.register_parameter(part, nn.Parameter(zeros, requires_grad=False))
        for parameter in trained_in_full:
            parameter.requires_grad_(True)

    def _chosen_layers(
        self, model: nn.Module, bypassed: Collection[str], later: Collection[str] = ()
    ) -> list[str]:
        """Return the dotted names of the linear layers that get an addition.

        Args:
            model: unchanged.
            bypassed: as for add().
            later: names of stacked weights whose experts have no layers yet.
        """
        modules = dict(model.named_modules())
        stacks = _stacks_by_layer(model)
        # An expert's layer goes by the name of the stacked weight.
        called = {name: stacks[name].name if name in stacks else name for name in modules}
        later = {*later, *(stack.name for stack in stacks.values() if stack.module.is_trial)}
        candidates = modules.keys() - stacks.keys()
        if self.modules is not None:
            names = [*called.values(), *later]
            candidates = module_tree.select_modules("adapter.modules", self.modules, names)
        patterns = self.modules or ()
        candidates = {n for n in candidates - later if not self._is_left_frozen(n, patterns)}
        shared = find_shared_weights(model)
        chosen = []
        for name, module in modules.items():
            # A root that is a linear layer has no name that peft could match. nn.MultiheadAttention
            # reads the weight of its output projection, a layer of a class that torch keeps
            # private, and never calls the layer.
            is_layer = name and isinstance(module, linear_classes())
            is_read = type(module).__name__ == "NonDynamicallyQuantizableLinear"
            if not is_layer or is_read or called[name] not in candidates:
                continue
            holder = called[name].rpartition(".")[0] if name in stacks else name
            if holder in shared and self.modules is not None:
                others = ", ".join(shared[holder])
                raise ConfigError(
                    f"adapter.modules names {holder}, which shares its weight with {others}: what "
                    "is added to one would be merged into both. Leave it out."
                )
            if name not in shared and name not in bypassed:
                chosen.append(name)
        typed = [*map(str, patterns)]
        # A run says of layers that are never called that they get none.
        known = [*(called[name] for name in chosen), *bypassed, *later]
        idle = [p for p in typed if not any(module_tree.matches_pattern(p, name) for name in known)]
        if idle or not (chosen or later):
            place = "the model" if self.modules is None else f"adapter.modules={idle or typed}"
            if self._frozen_parts:
                parts = ",".join(self._frozen_parts)
                place += f" beside what the model froze, which adapter.modules=[{parts}] adapts"
            raise ConfigError(
                f"adapter=lora finds no linear layer of its own in {place}. "
                "Name linear layers in adapter.modules, or type adapter=none."
            )
        return chosen

    def merge(self, model: nn.Module, exact: bool = False) -> None:
        """Add the trained additions to the plain weights and remove them, in place.

        Parameters that add() froze stay frozen.

        Args:
            model: with the additions.
            exact: the weights must hold the sums; else a layer that derives its weight in each
                forward adds the product with its input by itself.

        Raises:
            ConfigError: a layer derives its weight from parameters that cannot give the sum.
        """
        for name, module in lora_layers(model).items():
            base = module.get_base_layer()
            if derived_weight.is_derived(base):
                total = merged(name, module.state_dict(prefix=f"{name}."), module)["weight"]
                if exact:
                    derived_weight.set_weight(name, base, total)
                else:
                    derived_weight.add_beside(base, total)
            else:
                module.merge()
            model.set_submodule(name, base)
        for module in {stack.module for stack in expert_stacks(model)}:
            restore_stacks(module)
        # peft leaves its config on the model, where its other functions would find it.
        vars(model).pop("peft_config", None)


def _stacks_by_layer(model: nn.Module) -> dict[str, Stack]:
    """Return the stacked weights of a model's experts by the dotted names of their layers."""
    return {name: stack for stack in expert_stacks(model) for name in stack.layers}


def _inject(config: Any, model: nn.Module, chosen: Sequence[str]) -> None:
    """Have peft wrap the chosen layers of a model, in place.

    Raises:
        ConfigError: peft refuses one of them.
    """
    with terminal.suppress_warnings():
        from peft import inject_adapter_in_model

    shown = model
    if is_known_mixture(model):
        # Given the model's config, peft takes a regular expression for the ends of the names that
        # it matches: q_proj of one layer for that of every layer.
        shown = nn.Module()
        shown._modules, shown._parameters = model._modules, model._parameters
    try:
        # peft warns of a Conv1D, for which it transposes the addition by itself.
        with terminal.suppress_warnings():
            inject_adapter_in_model(config, shown)
    except ValueError as error:
        refused = re.search(r"Module '([\w.]+)' is incompatible", str(error))
        if refused is None:
            raise
        kinds = {name.rpartition(".")[2] for name in chosen} - {refused[1]}
        patterns = ",".join(f"*.{kind}" for kind in sorted(kinds))
        raise ConfigError(
            f"adapter=lora: peft adds nothing to {refused[1]} of this model, which reads that "
            f"layer's weight in a kernel of its own. Type adapter.modules=[{patterns}]."
        ) from error
    # In evaluation nn.TransformerEncoderLayer reads the weights of parts without a hook.
    for layer in lora_layers(model).values():
        layer.register_forward_pre_hook(no_op_hook)


def check_rank(init: str, rank: int, name: str, matrix: Tensor) -> None:
    """Raise ConfigError where a weight [out, in] has fewer singular vectors than the rank."""
    out_features, in_features = matrix.shape
    most = min(matrix.shape)
    if rank > most:
        raise ConfigError(
            f"adapter.init={init} takes {rank} singular vectors (adapter.rank) of each weight, and "
            f"that of {name}, {in_features} -> {out_features}, has {most}. Type adapter.rank="
            f"{most}, adapter.modules=[<wider layers>] or adapter.init=default."
        )


@torch.no_grad()
def start_from_base(name: str, layer: Any, init: str) -> None:
    """Move a low-rank part of a layer's weight into its addition, in place.

    Source: PiSSA (the largest singular values), arXiv:2404.02948; OLoRA (the first columns of a QR
    decomposition), arXiv:2406.01775.

    Args:
        name: dotted, of the layer.
        layer: of peft; its weight is not packed. Its start_A [rank, in] and start_B [out, rank] are
            set to the start of the addition.
        init: one of CHANGES_BASE.
    """
    base = layer.get_base_layer()
    matrix = derived_weight.current_matrix(base)
    if matrix.is_meta:
        return
    wide = _widened(matrix)
    rank = layer.r[ADAPTER]
    scale = layer.scaling[ADAPTER]
    if init == "olora":
        q, r = torch.linalg.qr(wide)
        _set_addition(layer, r[:rank], q[:, :rank])
    elif init == "pissa":
        _set_top_factors(layer, *torch.linalg.svd(wide, full_matrices=False))
    else:
        left, values, right = torch.svd_lowrank(wide, rank, niter=_ITERATIONS)
        _set_top_factors(layer, left, values, right.t())
    layer.start_A.copy_(layer.lora_A[ADAPTER].weight)
    layer.start_B.copy_(layer.lora_B[ADAPTER].weight)
    # The rounded additions are taken, so that the sum differs from the weight by one rounding.
    rest = wide - scale * layer.start_B.to(wide) @ layer.start_A.to(wide)
    rest = (rest.t() if is_transposed(base) else rest).to(matrix.dtype)
    derived_weight.set_weight(name, base, rest)


@torch.no_grad()
def start_from_packing_error(layer: Any, plain: Tensor) -> None:
    """Let an addition start as the best one for what the packing has rounded away, in place.

    It is LoftQ with one iteration, which leaves the packed weights as they are.

    Source: Li et al., LoftQ, arXiv:2310.08659, algorithm 1 with T = 1.

    Args:
        layer: of peft, around a packed layer.
        plain: its weight before it was packed, [out, in], on any device.
    """
    packed = _widened(unpacked_matrix(layer.get_base_layer()))
    error = plain.to(packed) - packed
    _set_top_factors(layer, *torch.linalg.svd(error, full_matrices=False))


def _widened(matrix: Tensor) -> Tensor:
    """Return a weight in float32, or in float64 if it is."""
    return matrix if matrix.dtype is torch.float64 else matrix.float()


def _set_top_factors(layer: Any, left: Tensor, values: Tensor, right: Tensor) -> None:
    """Set an addition to the matrix of its rank that is the nearest to left @ diag(values) @ right,
    a singular value decomposition."""
    rank = layer.r[ADAPTER]
    roots = (values[:rank] / layer.scaling[ADAPTER]).sqrt()
    _set_addition(layer, roots[:, None] * right[:rank], left[:, :rank] * roots)


def _set_addition(layer: Any, down: Tensor, up: Tensor) -> None:
    layer.lora_A[ADAPTER].weight.copy_(down)
    layer.lora_B[ADAPTER].weight.copy_(up)


def check_dora(name: str, layer: nn.Module, is_expert: bool = False) -> None:
    """Raise ConfigError for a layer that cannot be trained by DoRA.

    Args:
        name: its dotted name.
        layer: before peft wraps it.
        is_expert: whether it is the layer of an expert.
    """
    if is_expert:
        raise ConfigError(
            f"adapter.use_dora=true: peft has no DoRA for experts, of which {name} is one. Type "
            "adapter.use_dora=false, or leave the experts out of adapter.modules."
        )
    if any(kind.__module__.startswith("transformer_engine.") for kind in type(layer).__mro__):
        raise ConfigError(
            f"adapter.use_dora=true: peft has no DoRA for TransformerEngine's layers, of which "
            f"{name} is one. Type adapter.use_dora=false, or another precision, for example "
            "precision=float8-rowwise or precision=bf16-true."
        )
    if is_packed(layer):
        raise ConfigError(
            f"adapter.use_dora=true reads the rows of each weight in every forward, and that of "
            f"{name} is packed into codes, which would be unpacked each time. Type "
            "adapter.use_dora=false, or a precision that packs no weights, for example "
            "precision=bf16-true."
        )
    weight = derived_weight.current_matrix(layer)
    if not weight.is_meta and not weight.any(dim=1).all():
        raise ConfigError(
            f"adapter.use_dora=true divides by the norms of a weight's rows, and {name} has rows "
            "of zeros. Leave it out by adapter.modules=[<other layers>] (adapter.train="
            f"[{name}] trains it in full), or type adapter.use_dora=false."
        )


@torch.no_grad()
def start_magnitudes(layer: Any) -> None:
    """Set DoRA's magnitudes to the norms of the rows of weight and addition, in place.

    Args:
        layer: of peft, with the start values of its addition; its weight is not packed.
    """
    weight = derived_weight.current_matrix(layer.get_base_layer())
    if weight.is_meta:
        return
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    addition = layer.scaling[ADAPTER] * (up @ down).to(weight)
    magnitudes = layer.lora_magnitude_vector[ADAPTER].weight
    magnitudes.copy_(torch.linalg.norm(weight + addition, dim=1))
