"""An exported model computes what the evaluation computes and needs none of our classes; the model
itself is unchanged."""

import functools
import itertools
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from one_off_nets import net
from states import CPU
from torch import Tensor, nn

from runner.core.config.targets import build_group
from runner.core.policy.precision import Precision
from runner.modes.training_outputs import save_model
from runner.precision.layers.experts import convert_experts
from runner.precision.mixed import MixedPrecision
from runner.precision.true import TruePrecision
from runner.training.formats.export import ExportError, export
from runner.training.model import ModelBuilder

IMAGES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(5 * 16).view(5, 16) % 256
GPT = ("model=gpt", "data=text", "data.context=16", "model.width=32", "model.layers=1")
MLP = ("model=mlp", "model.hidden=[32]")
VIT = ("model=vit", "model.layers=1", "model.hidden_dim=32", "model.mlp_dim=32")
DORA = ("adapter=lora", "adapter.use_dora=true")
CASES = {
    "64-true": ("precision=64-true", *MLP),
    "bf16-mixed": ("precision=bf16-mixed", *VIT),
    "16-mixed": ("precision=16-mixed", *GPT),
    "bf16-true": ("precision=bf16-true", *VIT),
    "resnet": ("precision=16-mixed", "precision.keep_fp32=[fc]", "model=resnet"),
    "islands": ("precision=16-true", "precision.keep_fp32=[*.norm*]", *GPT),
    "mixed-dora": ("precision=bf16-mixed", *DORA, "adapter.init=pissa", *GPT),
    "tf32": ("precision=tf32", "precision.emulate=true", *GPT),
}


def built(compose, *overrides):
    spec = compose("accelerator=cpu", *overrides)
    precision = build_group("precision", spec.precision)
    torch.manual_seed(0)
    model = ModelBuilder(spec, precision).build(CPU).model
    with torch.no_grad():
        for parameter in model.parameters():  # a head that starts at zero would hide all else
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model, precision


def evaluated(model, precision, inputs):
    """Return the outputs that runner.core.loop.training_loop.evaluate gives to the task."""
    model.eval()
    with torch.no_grad(), precision.forward(CPU):
        return model(precision.cast(inputs)).to(precision.loss_dtype)


class Exported(NamedTuple):
    """A model, the program that was made of it, and its outputs for some inputs."""

    model: nn.Module
    precision: Precision
    path: Path
    inputs: Tensor
    outputs: Tensor


@pytest.fixture(scope="module")
def exported(compose, tmp_path_factory):
    """Return the program of a case; each is made once in this file."""
    folder = tmp_path_factory.mktemp("programs")

    @functools.cache
    def make(case):
        model, precision = built(compose, *CASES[case])
        inputs = TOKENS if "model=gpt" in CASES[case] else IMAGES
        with precision.session(model, CPU):
            path = export(model, precision, inputs, folder / case).path
            outputs = evaluated(model, precision, inputs)
        return Exported(model, precision, path, inputs, outputs)

    return make


@pytest.mark.parametrize("case", CASES)
def test_the_program_computes_what_the_evaluation_computes(exported, case):
    _, precision, path, inputs, wanted = exported(case)
    program = torch.export.load(path).module()
    for rows in (5, 2, 1):  # it was traced with four
        with torch.no_grad():
            found = program(inputs[:rows])
        assert found.dtype is wanted.dtype
        wanted_rows = wanted[:rows]
        error = (found - wanted_rows).norm() / wanted_rows.norm()
        assert error < torch.finfo(precision.compute).eps ** 0.5


