"""Weights that lie in files until the conversion takes them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.pytorch_utils import Conv1D

from runner.config.schema import RunSpec
from runner.models.gpt import GPT
from runner.precision import registry
from runner.precision.disk_offload import DiskOffload
from runner.training.model import build_model

CPU, META = torch.device("cpu"), torch.device("meta")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZES = {"vocab_size": 17, "context": 8, "layers": 2, "heads": 2, "width": 16}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def build_model_with(offload=None, build=lambda: GPT(**SIZES)):
    torch.manual_seed(3)
    if offload is None:
        return build()
    with offload:
        return build()


def mapped(folder):
    """How many files of the folder this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f"{folder}/weight-" in line})


def test_every_weight_has_the_value_that_it_has_without_offload():
    plain, model = build_model_with(), build_model_with(DiskOffload())
    names = dict(model.named_parameters())
    assert names.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert type(names[name]) is nn.Parameter
        assert torch.equal(names[name], parameter), name
        assert (names[name].stride(), names[name].requires_grad) == (parameter.stride(), True)
    assert model.head.weight is model.token_embedding.weight
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens), plain(tokens))


@LINUX
def test_linear_weights_are_mapped_from_unlinked_files(folder):
    model = build_model_with(DiskOffload())
    assert mapped(folder) == 9  # four in each of two blocks, and the tied head's
    assert list(folder.iterdir()) == []
    del model
    assert mapped(folder) == 0


@LINUX
def test_only_float_weights_of_plain_linear_layers_on_the_cpu_are_spilled(folder):
    class Own(nn.Linear):
        pass

    def build():
        whole = nn.Linear(4, 4)
        whole.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
        return nn.ModuleList(
            [
                Own(4, 4),
                nn.Conv2d(1, 1, 3),
                nn.Embedding(4, 4),
                nn.LazyLinear(4),
                whole,
                nn.Linear(4, 4, device="meta"),
                nn.Linear(4, 4, dtype=torch.complex64),
            ]
        )

    modules = build_model_with(DiskOffload(), build)
    assert mapped(folder) == 0
    assert modules[5].weight.is_meta
    assert modules[4].weight.dtype is torch.int8


@LINUX
def test_the_weights_of_gpt2s_transposed_layers_are_spilled(folder):
    layer = build_model_with(DiskOffload(), lambda: Conv1D(6, 4))
    assert mapped(folder) == 1
    assert layer.weight.shape == (4, 6)


@LINUX
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_keeps_its_values(folder, dtype):
    def build():
        return nn.Linear(5, 3, dtype=dtype)

    plain, model = build_model_with(build=build), build_model_with(DiskOffload(), build)
    assert mapped(folder) == 1
    assert model.weight.dtype is dtype
    assert torch.equal(model.weight, plain.weight)


def test_a_layer_without_weights_can_be_built():
    with pytest.warns(UserWarning, match="zero-element"):
        assert build_model_with(DiskOffload(), lambda: nn.Linear(4, 0)).weight.shape == (0, 4)


def test_a_weight_that_is_tied_twice_is_spilled_once_and_stays_tied():
    def build():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        pointer = first.weight.data_ptr()
        second.weight = first.weight
        assert first.weight.data_ptr() == pointer
        return nn.Sequential(first, second)

    model = build_model_with(DiskOffload(), build)
    assert model[0].weight is model[1].weight


@LINUX
def test_a_loaded_weight_is_an_ordinary_one_with_the_same_object_and_value(folder):
    offload = DiskOffload()
    model = build_model_with(offload)
    before = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    offload.load_unconverted(model)
    assert mapped(folder) == 0
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, values[name]), name
    assert model.head.weight is model.token_embedding.weight
    model(torch.arange(8)[None]).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.blocks[0].expand.weight, values["blocks.0.expand.weight"])


def test_weights_that_were_never_spilled_are_not_copied():
    offload, model = DiskOffload(), build_model_with()
    pointers = [p.data_ptr() for p in model.parameters()]
    build_model_with(offload)
    offload.load_unconverted(model)
    assert [p.data_ptr() for p in model.parameters()] == pointers


