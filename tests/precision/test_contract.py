"""What every precision in conf/precision/ must hold to; a new yaml is picked up by itself."""

import inspect
from dataclasses import FrozenInstanceError

import pytest
import torch
from precision_models import CPU, load_precision, precisions_on_cpu, raise_inside, train_state
from torch import nn
from torch.nn import functional as F

from runner.core.loop.step import loss_of, train_step
from runner.core.policy.conversion_report import ConversionReport
from runner.core.policy.loss_scale import LossScale
from runner.core.policy.precision import Precision
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.precision import registry
from runner.precision.base import BasePrecision, ConvertingPrecision
from runner.precision.mixed import MixedPrecision
from runner.precision.quantized import WeightFormatPrecision
from runner.precision.true import TruePrecision
from runner.training.tasks.classification import Classification

NAMES = registry.precision_names()


HERE = precisions_on_cpu()
FROZEN = [name for name in HERE if load_precision(name).freezes]
WHOLE = [name for name in HERE if name not in FROZEN]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# parameters, gradients, optimizer state and buffers; what a float32 input becomes; the products
TABLE = {
    "64-true": (F64, F64, F64),
    "32-true": (F32, F32, F32),
    "tf32": (F32, F32, F32),
    "16-mixed": (F32, F32, F16),
    "bf16-mixed": (F32, F32, BF16),
    "16-true": (F16, F16, F16),
    "bf16-true": (BF16, BF16, BF16),
}


