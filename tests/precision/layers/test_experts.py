"""Experts of a mixture: each computes as a linear layer of its own, in every kind of layer."""

import copy
from contextlib import nullcontext

import pytest
import torch
from layer_kinds import PACKED, every_kind, load, packed_kinds
from precision_models import reloaded, run_forward
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runner.core.base.errors import ConfigError
from runner.core.base.random_streams import plain_attributes
from runner.diagnostics.numerics.measure import is_measurable
from runner.precision.forward_watch import ForwardWatch, converted_layers
from runner.precision.layers.experts import KERNEL_ROWS, convert_experts, possible_stacks
from runner.precision.layers.quantized_linear import unpack_state_dict

pytest.importorskip("runner.precision.layers.bnb_linear")
pytestmark = pytest.mark.usefixtures("imitated_library")

WIDTH, INNER, COUNT = 32, 64, 4
X = torch.linspace(-1, 1, 11 * WIDTH).view(11, WIDTH).sin()
# One expert has no token, another one has most of them.
CHOICE = torch.tensor([1, 1, 3, 1, 0, 1, 1, 3, 1, 1, 1])
WAYS = ("loop", "grouped", "gathered", "batched", "dense", "left")
every_way = pytest.mark.parametrize("way", WAYS)


class Mixture(nn.Module):
    """Experts whose first weight is [experts, in, out] and whose second one [experts, out, in]."""

    def __init__(self, way="grouped"):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 6)
        self.second = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 6)
        self.router = nn.Linear(WIDTH, COUNT)

    def forward(self, x):
        return getattr(self, f"_{self.way}")(x) * self.router(x).amax(-1, keepdim=True)

    def _loop(self, x):
        output = x.new_zeros(len(x), WIDTH)
        for expert in CHOICE.unique():
            inner = torch.relu(x[expert == CHOICE] @ self.first[expert])
            output[expert == CHOICE] = F.linear(inner, self.second[expert]).to(output.dtype)
        return output

    def _grouped(self, x):
        order = CHOICE.argsort(stable=True)
        ends = CHOICE.bincount(minlength=COUNT).cumsum(0).to(torch.int32)
        inner = torch.relu(F.grouped_mm(x[order], self.first, offs=ends))
        return F.grouped_mm(inner, self.second.transpose(-2, -1), offs=ends)[order.argsort()]

    def _gathered(self, x):
        inner = torch.relu(torch.bmm(x[:, None], self.first[CHOICE]))
        return torch.bmm(inner, self.second[CHOICE].mT)[:, 0]

    def _batched(self, x):
        inner = torch.relu(x.expand(COUNT, -1, -1) @ self.first)
        return torch.bmm(inner, self.second.permute(0, 2, 1))[CHOICE, torch.arange(len(x))]

    def _dense(self, x):
        inner = torch.relu(torch.einsum("td,edf->tef", x, self.first))
        return torch.einsum("tef,edf->ted", inner, self.second)[torch.arange(len(x)), CHOICE]

    def _left(self, x):
        inner = torch.relu(self.first[CHOICE].mT @ x[..., None])
        return torch.bmm(self.second[CHOICE], inner)[..., 0]


class Unfused(nn.Module):
    """The same with an nn.Linear for each matrix."""

    def __init__(self, mixture):
        super().__init__()
        # Ways that compute all experts on all tokens scale by all tokens, too.
        self.is_dense = mixture.way in ("batched", "dense")
        self.first = nn.ModuleList(_linear(matrix.t()) for matrix in mixture.first.detach())
        self.second = nn.ModuleList(_linear(matrix) for matrix in mixture.second.detach())
        self.router = copy.deepcopy(mixture.router)

    def forward(self, x):
        output = x.new_zeros(len(x), WIDTH)
        for expert in range(COUNT) if self.is_dense else CHOICE.unique().tolist():
            rows = slice(None) if self.is_dense else expert == CHOICE
            inner = torch.relu(self.first[expert](x[rows]))
            product = self.second[expert](inner).to(output.dtype)
            output[expert == CHOICE] = product[expert == CHOICE] if self.is_dense else product
        return output * self.router(x).amax(-1, keepdim=True)


def _linear(matrix):
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    layer.weight.data = matrix.clone().contiguous()
    return layer


def convert(kind, model, **options):
    precision = load(kind, experts=["first:in_out", "second"], **options)
    return precision, *precision.convert(model)


