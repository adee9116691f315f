from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from runner.precision.casting import (
    CastCacheWatch,
    DefaultDtype,
    cast_fields,
    cast_floats,
    cast_nest,
    cast_tensor,
    fields_of,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)
Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Example:
    image: torch.Tensor
    extra: dict
    label: int = 3
    size: int = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "size", len(self.image))


@pytest.mark.parametrize("policy", FLOATS)
def test_only_floats_follow_a_float_policy(policy):
    assert {cast_tensor(torch.zeros(1, dtype=d), policy).dtype for d in FLOATS} == {policy}
    assert [cast_tensor(torch.zeros(1, dtype=d), policy).dtype for d in WHOLE] == list(WHOLE)


@pytest.mark.parametrize("policy", FLOATS)
@pytest.mark.parametrize("given", [torch.complex64, torch.complex128])
def test_complex_follows_the_width_and_keeps_its_imaginary_part(policy, given):
    tensor = torch.tensor([1 + 2j], dtype=given)
    cast = cast_tensor(tensor, policy)
    assert cast.dtype is (torch.complex128 if policy is torch.float64 else torch.complex64)
    assert cast.item() == 1 + 2j


def test_a_tensor_that_fits_is_not_copied():
    tensor = torch.zeros(2)
    assert cast_tensor(tensor, torch.float32) is tensor


def test_some_fields_of_an_output_have_dtypes_of_their_own():
    one = torch.ones(1)
    for nest in (defaultdict(list, a=one, b=one), Pair(one, one), [one, one]):
        key = "a" if isinstance(nest, dict) else 0
        cast = cast_fields(nest, torch.bfloat16, {key: torch.float32})
        assert type(cast) is type(nest)
        dtypes = [part.dtype for part in fields_of(cast).values()]
        assert dtypes == [torch.float32, torch.bfloat16]


def test_nests_are_walked_and_keep_their_types():
    one = torch.ones(2)
    nest = {
        "list": [one, 5, None],
        "tuple": (one, "text"),
        "pair": Pair(one, torch.ones(2, dtype=torch.int64)),
        "example": Example(one, {"mask": torch.ones(2, dtype=torch.bool), "x": one}, 7),
    }
    cast = cast_nest(nest, torch.float64)
    assert cast["list"][0].dtype is torch.float64
    assert cast["list"][1:] == [5, None]
    assert type(cast["tuple"]) is tuple
    assert cast["tuple"][0].dtype is torch.float64
    assert type(cast["pair"]) is Pair
    assert [t.dtype for t in cast["pair"]] == [torch.float64, torch.int64]
    example = cast["example"]
    assert type(example) is Example
    assert (example.image.dtype, example.label, example.size) == (torch.float64, 7, 2)
    assert [t.dtype for t in example.extra.values()] == [torch.bool, torch.float64]
    assert nest["list"][0] is one  # a copy was cast
    assert one.dtype is torch.float32