class Net(nn.Module):
    """Convolution, norms, recurrence, attention, and tensors that the forward makes itself."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.qkv, self.norm = nn.Linear(32, 96), nn.LayerNorm(32)
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 3)
        self.twin = nn.Linear(32, 32)
        self.twin.weight = self.body.weight
        self.body.bias.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(32))

    def forward(self, images):
        hidden = F.relu(self.bn(self.conv(images))).flatten(2)
        q, k, v = self.qkv(hidden).chunk(3, -1)
        hidden = self.norm(F.scaled_dot_product_attention(q, k, v)) + self.shift
        self.made = torch.ones(1)
        return self.head(self.twin(self.body(hidden)).mean(1))


def batch(count=4):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 6, 10, generator=generator)
    return images, torch.randint(3, (count,), generator=generator)


def build(name, **changes):
    precision = load_precision(name, **changes)
    torch.manual_seed(0)
    model = Net()
    return precision, precision.convert(model)[0]


def state_of(precision, model, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train_state(precision, model, optimizer)


def process():
    """Everything of the process that a precision may touch."""
    # torch's legacy switch writes the explicit name of the default into the newer one.
    matmul, conv = (
        getattr(torch.backends.mkldnn, kind).fp32_precision.replace("none", "ieee")
        for kind in ("matmul", "conv")
    )
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        matmul,
        conv,
    )


def test_the_table_is_complete():
    plain = {
        n for n in NAMES if isinstance(registry.load_precision(n), TruePrecision | MixedPrecision)
    }
    assert plain == set(TABLE)


def test_each_precision_is_a_final_subclass_of_a_base_and_named_as_its_yaml():
    bases = ((BasePrecision,), (ConvertingPrecision,), (WeightFormatPrecision,))
    for name in NAMES:
        precision = registry.load_precision(name)
        kind = type(precision)
        assert precision.name == name
        assert kind.__bases__ in bases, name
        assert getattr(kind, "__final__", False), name
        assert inspect.getdoc(kind), name
        for method in ("require", "session", "convert", "forward", "cast", "scale"):
            ours, theirs = (inspect.signature(getattr(k, method)) for k in (kind, Precision))
            assert list(ours.parameters) == list(theirs.parameters), (name, method)


def test_each_precision_runs_here_or_says_what_is_missing():
    for row in registry.supported_precisions(CPU):
        if not row.runs:
            assert row.name in row.why
            assert row.remedy.endswith(".")
            assert row.name not in row.remedy


def contexts(precision, model):
    yield precision.session(model, CPU)
    yield precision.forward(CPU)
    yield precision.forward(CPU)  # it serves again
    yield precision.eval_context(model)


SWITCHES = [
    ("32-true", {}, ("highest", False)),  # torch leaves TF32 on for convolutions
    ("tf32", {"emulate": False}, ("high", True)),
    ("bf16-mixed", {}, ("highest", False)),
    ("bf16-mixed", {"float32_matmul": "high"}, ("high", True)),
    ("bnb-nf4", {"float32_matmul": "high"}, ("high", True)),
    ("float8-rowwise", {"float32_matmul": "high"}, ("high", True)),
]


@pytest.mark.parametrize(("name", "options", "switches"), SWITCHES)
def test_a_session_sets_the_switches_of_float32_products(name, options, switches):
    with load_precision(name, **options).session(nn.Linear(2, 2), CPU):
        matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    assert (matmul, convolution) == switches


@pytest.mark.parametrize("choice", ["native", "float32_accumulate"])
@pytest.mark.parametrize(
    ("name", "float16", "other"),
    [
        ("16-true", {}, {"dtype": "bfloat16"}),
        ("16-mixed", {}, {"dtype": "bfloat16", "loss_scale": None}),
        ("bnb-nf4", {"compute_dtype": "float16"}, {"compute_dtype": "bfloat16"}),
    ],
)
def test_kernels_returns_the_float16_kernels_of_a_session(name, float16, other, choice):
    for options, kernels in ((float16, choice), (other, "")):
        precision = load_precision(name, cpu_float16=choice, **options)
        assert precision.kernels(nn.Linear(2, 2), CPU) == kernels


@pytest.mark.parametrize("name", NAMES)
def test_a_precision_is_a_value_that_nothing_assigns_to(name):
    precision = load_precision(name)
    for attribute in ("storage", "name", "bypassed"):
        with pytest.raises(FrozenInstanceError):
            setattr(precision, attribute, "other")


@pytest.mark.parametrize("name", HERE)
def test_the_process_is_as_before_after_every_context(name):
    precision, model = build(name)
    before = process()
    for context in contexts(precision, model):
        with context:
            pass
        assert process() == before
    for context in contexts(precision, model):
        with pytest.raises(RuntimeError, match="inside"):
            raise_inside(context)
        assert process() == before
    with precision.session(model, CPU):
        train_step(state_of(precision, model), [batch()])
    assert process() == before


@pytest.mark.parametrize("name", WHOLE)
def test_convert_keeps_objects_ties_frozen_flags_and_hooks(name):
    precision, model, seen = load_precision(name), Net(), []
    model.head.register_forward_hook(lambda *_: seen.append("forward"))
    model.head.weight.register_hook(lambda _: seen.append("gradient"))
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    converted, report = precision.convert(model)
    after = dict(converted.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[n] is after[n] for n in before)
    assert list(converted.state_dict()) == keys
    assert converted.twin.weight is converted.body.weight
    assert [n for n, p in after.items() if not p.requires_grad] == ["body.bias"]
    assert isinstance(report, ConversionReport)
    loss_of(state_of(precision, converted), *batch()).backward()
    assert seen == ["forward", "gradient"]
    assert converted.body.bias.grad is None


@pytest.mark.parametrize("name", TABLE)
def test_the_dtypes_that_flow_in_a_step(name):
    storage, inputs, compute = TABLE[name]
    precision, model = build(name)
    assert (precision.storage, precision.compute) == (storage, compute)
    state = state_of(precision, model)
    with precision.session(model, CPU), DtypeProbe(model) as probe:
        pending = train_step(state, [batch()])
    rows = {row["module"]: row for row in probe.table()}
    text = {d: str(d)[6:] for d in (storage, inputs, compute)}
    assert rows["(model)"]["inputs"] == text[inputs]
    if torch.__version__ >= (
        2,
        12,
    ):  # 2.11 computes this attention in float32, and the probe says so
        assert rows["(model)"]["computes"] == text[compute]
    for part in ("conv", "bn", "qkv", "norm", "body", "twin", "head"):
        assert (part, rows[part]["stores"]) == (part, text[storage])
        assert (part, rows[part]["gradients"]) == (part, text[storage])
        assert (part, rows[part]["computes"]) == (part, text[compute])
        assert (part, rows[part]["outputs"]) == (part, text[compute])
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {storage}
    assert model.bn.num_batches_tracked.dtype is torch.int64
    assert model.made.dtype is storage
    assert pending.loss.dtype is (F64 if name == "64-true" else F32)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_the_optimizer_keeps_its_state_in_the_storage_dtype(name, fused):
    precision, model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4, fused=fused)
    state = state_of(precision, model, optimizer)
    for _ in range(12):  # a loss scale backs off until the step is applied
        train_step(state, [batch()])
    moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    assert {v.dtype for v in moments} == {TABLE[name][0]}
    assert {p.dtype for p in model.parameters()} == {TABLE[name][0]}
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(v.isfinite().all() for v in moments)


class Spy(Classification):
    """Takes class numbers and one float for each class as targets."""

    def loss(self, output, target):
        self.saw = output.dtype, target.dtype, torch.is_autocast_enabled("cpu")
        return (output - target[:, None]).square().mean()


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("inside", [False, True])
def test_the_loss_is_wide_unless_the_config_says_otherwise(name, inside):
    precision, model = build(name, autocast_loss=inside)
    state = state_of(precision, model)
    state.task = Spy()
    images, classes = batch()
    _, inputs, compute = TABLE[name]
    wide = F64 if name == "64-true" else F32
    is_autocast = inside and name.endswith("mixed")
    for target in (classes, torch.ones(4)):
        loss_of(state, images, target).backward()
        floats = inputs if inside else wide
        wanted = floats if target.is_floating_point() else torch.int64
        assert state.task.saw == (compute if inside else wide, wanted, is_autocast)


@pytest.mark.parametrize("name", TABLE)
def test_cast_leaves_integers_and_booleans_and_complex_follows_the_width(name):
    inputs = TABLE[name][1]
    nest = {
        "x": torch.ones(2),
        "rest": [torch.ones(2, dtype=torch.int64), (torch.ones(2, dtype=torch.bool), None)],
        "wave": torch.ones(2, dtype=torch.complex64) * 1j,
    }
    cast = registry.load_precision(name).cast(nest)
    assert cast["x"].dtype is inputs
    assert (cast["rest"][0].dtype, cast["rest"][1][0].dtype) == (torch.int64, torch.bool)
    assert cast["wave"].dtype is (torch.complex128 if inputs is F64 else torch.complex64)
    assert cast["wave"][0].item() == 1j


def test_a_loss_scale_is_there_where_float16_meets_float32_weights():
    scales = {name: load_precision(name).scale(CPU) for name in NAMES}
    assert all(isinstance(scale, LossScale) for scale in scales.values())
    assert [name for name, scale in scales.items() if scale.value is not None] == ["16-mixed"]


def test_the_contract_alone_cannot_be_built_and_names_the_class_to_derive_from():
    class Plain(Precision):
        name = "plain"

    with pytest.raises(TypeError, match=r"Derive it from runner\.precision\.BasePrecision"):
        Plain()


def test_the_base_class_changes_nothing():
    class Plain(BasePrecision):
        name = "plain"

    precision, model = Plain(), nn.Linear(2, 2)
    precision.require(CPU)
    precision.check_optimizers([])
    with precision.session(model, CPU), precision.forward(CPU):
        pass
    assert precision.convert(model)[0] is model
    assert precision.cast(model) is model
    assert precision.scale(CPU).value is None
    assert precision.kernels(model, CPU) == ""
    assert (precision.layout, precision.freezes) == ("", False)
    assert precision.state_dict(model) == precision.gauges(model) == {}
    precision.load_state_dict(model, {})
    assert precision.loss_dtype is F32