def step(precision, model):
    """Return the outputs and the gradient of the input."""
    x = X.clone().requires_grad_()
    output = run_forward(precision, model, x)
    output.float().square().sum().backward()
    return output.detach(), x.grad


@every_way
@every_kind
def test_an_expert_computes_as_a_linear_layer_does(kind, way):
    reference = Unfused(Mixture(way))
    unfused = load(kind, keep_fp32=["router"])
    reference, _ = unfused.convert(reference)
    precision, model, report = convert(kind, Mixture(way))
    assert report.weight_counts == (2 * COUNT * WIDTH * INNER, 2 * COUNT * WIDTH * INNER + 128)
    expected, expected_grad = step(unfused, reference)
    output, grad = step(precision, model)
    # Of a transposed matrix, float32 products add up in another order.
    is_float32 = kind in ("int8 that trains", "rounded to int4", "rounded to NVFP4")
    close = {"rtol": 1e-5, "atol": 1e-6} if is_float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(output, expected, **close)
    # Sums of a token's gradients are in another order.
    torch.testing.assert_close(grad, expected_grad, rtol=2e-2, atol=2e-3)
    if kind in PACKED:
        assert "first" not in model._parameters
        return
    for name in ("first", "second"):
        for expert, layer in enumerate(getattr(reference, name)):
            gradient = model._parameters[name].grad[expert]
            if name == "first":
                gradient = gradient.t()
            wanted = layer.weight.grad
            wanted = torch.zeros_like(layer.weight) if wanted is None else wanted
            torch.testing.assert_close(gradient, wanted, **close)


@packed_kinds
def test_packed_experts_load_plain_stacks_and_unpack_to_them(kind):
    _, model, _ = convert(kind, Mixture())
    state = model.state_dict()
    assert "first" not in state
    plain = unpack_state_dict(state)
    assert {name: value.shape for name, value in plain.items()} == {
        name: value.shape for name, value in Mixture().state_dict().items()
    }
    torch.testing.assert_close(plain["first"], Mixture().first.detach(), rtol=0, atol=0.1)
    _, other, _ = convert(kind, Mixture().requires_grad_(False))
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict({**Mixture().state_dict()})
    precision, _, _ = convert(kind, Mixture())
    with torch.no_grad():
        assert torch.equal(run_forward(precision, other, X), run_forward(precision, model, X))
    misfit = {**Mixture().state_dict(), "first": torch.ones(COUNT, INNER, WIDTH)}
    with pytest.raises(RuntimeError, match="first: its shape is"):
        other.load_state_dict(misfit)


@every_kind
def test_a_state_dict_of_experts_and_a_copy_compute_the_same(kind):
    precision, model, _ = convert(kind, Mixture())
    with torch.no_grad():
        expected = run_forward(precision, model.eval(), X)
        again = copy.deepcopy(model)
        assert torch.equal(run_forward(precision, again, X), expected)
        _, loaded, _ = convert(kind, Mixture().requires_grad_(False))
        loaded.load_state_dict(reloaded(model.state_dict()))
        assert torch.equal(run_forward(precision, loaded.eval(), X), expected)


class Mean(Mixture):
    """Reads the numbers of its first stack beside the products."""

    def forward(self, x):
        return super().forward(x) + self.first.mean()


@pytest.mark.parametrize("kind", ["int8 products", "float8 by row"])
def test_a_forward_shows_what_it_does_with_the_stacks(kind):
    for make, found, bypassed in (
        (Mixture, {"first": True, "second": False}, set()),
        (Mean, {"second": False}, {"(model)"}),
    ):
        precision, model, report = convert(kind, make())
        watch = ForwardWatch(model, converted_layers(model, report))
        with watch:
            run_forward(precision, model, X)
        assert (watch.experts(), watch.bypassed) == (found, bypassed)
    with pytest.raises(ConfigError, match=r"uses its first in mean\. Allowed"):
        run_forward(precision, model, X)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x = x
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.x.t() @ gradient


def test_a_gradient_that_a_function_of_the_model_would_lose_is_refused():
    precision, model, _ = convert("rounded to int4", Mixture())
    with precision.forward(torch.device("cpu")):
        output = Product.apply(X, model.first[1])
    with pytest.raises(ConfigError, match=r"Function of the model takes first, and the gradient"):
        output.sum().backward()