@pytest.mark.parametrize(
    "nest",
    [
        OrderedDict(a=torch.ones(1)),
        defaultdict(list, a=torch.ones(1)),
        torch.ones(2, 3).max(0),
        pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_special_containers_keep_their_type(nest):
    cast = cast_nest(nest, torch.float64)
    assert type(cast) is type(nest)
    first = next(iter(cast.values())) if isinstance(cast, dict) else cast[0]
    assert first.dtype is torch.float64


def test_values_that_are_no_tensors_are_returned_unchanged():
    packed = cast_nest(pack_sequence([torch.ones(3, 2)]), torch.float16)
    assert isinstance(packed, PackedSequence)
    assert packed.batch_sizes.dtype is torch.int64
    assert cast_nest(Example, torch.float64) is Example
    assert cast_nest(torch.Size([1, 2]), torch.float64) == torch.Size([1, 2])


class Odd(nn.Module):
    """Every kind of tensor that a module may hold."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.wave = nn.Parameter(torch.full((2,), 1 + 2j))
        self.first.bias.requires_grad_(False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True]))
        self.register_buffer("table", torch.ones(2))
        self.second.register_buffer("table", self.table)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_module_is_cast_in_place(dtype):
    model = Odd()
    before = dict(model.named_parameters())
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append(1))
    model.first.weight.register_hook(lambda grad: seen.append(2))
    model.first.weight.grad = torch.ones(3, 3)
    cast_floats(model, dtype)

    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert model.second.weight is model.first.weight
    assert not model.first.bias.requires_grad
    assert {p.dtype for n, p in after.items() if n != "wave"} == {dtype}
    assert model.first.weight.grad.dtype is dtype
    assert model.wave.dtype is (torch.complex128 if dtype is torch.float64 else torch.complex64)
    assert model.wave[0].item() == 1 + 2j
    assert (model.count.dtype, model.mask.dtype) == (torch.int64, torch.bool)
    assert model.table.dtype is dtype
    assert model.table is model.second.table
    model.first.weight.grad = None
    model.first(torch.ones(1, 3, dtype=dtype)).sum().backward()
    assert seen == [1, 2]


def test_modules_kept_in_float32_are_not_cast():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 2))
    cast_floats(model, torch.bfloat16, {"1": torch.float32})
    still_float32 = {k for k, t in model.state_dict().items() if t.dtype is torch.float32}
    assert still_float32 == {"1.0.weight", "1.0.bias", "1.0.running_mean", "1.0.running_var"}


def test_the_reusable_context_nests():
    context = DefaultDtype(torch.bfloat16)
    for _ in range(2):
        with context:
            with DefaultDtype(torch.float64):
                with context:
                    assert torch.zeros(1).dtype is torch.bfloat16
                assert torch.get_default_dtype() is torch.float64
            assert torch.get_default_dtype() is torch.bfloat16
        assert torch.get_default_dtype() is torch.float32


class Graph:
    """A container as torch_geometric's, whose `apply` changes it."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def __copy__(self):
        return Graph(**self.tensors)

    def apply(self, function):
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}
        return self

    def to(self, device):
        raise AssertionError


def test_an_object_that_applies_a_function_to_its_tensors_is_cast():
    graph = Graph(x=torch.zeros(2, dtype=torch.float64), edges=torch.zeros(2, dtype=torch.int64))
    (cast,) = cast_nest([graph], torch.bfloat16)
    assert {k: t.dtype for k, t in cast.tensors.items()} == {
        "x": torch.bfloat16,
        "edges": torch.int64,
    }
    assert graph.tensors["x"].dtype is torch.float64


def exchange(change):
    """Return a policy's output, a reference's from the same layer, and what a watch has named."""
    torch.manual_seed(0)
    layer, reference, x = nn.Linear(4, 4, bias=False), torch.randn(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16), CastCacheWatch(layer) as watch:
        policy = layer(x)
        with torch.no_grad():
            change(layer, reference)
        return policy, layer(x), x, reference, [*watch.rewritten]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, reference: layer.weight.copy_(reference),
        lambda layer, reference: layer.weight.data.copy_(reference),
        lambda layer, reference: setattr(layer.weight, "data", reference),
        lambda layer, reference: layer.load_state_dict({"weight": reference}),
        lambda layer, reference: torch._foreach_copy_([layer.weight], [reference]),
        lambda layer, reference: torch.mul(reference, 1, out=layer.weight.data),
        lambda layer, reference: layer.weight.__setitem__(slice(None), reference),
    ],
)
def test_a_weight_that_changes_between_two_uses_is_cast_again_and_named(change):
    _, made, x, reference, names = exchange(change)
    assert torch.equal(made, F.linear(x.bfloat16(), reference.bfloat16()))
    assert names == ["weight"]


def test_a_weight_that_is_read_or_constrained_before_its_use_is_not_named():
    assert exchange(lambda layer, _: layer.weight.clone())[-1] == []
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16), CastCacheWatch(layer) as watch:
        with torch.no_grad():
            layer.weight.copy_(F.normalize(layer.weight))
        layer(x)
    assert not watch.rewritten


def test_a_forward_that_touches_a_meta_tensor_first_is_watched():
    with torch.autocast("cpu", torch.bfloat16), CastCacheWatch(nn.Linear(4, 4)) as watch:
        assert (torch.zeros(2, device="meta") + 1).is_meta
    assert not watch.rewritten
