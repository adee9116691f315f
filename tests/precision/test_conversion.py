"""Which modules are converted, why others are not, and what survives of a converted module."""

import pytest
import torch
from precision_models import skip_reasons
from torch import nn
from torch.nn.utils import parametrizations

from runner.core.base.errors import ConfigError
from runner.core.policy.conversion_report import Fate, ModuleConversion
from runner.precision.conversion import (
    ConversionRules,
    convert_modules,
    find_shared_weights,
    is_converted,
    replace_in_place,
)


class Doubled(nn.Linear):
    """The layer that the conversions of this file make: its output shows that it was converted."""

    def forward(self, input):
        return 2 * super().forward(input)


def change_class(module):
    module.__class__ = Doubled


def graft_new_layer(module):
    made = Doubled(module.in_features, module.out_features, module.bias is not None)
    replace_in_place(module, made, Doubled)


def renew_weight(module):
    module.__class__ = Doubled
    module.weight = nn.Parameter(module.weight.detach().clone())


def convert(model, convert_layer=change_class, **rules):
    return convert_modules(model, {nn.Linear: convert_layer}, ConversionRules("made-up", **rules))


def message_of_refusal(model, convert_layer=change_class, **rules):
    with pytest.raises(ConfigError) as error:
        convert(model, convert_layer, **rules)
    return str(error.value)


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


X = torch.tensor([[0.5, -1.0, 2.0, 0.25]])

# Which modules are converted


def test_every_linear_layer_is_converted_and_nothing_else():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 2)))
    report = convert(model)
    assert [type(m) for m in model.modules() if not isinstance(m, nn.Sequential)] == [
        Doubled,
        nn.LayerNorm,
        Doubled,
    ]
    assert report.modules == (
        ModuleConversion("0", "Linear", Fate.CONVERTED, "", elements=16, converted=16),
        ModuleConversion("2.0", "Linear", Fate.CONVERTED, "", elements=8, converted=8),
    )


def test_a_module_registered_twice_is_converted_once_and_stays_shared():
    model = two_layers()
    model.append(model[0])
    before, converted = model[0], []
    report = convert(model, lambda m: (converted.append(m), change_class(m)))
    assert skip_reasons(report) == {"0": "", "1": ""}
    assert converted == [before, model[1]]
    assert model[2] is model[0] is before


@pytest.mark.parametrize("pattern", ["0", "2"])
def test_a_module_registered_twice_is_meant_by_either_name(pattern):
    model = two_layers()
    model.append(model[0])
    assert skip_reasons(convert(model, ignore=[pattern])) == {
        "0": "named by precision.ignore_modules",
        "1": "",
    }
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    model.append(model[0])
    report = convert(model, keep_fp32=[pattern])
    assert skip_reasons(report) == {"0.0": "kept in float32 by precision.keep_fp32", "1": ""}


class Renamed(nn.Linear):
    """A subclass that adds nothing to the forward."""


class Scaled(nn.Linear):
    def forward(self, input):
        return 3 * super().forward(input)


def with_patched_forward():
    layer = nn.Linear(4, 4)
    layer.forward = lambda input: input
    return layer


def with_old_weight_norm():
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.utils.weight_norm(nn.Linear(4, 4))


def of_library(package, name="Fast", base=nn.Linear):
    """Return a layer whose class comes from a package, as a low-precision library's does."""
    kind = type(name, (base,), {})
    kind.__module__ = f"{package}.modules"
    return kind(4, 4)


PARAMETRIZED = "its weight is made anew in each forward (a parametrization)"
NEXT_TO_A_LINEAR_LAYER = [
    (lambda: Renamed(4, 4), ""),
    (lambda: Scaled(4, 4), "Scaled has a forward of its own"),
    (with_patched_forward, "Linear has a forward of its own"),
    (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), PARAMETRIZED),
    (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), PARAMETRIZED),
    (with_old_weight_norm, PARAMETRIZED),
    (lambda: nn.LazyLinear(4), "its weight has no shape before the first forward"),
    (lambda: nn.Linear(4, 4, dtype=torch.complex64), "its weight is complex64"),
    (lambda: nn.Linear(4, 4).double(), ""),
    (lambda: of_library("bitsandbytes"), "is a Fast already"),
    (lambda: of_library("transformer_engine"), "is a Fast already"),
    (lambda: of_library("torchao"), "is a Fast already"),
]


@pytest.mark.parametrize(("build_layer", "why"), NEXT_TO_A_LINEAR_LAYER)
def test_a_layer_is_converted_or_has_a_reason(build_layer, why):
    model = nn.Sequential(build_layer(), nn.Linear(4, 4))
    kind = type(model[0])
    assert skip_reasons(convert(model)) == {"0": why, "1": ""}
    assert (type(model[0]) is Doubled) == (why == "")
    assert why == "" or type(model[0]) is kind