def test_a_name_that_is_no_stack_is_refused():
    with pytest.raises(ConfigError, match=r"ends in :out\. Allowed: first, of a weight"):
        load("float8 by row", experts=["first:out"]).convert(Mixture())
    with pytest.raises(ConfigError, match=r"experts: third matches no parameter"):
        load("float8 by row", experts=["third"]).convert(Mixture())
    with pytest.raises(ConfigError, match=r"weight matches layer\.weight, whose shape is \[2, 3\]"):
        load("float8 by row", experts=["*.weight"]).convert(
            nn.ModuleDict({"layer": nn.Linear(3, 2)})
        )


class Last(Mixture):
    """Its forward ends with a product of the second stack."""

    def forward(self, x):
        return F.linear(torch.relu(x @ self.first[0]), self.second[0])


@pytest.mark.parametrize("kind", ["float8 by row", "rounded to int4", "current scaling"])
def test_activation_checkpointing_leaves_no_weight_in_a_layer(kind):
    # It ends the second forward by an exception as soon as the backward has what it needs.
    precision, model, _ = convert(kind, Last())
    with precision.session(model, X.device), precision.forward(X.device):
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert not any(getattr(layer, "_slice", None) is not None for layer in model.modules())
    assert model.active_experts is None
    copy.deepcopy(model)


def test_code_outside_of_the_forward_reads_the_stacks_themselves():
    precision, model, _ = convert("float8 by row", Mixture())
    step(precision, model)
    assert model.first.requires_grad
    assert torch.equal(model.first.grad, model._parameters["first"].grad)
    with torch.no_grad():
        model.first.mul_(2)
    assert torch.equal(model._parameters["first"], 2 * Mixture().first)
    model.first.requires_grad_(False)
    assert not model._parameters["first"].requires_grad
    _, packed, _ = convert("packed int4", Mixture())
    wanted = Mixture().first.abs().mean()
    torch.testing.assert_close(packed.first.abs().mean(), wanted, rtol=0.1, atol=0)


class Measured(Mixture):
    """Is asked in its forward, as snapshots of numerics ask, what can be measured."""

    def forward(self, x):
        assert not is_measurable(self.first.mT)
        assert not self.second.is_nested
        return super().forward(x)


def test_snapshots_leave_out_what_has_no_numbers():
    precision, model, _ = convert("float8 by row", Measured())
    step(precision, model)


class Counting(Mixture):
    """Has an attribute that a forward changes."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(COUNT)


def test_attributes_of_a_module_of_experts_stay_its_own():
    _, model, _ = convert("float8 by row", Counting())
    assert plain_attributes(model)["seen"] is model.seen
    assert "_owner" not in plain_attributes(model.second_as_experts[0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"products": 3}, "has products of its own, names that converted experts take"),
        ({"first": nn.Parameter(torch.ones(4, 32, 48) * 1j)}, "first is complex64"),
    ],
)
def test_a_mixture_that_cannot_be_converted_stays_as_it_is(changes, why):
    model = Mixture()
    for name, value in changes.items():
        setattr(model, name, value)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), model)
    precision = load("float8 by row", experts=["1.first:in_out", "1.second"])
    _, report = precision.convert(model)
    assert {row.module: row.why for row in report.modules}["1"] == why
    assert type(model[1]) is Mixture
    assert possible_stacks(model[1]).keys() <= {"first", "second"}


@pytest.mark.parametrize(("kind", "done"), [("float8 by row", True), ("packed int4", False)])
def test_one_stack_in_two_modules_is_converted_in_both_or_in_neither(kind, done):
    models = [Mixture("loop"), Mixture("grouped")]
    models[1].first, models[1].second = models[0].first, models[0].second
    precision = load(kind, experts=["*.first:in_out", "*.second"])
    model, report = precision.convert(nn.Sequential(*models, nn.Linear(WIDTH, WIDTH)))
    fates = {row.module: row.is_converted for row in report.modules}
    assert (fates["0"], fates["1"]) == (done, done)
    step(precision, model)
    assert sum(parameter.ndim == 3 for parameter in model.parameters()) == 2


def test_a_list_of_ones_own_that_is_named_experts_stays_a_list():
    model = nn.ModuleDict({"local_experts": nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})
    names = [*model.state_dict()]
    load("packed int4").convert(model)
    assert sorted(unpack_state_dict(model.state_dict())) == sorted(names)


def test_packed_experts_of_which_one_is_missing_are_refused():
    _, model, _ = convert("packed int4", Mixture())
    state = {name: v for name, v in model.state_dict().items() if ".1.weight" not in name}
    with pytest.raises(ValueError, match=r"of first lack first_as_experts_transposed\.1\.weight"):
        unpack_state_dict(state)


class Holder(nn.Module):
    """Holds a stack that the module around it multiplies with."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 6)