def test_the_facts_describe_inputs_and_outputs(compose, tmp_path):
    model, precision = built(compose, "precision=bf16-true", *MLP)
    facts = export(model, precision, IMAGES, tmp_path).facts
    assert json.loads(json.dumps(facts)) == facts
    assert facts["inputs"] == [{"name": "inputs", "dtype": "float32", "shape": [-1, 1, 8, 8]}]
    assert facts["outputs"] == [{"name": "output_0", "dtype": "float32", "shape": [-1, 10]}]
    assert facts["torch"] == torch.__version__
    assert facts["one_tensor"]


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bnb-nf4", *MLP),
        ("precision=bnb-int8-training", "model=mlp", "model.hidden=[]"),
        ("precision=float8-tensorwise", "precision.emulate=true", *MLP),
        ("precision=transformer-engine", "precision.emulate=true", *MLP),
        ("precision=nvfp4", *GPT),
        ("precision=qat-int4", *GPT),
    ],
)
def test_replaced_layers_are_refused(compose, tmp_path, words):
    model, precision = built(compose, *words)
    inputs = TOKENS if "model=gpt" in words else IMAGES
    with pytest.raises(ExportError, match=f"cannot write the layers of {words[0]} ") as caught:
        export(model, precision, inputs, tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_model_and_the_process_stay_as_they_were(compose, tmp_path):
    model, precision = built(compose, "precision=16-true", *GPT, "model.dropout=0.1")
    model.train()
    frozen = next(model.children()).eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = [id(p) for p in model.parameters()]
    random = torch.get_rng_state()
    export(model, precision, TOKENS, tmp_path)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not frozen.training
    assert [id(p) for p in model.parameters()] == identities
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_programs_load_where_there_is_no_runner(exported, tmp_path):
    for case in ("bf16-mixed", "mixed-dora", "islands"):
        program = exported(case)
        torch.save((str(program.path), program.inputs, program.outputs), tmp_path / case)
    script = (
        "import pathlib, sys, torch\n"
        "for file in pathlib.Path.cwd().iterdir():\n"
        "    path, inputs, wanted = torch.load(file, weights_only=True)\n"
        "    with torch.no_grad():\n"
        "        found = torch.export.load(path).module()(inputs)\n"
        "    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)\n"
        "assert not {'runner', 'models', 'bitsandbytes', 'torchao', 'peft'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-P", "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


def test_tensors_that_a_forward_makes_keep_their_dtype(tmp_path):
    """In a true precision the default dtype is the policy's, but not where the program runs."""
    makes = net(
        lambda net, x: net.linear(x + torch.ones(4) + torch.arange(4.0)) + torch.full((4,), 0.5),
        linear=nn.Linear(4, 4),
    )
    precision = TruePrecision("64-true", "float64")
    model, _ = precision.convert(makes)
    inputs = torch.randn(3, 4)
    made = export(model, precision, inputs, tmp_path)
    with torch.no_grad():
        found = torch.export.load(made.path).module()(inputs)
    torch.testing.assert_close(found, evaluated(model, precision, inputs), rtol=1e-12, atol=0)


class Branches(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Grouped(nn.Module):
    def forward(self, x):
        return torch._grouped_mm(x, x.mT[None], offs=torch.tensor([len(x)], dtype=torch.int32))


class Counts(nn.Module):
    calls = itertools.count(1)

    def forward(self, x):
        return x * next(self.calls)  # a constant of the program


class Fixed(nn.Module):
    def forward(self, x):
        return x.view(4, -1)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


class Batched(nn.Module):
    def forward(self, x):
        return x.view(64, 3)


class Second(nn.Module):
    """Its second output is NaN in the program alone."""

    calls = itertools.count()

    def forward(self, x):
        return x + 1, x * (torch.nan if next(self.calls) else 1.0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Branches, "its forward decides by the data what it computes"),
        (Counts, "differ"),
        (Fixed, "rows"),
        (Mean, "batch dimension"),
        (Batched, r"RuntimeError: shape '\[64, 3\]'"),
        (Second, "differ from the model's by nan"),
    ],
)
def test_the_error_of_a_failed_export_says_why_and_no_file_stays(tmp_path, kind, why):
    precision = MixedPrecision("bf16-mixed", "bfloat16")
    with pytest.raises(ExportError, match=why) as caught:
        export(kind(), precision, torch.randn(6, 3), tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [Branches, Grouped])
def test_a_failed_export_prints_neither_a_graph_nor_a_traceback(tmp_path, capfd, kind):
    with pytest.raises(ExportError):
        export(kind(), TruePrecision("32-true", "float32"), torch.randn(4, 4), tmp_path)
    assert capfd.readouterr().err == ""


def test_inputs_that_are_no_tensor_are_refused(tmp_path):
    precision = TruePrecision("32-true", "float32")
    with pytest.raises(ExportError, match=r"its input is no tensor .* but a str"):
        export(nn.Identity(), precision, "text", tmp_path)


def test_an_lstm_that_needs_our_float16_kernel_is_refused(tmp_path):
    model = net(lambda net, x: net.lstm(x)[0], lstm=nn.LSTM(4, 8, batch_first=True))
    inputs = torch.randn(4, 6, 4)
    precision = MixedPrecision("16-mixed", "float16", cpu_float16="float32_accumulate")
    with precision.session(model, CPU), pytest.raises(ExportError, match="LSTM"):
        export(model, precision, inputs, tmp_path)
    assert export(model, TruePrecision("32-true", "float32"), inputs, tmp_path).path.exists()


def test_dtypes_that_mlflows_signatures_lack_are_refused(tmp_path):
    inputs = torch.ones(4, 3, dtype=torch.bfloat16)
    with pytest.raises(ExportError, match="bfloat16"):
        export(nn.Linear(3, 2), MixedPrecision("bf16-mixed", "bfloat16"), inputs, tmp_path)


def test_one_example_is_enough(tmp_path):
    precision = TruePrecision("32-true", "float32")
    made = export(nn.Linear(3, 2), precision, torch.randn(1, 3), tmp_path)
    with torch.no_grad():
        assert torch.export.load(made.path).module()(torch.randn(7, 3)).shape == (7, 2)


def test_a_diverged_model_is_exported_too(tmp_path):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0] = torch.nan
    assert export(model, TruePrecision("32-true", "float32"), torch.ones(2, 3), tmp_path).path


