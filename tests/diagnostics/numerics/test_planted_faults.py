"""Planted truths: modules of which it is known whether they need range, precision or neither."""

import math

import pytest
import torch
from numerics_models import bert
from one_off_nets import net
from states import CPU, make_state, measure_step
from torch import nn
from torch.nn import functional as F

from runner.diagnostics.numerics.measure import (
    MAX_SAMPLE_ELEMENTS,
    SampledTensor,
    count_exponents,
    quantization_losses,
    take_sample,
)
from runner.diagnostics.numerics.numerics_page import judge_precisions, loss_scale_sentence
from runner.diagnostics.numerics.results import Numerics, loss_scales
from runner.precision.dynamic_loss_scale import DynamicLossScale
from runner.precision.emulation.formats import FLOAT16, round_to_format
from runner.training.tasks.language import Language


def seen(model, batch, lr=1e-3, task=None, scale=None, optimizer=torch.optim.SGD, groups=None):
    """Return the numbers of one step in float32."""

    def make(parameters):
        return optimizer(groups or parameters, lr=lr)

    state = make_state(model, task=task, optimizer=make, scale=scale)
    return Numerics(1, "32-true", "float32", "float32", (measure_step(state, [batch]),))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(width=32, out=2):
    return normal(16, width), normal(16, out, seed=1)


class Gain(nn.Module):
    """Two layers, the hidden values between them times a gain that is taken back after."""

    def __init__(self, gain):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.gain = nn.Linear(32, 32), nn.Linear(32, 2), gain
        with torch.no_grad():
            self.body.weight *= gain
            self.body.bias *= gain

    def forward(self, x):
        return self.head(self.body(x) / self.gain)


def verdicts(numerics):
    return {found.precision: found for found in judge_precisions(numerics)}


def both(numerics, kinds=("activations", "weights", "gradients")):
    return [numerics.sensitivity(fmt, kinds) for fmt in ("float16", "bfloat16")]


class Outliers(nn.Module):
    """A layer with a few outputs far from all others, as large language models have them."""

    def __init__(self, size):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(32, 256), nn.Linear(256, 2)
        with torch.no_grad():
            self.body.bias[7] = size
            self.head.weight[:, 7] = 0.0

    def forward(self, x):
        return self.head(self.body(x))


class Masked(nn.Module):
    """Attention as in nanoGPT, whose mask is infinite or the lowest number there is."""

    def __init__(self, fill):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head, self.fill = nn.Linear(32, 96), nn.Linear(32, 2), fill

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.t()).masked_fill(torch.ones(16, 16).triu(1) > 0, self.fill)
        return self.head(F.softmax(scores, -1) @ v)


@pytest.mark.parametrize(
    ("model", "value", "needs"),
    [
        (Gain, 1e6, ["range", "none"]),
        (Gain, 1e-8, ["range", "none"]),
        (Gain, 1.0, ["none", "none"]),
        (Outliers, 1e3, ["none", "none"]),
        (Outliers, 1e5, ["range", "none"]),
        (Masked, -math.inf, ["none", "none"]),
        (Masked, torch.finfo(torch.float32).min, ["none", "none"]),
        # PyTorch refuses to fill float16 with -1e9.
        (Masked, -1e9, ["range", "none"]),
        # Infinities above are no mask.
        (Masked, math.inf, ["range", "range"]),
    ],
)
def test_what_activations_need_of_float16_and_bfloat16(model, value, needs):
    numerics = seen(model(value), batch())
    assert both(numerics, ["activations"]) == needs
    if needs == ["none", "none"]:
        assert both(numerics) == needs


@pytest.mark.parametrize("gain", [1e6, 1e-8])
def test_values_past_either_end_of_float16_need_range(gain):
    numerics = seen(Gain(gain), batch())
    assert both(numerics, ["weights"]) == ["range", "none"]
    assert verdicts(numerics)["16-mixed"].verdict == "too little range"
    assert verdicts(numerics)["bf16-mixed"].verdict == "would do"
    assert numerics.reasons("float16", ["activations"])[0][0] == "body"


def test_what_overflows_inside_a_module_is_seen():
    """Between an input and an output of unit order."""
    worst = seen(Masked(-1e9), batch()).worst("float16", 1)
    assert worst[0][:3] == ("(model)", "activations", "overflow")


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min])
def test_the_entries_of_a_mask_are_not_the_largest(fill):
    (snapshot,) = seen(Masked(fill), batch()).probes
    assert all(m.largest is not None and m.largest < 100 for m in snapshot.measured)


def together(*tensors):
    return quantization_losses(count_exponents([SampledTensor(take_sample(x)) for x in tensors]))