def test_a_lazy_layer_is_converted_once_it_has_a_shape():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    model(X)
    assert skip_reasons(convert(model)) == {"0": "", "1": ""}


@pytest.mark.parametrize(
    ("name", "low"), [("StableEmbedding", False), ("Embedding", False), ("Embedding4bit", True)]
)
def test_a_float32_embedding_of_a_library_is_no_low_precision_layer(name, low):
    assert is_converted(of_library("bitsandbytes", name, nn.Embedding)) == low


def test_low_precision_layers_of_another_kind_are_named():
    kind = type("FastNorm", (nn.Module,), {})
    kind.__module__ = "transformer_engine.pytorch"
    report = convert(nn.Sequential(kind(), nn.Linear(4, 4)))
    assert report.modules[0] == ModuleConversion(
        "0", "FastNorm", Fate.SKIPPED, "is a FastNorm already"
    )
    assert not is_converted(nn.ReLU())


def test_the_obstacle_of_the_precision_is_asked_for_last():
    model, asked = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), Scaled(4, 4)), []

    def find_obstacle(module):
        asked.append(module)
        return "" if module.out_features == 4 else "2 features are too few"

    report = convert(model, find_obstacle=find_obstacle)
    assert skip_reasons(report) == {
        "0": "",
        "1": "2 features are too few",
        "2": "Scaled has a forward of its own",
    }
    assert asked == [model[0], model[1]]


# Ties


def tied_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[3].weight = model[0].weight
    return model


def test_a_tied_weight_that_would_be_replaced_is_skipped_and_names_its_other_holders():
    model = tied_layers()
    assert skip_reasons(convert(model, renew_weight, new_weights=True)) == {
        "0": "shares a parameter with 2, 3",
        "1": "",
        "2": "shares a parameter with 0, 3",
        "3": "shares a parameter with 0, 2",
    }
    assert model[0].weight is model[2].weight is model[3].weight


def test_a_layer_tied_to_the_models_own_parameter_names_it():
    model = two_layers()
    model.register_parameter("mirror", model[0].weight)
    assert skip_reasons(convert(model, renew_weight, new_weights=True))["0"] == (
        "shares a parameter with (model)"
    )


def test_find_shared_weights_names_the_modules_that_share():
    assert find_shared_weights(tied_layers()) == {"0": ["2", "3"], "2": ["0", "3"], "3": ["0", "2"]}
    model = two_layers()
    model.append(model[0])  # one module, whose other name is in the reason
    assert find_shared_weights(model) == {"0": ["2"]}


# Modules that the config skips


def test_ignored_modules_and_their_children_are_skipped():
    model = nn.ModuleDict(
        {"body": two_layers(), "head": nn.Linear(4, 2), "header": nn.Linear(4, 2)}
    )
    why = "named by precision.ignore_modules"
    assert skip_reasons(convert(model, ignore=["body", "head"])) == {
        "body.0": why,
        "body.1": why,
        "head": why,
        "header": "",
    }
    model = nn.ModuleDict({"body": two_layers(), "head": nn.Linear(4, 2)})
    assert skip_reasons(convert(model, ignore=["*.1"])) == {"body.0": "", "body.1": why, "head": ""}


def test_a_root_that_is_kept_in_float32_leaves_nothing():
    message = message_of_refusal(two_layers(), keep_fp32=[""])
    assert "0, 1 (Linear, 24 weights): kept in float32 by precision.keep_fp32" in message


# Refusals


def test_nothing_to_convert_is_an_error_that_says_why():
    message = message_of_refusal(nn.Sequential(nn.ReLU()))
    assert message == (
        "precision=made-up would convert nothing of the model: it has no layer of a kind that it "
        "converts. Type a precision without conversion, for example precision=bf16-mixed."
    )
    message = message_of_refusal(
        nn.Sequential(*(Scaled(4, 4) for _ in range(6)), nn.Conv2d(1, 2, 3))
    )
    assert (
        "nothing of the model's 114 matrix weights: 6 Scaled (0, 1, 2, 3, …, 96 weights): Scaled "
        "has a forward of its own; 6 (Conv2d, 18 weights): precision=made-up converts linear "
        "layers only. Type"
    ) in message
    many = nn.Sequential(*(type(f"Own{i}", (Scaled,), {})(4, 4) for i in range(6)))
    assert (
        "3 (Own3, 16 weights): Own3 has a forward of its own; and 2 more. Type"
        in message_of_refusal(many)
    )


