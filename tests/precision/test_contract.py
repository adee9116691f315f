"""What every precision in conf/precision/ must hold to; a new yaml is picked up by itself."""

import copy
import inspect

import pytest
import torch
from precision_models import CPU, load_precision, precisions_on_cpu, train_state
from torch import nn
from torch.nn import functional as F

from runner.diagnostics.dtype_trace import DtypeProbe
from runner.precision import registry
from runner.precision.contract import Precision
from runner.precision.conversion import ConversionReport
from runner.precision.converting import ConvertingPrecision
from runner.precision.loss_scale import LossScale
from runner.precision.mixed import MixedPrecision
from runner.precision.quantized import WeightFormatPrecision
from runner.precision.true import TruePrecision
from runner.training.step import loss_of, train_step
from runner.training.tasks.classification import Classification
from runner.utils.errors import ConfigError

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
        matmul,
        conv,
    )


def test_the_table_is_complete():
    plain = {
        n for n in NAMES if isinstance(registry.load_precision(n), TruePrecision | MixedPrecision)
    }
    assert plain == set(TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_a_precision_is_a_final_subclass_of_the_base(name):
    kind = type(registry.load_precision(name))
    assert kind.__bases__ in ((Precision,), (ConvertingPrecision,), (WeightFormatPrecision,))
    assert getattr(kind, "__final__", False)
    assert inspect.getdoc(kind)
    for method in ("require", "session", "convert", "forward", "cast", "scale"):
        ours, theirs = (inspect.signature(getattr(k, method)) for k in (kind, Precision))
        assert list(ours.parameters) == list(theirs.parameters)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_precision_is_that_of_its_yaml(name):
    assert registry.load_precision(name).name == name


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
def test_kernels_returns_the_float16_kernels_that_ran(name, float16, other, choice):
    for options, kernels in ((float16, choice), (other, "")):
        precision = load_precision(name, cpu_float16=choice, **options)
        assert precision.kernels() == ""
        with precision.session(nn.Linear(2, 2), CPU):
            assert precision.kernels() == kernels


def _fail_inside(context):
    with context:
        raise RuntimeError("inside")


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
            _fail_inside(context)
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


ROUNDING = {F16: 2**-11, BF16: 2**-8, F32: 2**-24, F64: 2**-24}


@pytest.mark.parametrize("name", WHOLE)
def test_the_same_seeded_weights_up_to_rounding(name):
    torch.manual_seed(0)
    exact = Net()
    precision, model = build(name)
    unit = ROUNDING[precision.storage]
    for p, q in zip(exact.parameters(), model.parameters(), strict=True):
        assert ((p.double() - q.double()).abs() <= unit * p.double().abs() + 6e-8).all()


@pytest.mark.parametrize("name", TABLE)
def test_the_function_at_initialisation_is_that_of_float32(name):
    torch.manual_seed(0)
    images, _ = batch()
    exact = Net().double()(images.double())
    precision, model = build(name)
    with torch.no_grad(), precision.forward(CPU):
        made = model(precision.cast(images))
    error = (made.double() - exact).abs().max() / exact.abs().max()
    assert error < 30 * max(ROUNDING[precision.compute], ROUNDING[precision.storage])
    assert (error > ROUNDING[F16] / 10) == (precision.compute.itemsize == 2)


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
    def loss(self, output, target):
        self.saw = output.dtype, target.dtype, torch.is_autocast_enabled("cpu")
        return super().loss(output, target)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("inside", [False, True])
def test_the_loss_is_wide_unless_the_config_says_otherwise(name, inside):
    precision, model = build(name, autocast_loss=inside)
    state = state_of(precision, model)
    state.task = Spy()
    loss_of(state, *batch())
    compute, mixed = TABLE[name][2], name.endswith("mixed")
    wide = F64 if name == "64-true" else F32
    assert state.task.saw == (compute if inside else wide, torch.int64, inside and mixed)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("inside", [False, True])
def test_float_targets_follow_the_loss(name, inside):
    class Difference(Classification):
        def loss(self, output, target):
            self.saw = target.dtype
            return (output - target).square().mean()

    precision, model = build(name, autocast_loss=inside)
    state = state_of(precision, model)
    state.task = Difference()
    loss_of(state, batch()[0], torch.ones(4, 3)).backward()
    wide = F64 if name == "64-true" else F32
    assert state.task.saw is (TABLE[name][1] if inside else wide)


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


@pytest.mark.parametrize("name", TABLE)
def test_complex_parameters_follow_the_width(name):
    model = nn.Module()
    model.wave = nn.Parameter(torch.full((2,), 1 + 2j))
    model.register_buffer("turn", torch.full((2,), 1j))
    registry.load_precision(name).convert(model)
    wanted = torch.complex128 if name == "64-true" else torch.complex64
    assert {model.wave.dtype, model.turn.dtype} == {wanted}
    assert (model.wave[0].item(), model.turn[0].item()) == (1 + 2j, 1j)


@pytest.mark.parametrize("name", TABLE)
def test_keep_fp32_holds_in_a_training_step(name):
    precision, model = build(name, keep_fp32=["bn", "norm", "head"])
    state = state_of(precision, model)
    with precision.session(model, CPU), DtypeProbe(model) as probe:
        train_step(state, [batch()])
    rows = {row["module"]: row for row in probe.table()}
    storage, _, compute = TABLE[name]
    for part in ("bn", "norm", "head"):
        row = rows[part]
        assert (row["stores"], row["computes"], row["gradients"]) == ("float32",) * 3
        assert row["outputs"] == str(storage)[6:]
    assert rows["qkv"]["computes"] == str(compute)[6:]
    assert {b.dtype for b in model.bn.buffers()} == {F32, torch.int64}
    with pytest.raises(ConfigError, match="keep_fp32: l1 matches no module"):
        build(name, keep_fp32=["l1"])


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_scale_is_there_where_float16_meets_float32_weights(name):
    scale = load_precision(name).scale(CPU)
    assert isinstance(scale, LossScale)
    if name in TABLE:
        assert (scale.value is not None) == (name == "16-mixed")


@pytest.mark.parametrize("name", TABLE)
def test_a_copy_of_the_model_computes_the_same(name):
    precision, model = build(name, keep_fp32=["norm"])
    x = precision.cast(batch()[0])
    with torch.no_grad(), precision.forward(CPU):
        assert torch.equal(copy.deepcopy(model).eval()(x), model.eval()(x))


def test_the_base_class_changes_nothing():
    class Plain(Precision):
        name = "plain"

    precision, model = Plain(), nn.Linear(2, 2)
    precision.require(CPU)
    precision.check_optimizers([])
    with precision.session(model, CPU), precision.forward(CPU):
        pass
    assert precision.convert(model)[0] is model
    assert precision.cast(model) is model
    assert precision.scale(CPU).value is None
    assert precision.kernels() == ""
    assert (precision.layout, precision.freezes) == ("", False)
    assert precision.state_dict(model) == precision.gauges(model) == {}
    precision.load_state_dict(model, {})
    assert precision.loss_dtype is F32