def test_mostly_subnormal_values_need_range():
    """Noise that more bits would not help: 1 % of the energy, and nothing becomes zero."""
    x = 0.9e-7 * (1 + torch.arange(1000) / 1000)
    found = together(x)
    assert found["float16"].underflow == 0
    assert found["float16"].noise > 0.01
    assert found["float16"].underflow_noise == pytest.approx(found["float16"].noise)
    assert (found["float16"].sensitivity, found["bfloat16"].sensitivity) == ("range", "none")


def test_noise_within_range_needs_precision():
    """Halfway between two of E5M2's values: an error of a ninth in each."""
    found = together(torch.full((999,), 1.125))
    assert found["float8_e5m2_unscaled"].noise == pytest.approx(1 / 81, rel=1e-4)
    assert found["float8_e5m2_unscaled"].underflow_noise == 0
    assert found["float8_e5m2_unscaled"].sensitivity == "precision"
    assert found["float16"].sensitivity == found["float8_e4m3fn"].sensitivity == "none"


def test_updates_between_the_spacings_of_both_formats_need_precision():
    """Of weights near 1, updates of 1/1200: float16 holds steps of 1/1024, bfloat16 of 1/128."""
    model = nn.Linear(32, 2)
    nn.init.uniform_(model.weight, 1.0, 1.4)
    nn.init.constant_(model.bias, 1.2)
    numerics = seen(model, batch(), lr=1 / 1200, optimizer=torch.optim.Adam)
    assert both(numerics, ["updates"]) == ["none", "precision"]
    assert numerics.worst("bfloat16", 1)[0][:3] == ("(model)", "updates", "swallowed")
    found = verdicts(numerics)
    assert found["16-true"] == ("16-true", "would do", "nothing is lost")
    assert found["bf16-mixed"].verdict == "would do"
    assert found["bf16-true"].verdict == "loss of updates"
    assert " swallowed in the updates of (model), limit 50 %;" in found["bf16-true"].why


@pytest.mark.parametrize("width", [8, 32])
def test_a_gradient_that_is_zero_in_exact_arithmetic_needs_nothing(width):
    """The key bias's, 1 of 9 or of 33 values of its module; a loss scale holds all others."""
    torch.manual_seed(0)
    model, (ids, targets) = bert(hidden_size=width)
    numerics = seen(model, (ids, targets), task=Language(), scale=DynamicLossScale(CPU, 2.0**16))
    keys = [m for m in numerics.probes[0].measured if m.module.endswith(".key")]
    gradients = [m.formats["float16"] for m in keys if m.kind == "gradients"]
    assert max(found.underflow for found in gradients) > 0.8 / (width + 1)
    assert max(found.vanishing for found in gradients) < 0.8 / (width + 1)
    assert both(numerics) == ["none", "none"]


def test_one_outlier_that_the_sample_misses_is_counted():
    x = normal(20 * MAX_SAMPLE_ELEMENTS)
    x[1] = 1e5
    assert take_sample(x).values.max() < 10
    assert together(x)["float16"].overflow == pytest.approx(1 / len(x))
    assert together(x)["float8_e4m3fn"].overflow == 0
    x[1] = math.inf
    (counted,) = count_exponents([SampledTensor(take_sample(x))])
    assert counted.not_finite == 1


def test_a_tensor_weighs_by_its_energy():
    x, noise = normal(3000), 1e-9 * normal(3000, seed=1)
    assert together(noise)["float16"].sqnr_db == 0
    assert together(x, noise)["float16"].sqnr_db == pytest.approx(together(x)["float16"].sqnr_db)
    y = 100 * normal(500, seed=2)
    error = [(t - round_to_format(t, FLOAT16)).double().square().sum() for t in (x, y)]
    wanted = (x.double().square().sum() + y.double().square().sum()) / sum(error)
    assert together(x, y)["float16"].sqnr_db == pytest.approx(10 * math.log10(wanted), abs=1e-3)


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_energies_that_float32_cannot_hold_add_up(factor):
    x, y = normal(2000), 30 * normal(300, seed=1)
    near = together(x, y)["bfloat16"].sqnr_db
    assert together(x * factor, y * factor)["bfloat16"].sqnr_db == pytest.approx(near, abs=1e-3)


def test_an_infinite_value_leaves_the_others_one_scale():
    """Blocks of one tensor were once scaled by what each holds."""
    x = torch.cat([normal(256), 1e-9 * normal(256, seed=1)])
    x = torch.cat([x, torch.tensor([math.inf])])
    found, plain = together(x), together(x[:-1])
    for name in found:
        assert found[name].sqnr_db == pytest.approx(plain[name].sqnr_db, abs=1e-3), name
        assert found[name].underflow == plain[name].underflow


def test_zero_and_constant_tensors():
    zero = torch.zeros(300)
    for found in together(zero).values():
        assert (found.sqnr_db, found.sensitivity, found.underflow) == (None, "none", 0.0)
    x = normal(300)
    assert together(x, zero) == together(x)
    assert count_exponents([]) == []
    assert together(torch.full((300,), 0.75))["bfloat16"].sqnr_db is None