def _gradient_hook(weight):
    return weight.register_hook(lambda grad: grad)


def _accumulate_hook(weight):
    return weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize("hang", [_gradient_hook, _accumulate_hook])
def test_a_hook_on_a_weight_that_would_be_replaced_is_refused_and_names_its_module(hang):
    model = nn.ModuleDict({"body": two_layers(), "head": nn.Linear(4, 2)})
    handle = hang(model.body[1].weight)
    hang(model.head.weight)
    message = message_of_refusal(model, renew_weight, new_weights=True)
    assert "replaces weights, and a hook hangs on that of body.1, head." in message
    assert "Type precision.ignore_modules=[body.1,head]." in message
    convert(model, renew_weight, new_weights=True, ignore=["body.1", "head"])
    handle.remove()


@pytest.mark.parametrize("hang", [_gradient_hook, _accumulate_hook])
def test_a_removed_hook_or_one_that_survives_or_is_on_the_bias_is_not_refused(hang):
    model = two_layers()
    hang(model[0].weight).remove()
    hang(model[1].bias)
    assert str(convert(model, renew_weight, new_weights=True)) == "2/2"
    model = two_layers()
    hang(model[0].weight)
    assert str(convert(model, graft_new_layer)) == "2/2"


def snapshot(model):
    """Everything that a conversion could change."""
    return [(n, type(m), id(m), sorted(vars(m))) for n, m in model.named_modules()], {
        n: (id(p), p.requires_grad, p.detach().clone()) for n, p in model.named_parameters()
    }


def assert_unchanged(before, after):
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    for name, (identity, trains, value) in before[1].items():
        assert after[1][name][:2] == (identity, trains)
        assert torch.equal(after[1][name][2], value)


@pytest.mark.parametrize("reason", ["nothing", "hook", "pattern"])
def test_a_refusal_leaves_the_model_as_it_was(reason):
    model = two_layers()
    if reason == "hook":  # on the second, so that the first would have been converted
        model[1].weight.register_hook(lambda grad: grad)
    before = snapshot(model)
    rules = {
        "nothing": {"find_obstacle": lambda module: "not today"},
        "hook": {"new_weights": True},
        "pattern": {"ignore": ["head"]},
    }[reason]
    message_of_refusal(model, renew_weight, **rules)
    assert_unchanged(before, snapshot(model))


def test_an_exception_in_a_layers_conversion_names_the_module():
    def fail(module):
        raise ValueError("no kernel for it.")

    message = message_of_refusal(nn.ModuleDict({"body": two_layers()}), fail)
    assert message == (
        "precision=made-up cannot convert body.0 (Linear): ValueError: no kernel for it. "
        "Type precision.ignore_modules=[body.0]."
    )
    message = message_of_refusal(nn.Linear(4, 4), fail)
    assert "cannot convert (model) (Linear)" in message
    assert message.endswith("Type precision.ignore_modules=[*].")


@pytest.mark.parametrize("kind", [NotImplementedError, torch.OutOfMemoryError])
def test_out_of_memory_and_meta_device_errors_are_raised_unchanged(kind):
    def fail(module):
        raise kind("inside")

    with pytest.raises(kind, match="inside"):
        convert(two_layers(), fail)


# What survives


HOOKS = {
    "register_forward_pre_hook": {},
    "register_forward_hook": {"with_kwargs": True, "always_call": True},
    "register_full_backward_pre_hook": {},
    "register_full_backward_hook": {},
    "register_state_dict_pre_hook": {},
    "register_state_dict_post_hook": {},
    "register_load_state_dict_pre_hook": {},
    "register_load_state_dict_post_hook": {},
}


@pytest.mark.parametrize("convert_layer", [change_class, graft_new_layer])
@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_of_any_kind_runs_until_its_handle_removes_it(register, convert_layer):
    def use():
        seen.clear()
        model(X.clone().requires_grad_()).sum().backward()
        model.load_state_dict(model.state_dict())
        return len(seen)

    model, seen = two_layers(), []
    handle = getattr(model[0], register)(lambda *_, **__: seen.append(1), **HOOKS[register])
    convert(model, convert_layer)
    assert use() == 1
    handle.remove()
    assert use() == 0


def test_a_grafts_own_attributes_and_hooks_win():
    module, made, seen = nn.Linear(4, 4), Doubled(4, 4), []
    module.flavour, made.flavour = "old", "new"
    module.register_forward_hook(lambda *_: seen.append("mine"))
    made.register_forward_hook(lambda *_: seen.append("its own"))
    weight = module.weight
    replace_in_place(module, made, Doubled)
    module(X)
    assert (module.flavour, seen) == ("new", ["mine", "its own"])
    assert module.weight is weight