NONE = torch.zeros(0, dtype=torch.long)
FORMS = {
    "w[e, :, :]": lambda x, w: x @ w[1, :, :],
    "negative": lambda x, w: x @ w[-1],
    "iterated": lambda x, w: torch.stack([x @ matrix for matrix in w]),
    "keywords": lambda x, w: x @ w.transpose(dim0=1, dim1=2).mT[0],
    "mat2": lambda x, w: torch.bmm(x[None].expand(COUNT, -1, -1), mat2=w),
    "one expert by einsum": lambda x, w: torch.einsum("td,df->tf", x, w[2]),
    "one gathered": lambda x, w: torch.matmul(torch.stack([x, x]), w[torch.tensor([1])]),
    "none gathered": lambda x, w: torch.bmm(x[:0, None], w[NONE]),
    "no rows": lambda x, w: x[:0] @ w[1],
    "one group": lambda x, w: F.grouped_mm(x, w, offs=torch.tensor([0, 0, 0, 11]).int()),
    "cast to it": lambda x, w: x.double().type_as(w) @ w[0],
    "addmm": lambda x, w: torch.addmm(x[0, :1], x, w[1]),
    "addmm, scaled": lambda x, w: torch.addmm(x[0, :1], x, w[1], alpha=2.0),
    "summed": lambda x, w: (x @ w[0]) * w.mean(),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_ways_to_multiply_have_the_numbers_of_plain_tensors(form):
    torch.manual_seed(0)
    holder = Holder()
    plain = holder.stack
    x = X.clone().requires_grad_()
    expected = FORMS[form](x, plain)
    wanted = torch.autograd.grad(expected.square().sum(), (x, plain), allow_unused=True)
    convert_experts(holder, {"stack": True}, lambda layer: None)
    assert "stack" in repr(holder.stack)
    output = FORMS[form](x, holder.stack)
    torch.testing.assert_close(output, expected)
    assert output.requires_grad
    found = torch.autograd.grad(output.square().sum(), (x, plain), allow_unused=True)
    for tensor, gradient, each in zip((x, plain), found, wanted, strict=True):
        zeros = torch.zeros_like(tensor)
        gradients = (zeros if value is None else value for value in (gradient, each))
        torch.testing.assert_close(*gradients)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = Holder()

    def forward(self, x):
        return x @ self.experts.stack[1]


def test_a_stack_that_another_module_multiplies_with_counts_as_run():
    precision = load("int8 products", experts=["experts.stack:in_out"])
    model, report = precision.convert(Around())
    watch = ForwardWatch(model, converted_layers(model, report))
    with watch:
        run_forward(precision, model, X)
    assert (watch.executed, watch.bypassed) == ({"experts"}, set())


def test_an_expert_without_rows_has_the_dtype_of_one_with_rows():
    precision, model, _ = convert("float8 by row", Mixture())
    with precision.forward(torch.device("cpu")):
        assert (X[:0] @ model.first[0]).dtype is (X @ model.first[0]).dtype is torch.bfloat16
        without_groups = F.grouped_mm(X, model.first, offs=torch.zeros(COUNT).int())
        assert without_groups.dtype is torch.bfloat16
        assert not without_groups.any()


class _Kernels(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["loop", "grouped", "batched"])
def test_rows_that_spare_the_cpu_new_kernels_change_no_number_and_no_count(way):
    """oneDNN compiles one for each number of rows in 16 bits; what watches kernels sees no more."""
    precision, model, _ = convert("4-bit with nested scales", Mixture(way))
    rows = set()
    for layer in model.layers_of("first"):
        layer.register_forward_hook(lambda _, inputs, output: rows.add(len(inputs[0])))
    results = []
    for watch in (nullcontext(), _Kernels()):
        x = X.clone().requires_grad_()
        with precision.forward(torch.device("cpu")), watch:
            output = model(x)
        results.append((output.detach(), *torch.autograd.grad(output.sum(), x)))
        assert all(count % KERNEL_ROWS == 0 for count in rows) == (len(results) == 1)
    for padded, plain in zip(*results, strict=True):
        assert torch.equal(padded, plain)