@LINUX
def test_an_offload_can_be_used_again_and_forgets_the_last_model(folder):
    offload = DiskOffload()
    first = build_model_with(offload)
    offload.load_unconverted(nn.Linear(1, 1))  # another model: the first's weights are forgotten
    offload.load_unconverted(first)
    assert mapped(folder) == 9
    second = build_model_with(offload)
    assert mapped(folder) == 18
    offload.load_unconverted(second)
    assert mapped(folder) == 9


def _fail_inside(offload):
    with offload:
        assert torch.empty(1).device == CPU
        raise RuntimeError("inside")


@LINUX
def test_the_default_device_and_the_hook_are_as_before_also_after_an_exception(folder):
    hooks = torch_module._global_parameter_registration_hooks
    before = dict(hooks)
    with META:
        with DiskOffload():
            assert torch.empty(1).device == CPU
            assert len(hooks) == len(before) + 1
        assert torch.empty(1).device == META
        with pytest.raises(RuntimeError, match="inside"):
            _fail_inside(DiskOffload())
        assert torch.empty(1).device == META
    assert torch.empty(1).device == CPU
    assert dict(hooks) == before
    layer = nn.Linear(4, 4)
    assert layer.weight.device == CPU
    assert mapped(folder) == 0


# A process of its own: what this one has freed before would hide what is taken.
MEASURE = """
import sys
from contextlib import nullcontext
import torch
from torch import nn
from runner.precision.disk_offload import DiskOffload

torch.set_num_threads(1)

def private():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def grown_layers(context):
    start = most = private()
    layers = []
    with context:
        for _ in range(12):
            layers.append(nn.Linear(1024, 1024))
            most = max(most, private())
    return (most - start) / 4096

nn.Linear(1024, 1024)  # what the first layer takes once and for all
# The plain build is the last: what it frees would hide what the other takes.
print(grown_layers(DiskOffload()), grown_layers(nullcontext()))
"""


@LINUX
def test_memory_grows_by_less_than_two_layers_where_a_plain_build_takes_all():
    """Of 12 layers of 1024 x 1024, in private memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=120, check=True
    )
    offloaded, plain = map(float, done.stdout.split())
    assert offloaded < 2
    assert plain > 10


def spec(low, model=None):
    node = {"_target_": "runner.models.gpt.GPT", **SIZES}
    init = replace(RunSpec(model={}, optimizer={}, scheduler={}).init, low_memory=low)
    return RunSpec(model=model or node, optimizer={}, scheduler={}, init=init)


@LINUX
@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-nf4-dq", "bnb-fp4", "bnb-int8"])
def test_a_model_built_in_low_memory_computes_the_same_bit_for_bit(folder, name):
    pytest.importorskip("runner.precision.layers.bnb_library")
    models, sizes = [], []
    for low in (False, True):
        precision = registry.load_precision(name, ignore_modules=["blocks.1.expand"])
        torch.manual_seed(3)
        built = build_model(spec(low), precision, CPU)
        models.append(built.model)
        sizes.append(built.plain_bytes)
    plain, model = models
    assert mapped(folder) == 0  # neither a packed weight nor an unconverted one is in a file
    assert list(folder.iterdir()) == []
    assert sizes[0] == sizes[1]
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(v, state[k]) for k, v in plain.state_dict().items())
    tokens = torch.arange(16).view(2, 8)
    with precision.forward(CPU):
        assert torch.equal(plain(tokens), model(tokens))


class Spy(nn.Module):
    """Remembers how many of its weights were in files when it was made."""

    spilled: int

    def __init__(self, folder):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        type(self).spilled = mapped(folder)


@LINUX
@pytest.mark.parametrize(
    ("name", "low", "spilled"),
    [("bnb-nf4", True, 1), ("bnb-nf4", False, 0), ("bnb-int8-training", True, 0)],
)
def test_weights_are_spilled_where_they_are_to_be_packed_and_memory_is_low(
    folder, name, low, spilled
):
    pytest.importorskip("runner.precision.layers.bnb_library")
    node = {"_target_": f"{__name__}.Spy", "folder": str(folder)}
    build_model(spec(low, node), registry.load_precision(name), CPU)
    assert Spy.spilled == spilled
