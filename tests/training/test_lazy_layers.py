"""Lazy layers: every precision starts from the same numbers, and no place meets an empty layer."""

import pytest
import torch
from precision_models import CPU, load_precision
from torch import nn
from torch.utils.data import TensorDataset

from runner.core.base.errors import ConfigError
from runner.core.config.schema import InitSpec, RunSpec
from runner.data.build import build_data, build_run_loaders
from runner.diagnostics.memory.forecast import peak_forecast
from runner.precision import registry
from runner.training.model import ModelBuilder

META = {"input": [3, 8, 8], "classes": 10}
NUMBERS = 3 * 4 * 9 + 4 + 2 * 4 + 4 * 36 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10


class Lazy(nn.Sequential):
    """Convolution, norm and linear layers that know no input width."""

    def __init__(self):
        super().__init__(
            nn.LazyConv2d(4, 3),
            nn.LazyBatchNorm2d(),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.LazyLinear(32),
            nn.ReLU(),
            nn.LazyLinear(32),
            nn.Linear(32, 10),
        )


class Aside(nn.Module):
    """A lazy layer that only training calls."""

    def __init__(self):
        super().__init__()
        self.flat, self.head, self.aside = nn.Flatten(), nn.LazyLinear(10), nn.LazyLinear(10)

    def forward(self, x):
        x = self.flat(x)
        return self.head(x) + self.aside(x) if self.training else self.head(x)


class Named(nn.Module):
    """Its input is a dict, whose shape no data.meta can tell."""

    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(10)

    def forward(self, inputs):
        return self.head(inputs["x"].flatten(1))


def images():
    torch.rand(7)  # what the data draw must not move the weights
    made = TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8))
    return made, made


class Dicts(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x}, y


def dicts():
    made = Dicts(torch.rand(8, 3, 8, 8), torch.arange(8))
    return made, made


def make_spec(model="Lazy", data="images", meta=META, **changes):
    return RunSpec(
        model={"_target_": f"{__name__}.{model}"},
        data={"_target_": f"{__name__}.{data}", **({"meta": meta} if meta else {})},
        task={"_target_": "runner.training.tasks.classification.Classification"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
        scheduler={"_target_": None},
        **changes,
    )


def make(name, spec=None):
    torch.manual_seed(0)
    return ModelBuilder(spec or make_spec(), load_precision(name)).build(CPU)


PACKED = [name for name in registry.precision_names() if registry.load_precision(name).freezes]
ONE_OF_EACH_KIND = ("32-true", "64-true", "bf16-true", "16-mixed", "qat-int8", "bnb-nf4", "tf32")
NAMES = [
    pytest.param(name, marks=[pytest.mark.extended] * (name not in ONE_OF_EACH_KIND))
    for name in registry.precision_names()
    if name == "bnb-nf4" or name not in PACKED
]


@pytest.mark.parametrize("name", NAMES)
def test_every_precision_starts_from_the_numbers_of_float32(name):
    plain, built = make("32-true").model, make(name)
    assert sum(p.numel() for p in plain.parameters()) == NUMBERS
    assert built.plain_bytes == make("32-true").plain_bytes
    packed = name == "bnb-nf4"
    wanted, found = plain.state_dict(), built.model.state_dict()
    for key, value in wanted.items():
        if not (packed and key in ("4.weight", "6.weight", "7.weight")):
            assert torch.equal(found[key], value.to(found[key].dtype)), key
    assert not any(isinstance(m, nn.LazyLinear) for m in built.model.modules())
    if "bnb" in name:
        assert str(built.report) == "3/4"  # the convolution stays as it is


def test_the_forward_leaves_norms_and_modes_as_they_were():
    model = make("32-true").model
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert model[1].num_batches_tracked == 0
    assert all(module.training for module in model.modules())


def test_the_weights_do_not_depend_on_what_the_data_draw():
    a = make("32-true").model
    b = make("32-true", make_spec(mode="plan")).model  # by data.meta, without the data
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_inputs_of_any_shape_come_from_the_data():
    assert make("bf16-true", make_spec("Named", "dicts", None)).model.head.in_features == 192


def test_a_run_reads_the_data_that_it_has_loaded(monkeypatch):
    loaders = build_run_loaders(make_spec(), build_data(make_spec()), CPU)
    wanted = make("bf16-true").model
    monkeypatch.setattr(f"{__name__}.images", pytest.fail)
    torch.manual_seed(0)
    model = ModelBuilder(make_spec(), load_precision("bf16-true"), loaders=loaders).build(CPU).model
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), wanted.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["32-true", "bf16-true", "bnb-nf4"])
def test_a_plan_knows_the_shapes_and_the_peak(name):
    spec, precision = make_spec(mode="plan"), registry.load_precision(name)
    built = ModelBuilder(spec, precision).build_on_meta()
    assert built.plain_bytes == make("32-true").plain_bytes
    assert peak_forecast(spec, precision, CPU).peak(4).total > built.plain_bytes / 8


def test_low_memory_makes_them_in_the_precisions_dtype():
    model = make("bf16-true", make_spec(init=InitSpec(low_memory=True))).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert str(make("bnb-nf4", make_spec(init=InitSpec(low_memory=True))).report) == "3/4"


REFUSED = {
    "no example in a plan": (
        {"meta": None, "mode": "plan"},
        r"lazy layers 0, 1, 4 and 1 more take their sizes from an example: .*data\.meta\.input",
    ),
    "data that do not fit": (
        {"data": "dicts", "meta": None},
        r"lazy layers 0, 1, 4 and 1 more .* fails on inputs dict: .*Give these layers their sizes",
    ),
    "a layer that is not called": (
        {"model": "Aside"},
        r"lazy layers aside are not called by a forward in evaluation mode",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_materialized_is_one_message(case):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as error:
        make("32-true", make_spec(**changes))
    assert error.value.exit_status == 2
    if changes.get("mode") == "plan":
        float32 = registry.load_precision("32-true")
        with pytest.raises(ConfigError, match=message):
            ModelBuilder(make_spec(**changes), float32).build_on_meta()