PICKY = """
from one_off_nets import net
from torch import nn


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        if len(x) == 4:
            raise %s("four\\nrows")
        return self.layer(x.flatten(1))
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own, of SQLAlchemy
@pytest.mark.parametrize("error", ["RuntimeError", "KeyboardInterrupt"])
def test_a_run_whose_model_cannot_be_exported_still_finishes(main, tmp_path, error, empty_store):
    name = f"picky_{error.lower()}"
    (tmp_path / f"{name}.py").write_text(PICKY % error)
    done = main(
        "model=mlp",
        f"model._target_={name}.Picky",
        "~model.input_shape",
        "~model.classes",
        "~model.hidden",
        "train.max_steps=2",
        f"tracking.uri={empty_store(tmp_path / 'mlflow.db')}",
    )
    if error == "KeyboardInterrupt":
        assert done.rc == 130
        return
    assert done.rc == 0, done.stderr
    assert "not in MLflow, its checkpoint has the weights: RuntimeError: four." in done.stdout


def reported(model):
    """Return what a run says whose loader fails at the export of a model."""
    messages = []

    class Loader:
        def epoch(self, number):
            raise OSError("the data are gone")

    tracker = SimpleNamespace(takes_models=True)
    signals = SimpleNamespace(
        is_stop_requested=lambda: False, interruptible=nullcontext, check=lambda: None
    )
    precision = TruePrecision("32-true", "float32")
    parts = {"tracker": tracker, "signals": signals, "precision": precision}
    run = SimpleNamespace(say=messages.append, **parts)
    save_model(run, SimpleNamespace(plain_model=model), Loader())
    return messages


def test_a_run_whose_loader_fails_at_the_export_still_finishes():
    assert reported(nn.Linear(1, 1)) == [
        "The model is not in MLflow, its checkpoint has the weights: OSError: the data are gone."
    ]


def test_the_time_of_an_export_that_is_refused_beforehand_is_not_announced():
    layers = [nn.Linear(1, 1) for _ in range(60)]
    assert reported(nn.Sequential(*layers))[0].startswith("exporting 60 layers for MLflow, about ")
    experts = nn.Bilinear(2, 2, 2)
    convert_experts(experts, {"weight": False}, None)
    (message,) = reported(nn.Sequential(experts, *layers))
    assert message.endswith("torch.export cannot write the additions of an adapter to experts.")