def test_values_under_2_to_the_minus_20_of_the_largest_are_negligible():
    x = torch.cat([torch.full((70,), 2.0**-5), torch.full((30,), 2.0**-26 * 1.5)])
    found = together(x)["float16"]
    assert (found.underflow, found.vanishing, found.sensitivity) == (0.3, 0.0, "none")
    found = together(x[70:], x[:70] / 2)["float16"]
    assert (found.underflow, found.vanishing, found.sensitivity) == (0.3, 0.3, "range")
    found = together(x[70:])["float16"]
    assert (found.vanishing, found.sensitivity) == (1.0, "range")


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 8, padding_idx=0, sparse=sparse), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.table(x.long()).sum(1))


def test_sparse_gradients_are_those_of_a_dense_table():
    ids = torch.randint(0, 20, (16, 6), generator=torch.Generator().manual_seed(0)).float()
    sets = [seen(Words(sparse), (ids, normal(16, 2)), lr=0.1) for sparse in (False, True)]
    dense, sparse = ([m for m in n.probes[0].measured if m.module == "table"] for n in sets)
    assert [m.kind for m in sparse] == ["activations", "weights", "gradients", "updates"]
    for one, other in zip(dense, sparse, strict=True):
        assert (one.elements, one.zeros) == (other.elements, other.zeros)
        expected = pytest.approx(tuple(other.formats["float16"]), abs=0.01)
        assert tuple(one.formats["float16"]) == expected
    assert dense[2].zeros >= 30 / 50  # rows of words that are not in the batch, and of the padding
    assert both(sets[1]) == ["none", "none"]


def test_a_tied_weight_counts_once():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 2))
    model[1].weight = model[0].weight
    numbers = {(m.module, m.kind): m for m in seen(model, batch()).probes[0].measured}
    assert numbers["0", "gradients"].elements == 32 * 32 + 32
    assert numbers["1", "gradients"].elements == 32


def test_what_a_learning_rate_of_zero_leaves_is_not_swallowed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}]
    numerics = seen(model, batch(), lr=1.0, groups=groups)
    assert both(numerics, ["updates"]) == ["none", "none"]
    found = {m.module: m for m in numerics.probes[0].measured if m.kind == "updates"}
    assert found["0"].formats["bfloat16"].swallowed is None


class Small(nn.Module):
    """A loss so small that float16 loses its gradients."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.factor = nn.Linear(32, 32), nn.Linear(32, 2), factor

    def forward(self, x):
        return Shrink.apply(self.head(self.body(x)), self.factor)


class Shrink(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def test_gradients_that_a_loss_scale_saves():
    numerics = seen(Small(1e-7), batch(), lr=1e4)
    assert numerics.sensitivity("float16") == "range"
    found = loss_scales(numerics)
    assert found is not None
    assert verdicts(numerics)["16-mixed"].verdict == "would do"
    assert verdicts(numerics)["bf16-mixed"].verdict == "would do"
    why = f"gradients fit only with a loss scale, from {found.least:g} to {found.greatest:g}"
    assert verdicts(numerics)["16-true"] == ("16-true", "too little range", why)
    assert "16-mixed begins with 65536, which does." in loss_scale_sentence(numerics)
    for power, fits in ((found.least / 4, False), (found.least, True), (found.greatest, True)):
        scaled = seen(Small(1e-7), batch(), lr=1e4, scale=DynamicLossScale(CPU, power))
        assert (scaled.sensitivity("float16", ["gradients"]) == "none") == fits
        assert loss_scales(scaled) == found
        assert verdicts(scaled)["16-true"].why == why
    over = seen(Small(1e-7), batch(), lr=1e4, scale=DynamicLossScale(CPU, 2 * found.greatest))
    assert over.reasons("float16", ["gradients"])[0][2] == "overflow"


@pytest.mark.parametrize(
    ("factor", "words"),
    [(1e4, "begins with 65536 and skips up to"), (1e-14, "precision.loss_scale.init_scale=")],
)
def test_gradients_that_fit_at_other_scales_than_the_first(factor, words):
    assert words in loss_scale_sentence(seen(Small(factor), batch(), lr=1e-9))


def test_gradients_that_no_loss_scale_saves():
    """Of two branches, those of one 2**45 times those of the other."""
    branches = {"wide": Small(2.0**20), "narrow": Small(2.0**-25)}
    apart = net(lambda net, x: net.wide(x) + net.narrow(x), **branches)
    numerics = seen(apart, batch(), lr=1e-9)
    assert loss_scales(numerics) is None
    assert loss_scale_sentence(numerics) == "No loss scale makes all gradients fit float16."
    assert verdicts(numerics)["16-mixed"].why == "no loss scale makes all gradients fit"
