import re

import psutil
import pytest
import torch
from torch import nn

from runner.core.base.tensor_facts import tensor_bytes
from runner.planning.plan import _state_bytes
from runner.precision.weight_updates import UPDATE_RULES
from runner.precision.wide_step import attach_update
from runner.training.setup import build_optimizer, embedding_parameters, parameters_by_optimizer

STATEFUL = (
    "adagrad adam adamw nadam rmsprop sgd muon adam8bit adamw8bit lion8bit paged_adam8bit"
    " paged_adamw8bit paged_lion8bit adamw4bit adamwfp8"
)


class Sizes(nn.Module):
    """Every size class: embeddings, tensors above and below 4096 elements, odd ones."""

    def __init__(self, dtype):
        super().__init__()
        self.words = nn.Embedding(512, 64, dtype=dtype)
        self.conv = nn.Conv2d(64, 96, 3, dtype=dtype)
        self.body = nn.Linear(64, 256, dtype=dtype)
        self.odd = nn.Linear(67, 89)
        self.norm = nn.LayerNorm(64, dtype=dtype)
        self.head = nn.Linear(256, 512, dtype=dtype)


@pytest.fixture
def plan(main):
    """What mode=plan prints for these words."""

    def printed(words):
        done = main("mode=plan", *words.split()).check_ok()
        return done.stdout

    return printed


def mib(text, row):
    return float(re.search(rf"{row}\s*│\s*([\d.]+) MiB", text)[1])


def test_the_plan_shows_what_a_run_would_hold_without_data_or_a_store(plan, tmp_path):
    """MLP of 784 x 256 x 10 (with biases) in float32 with Adam's two states per element.

    The files of MNIST are not there, and the plan does not need them.
    """
    text = plan("model=mlp data=mnist model.hidden=[256]")
    count = 784 * 256 + 256 + 256 * 10 + 10
    assert f"{count:,}" in text
    weights = round(count * 4 / 2**20, 1)
    assert mib(text, "weights and buffers") == weights
    assert mib(text, "gradients") == weights
    assert mib(text, "optimizer state") == round(count * 8 / 2**20, 1)
    assert not (tmp_path / "outputs" / "mlflow.db").exists()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("precision", "stored", "share"), [("bf16-true", "bfloat16", 0.5), ("64-true", "float64", 2)]
)
def test_memory_follows_the_precision(plan, precision, stored, share):
    net = "model=mlp data=mnist model.hidden=[4096]"
    base = plan(net)
    text = plan(f"{net} precision={precision}")
    assert stored in text
    for row in ("weights and buffers", "gradients", "optimizer state"):
        assert mib(text, row) == pytest.approx(mib(base, row) * share, abs=0.15)


def test_says_the_peak_and_the_largest_batch(plan):
    net = "model=mlp model.hidden=[2048,2048] data=digits"
    text = plan(f"accelerator=cpu {net} precision=16-mixed")
    peak = mib(text, "peak of a step")
    parts = re.findall(r"(weights|gradients|optimizer|activations|temporaries) ([\d.]+)", text)
    assert sum(float(size) for _, size in parts) == pytest.approx(peak, abs=0.3)
    assert dict(parts)["weights"] == "16.6"
    size, free = re.search(
        r"largest batch\s*│ (\d+)[^│]* in 0.8 of the ([\d.]+) GiB", text
    ).groups()
    assert int(size) & (int(size) - 1) == 0
    assert float(free) < psutil.virtual_memory().total / 2**30


def test_a_plan_without_the_shape_of_a_batch_says_so(plan):
    text = plan("model=mlp ~data.meta model.input_shape=[64] model.classes=10")
    assert "not predicted: the shape of a batch is not known without data.meta.input" in text


@pytest.mark.parametrize(
    ("words", "is_emulated"),
    [
        ("precision=transformer-engine precision.emulate=true", True),
        ("precision=16-mixed precision.emulate=true", True),
        ("precision=nvfp4 adapter=lora", True),
        ("precision=16-mixed", False),
    ],
)
def test_a_plan_of_an_emulation_says_whose_memory_it_is(plan, words, is_emulated):
    text = plan(f"accelerator=cpu model=mlp model.hidden=[64] data=digits {words}")
    sentence = "this memory is the emulation's; the hardware's own layers may hold less"
    assert (sentence in text) == is_emulated


def test_kept_modules_and_the_loss_scale_are_named(plan):
    text = plan("model=mlp precision=16-mixed precision.keep_fp32=[head]")
    assert "kept in float32: head" in text
    assert "from 65536" in text


@pytest.mark.parametrize(
    ("optimizer", "bytes_of_an_element"),
    [("muon", 4), ("lbfgs", 8), ("adamw8bit", 2), ("adamw4bit", 1.0625)],
)
def test_any_kind_of_optimizer(plan, optimizer, bytes_of_an_element):
    text = plan(f"model=mlp model.hidden=[2048,2048] optimizer={optimizer}")
    elements = mib(text, "gradients") / 4
    assert mib(text, "optimizer state") == pytest.approx(bytes_of_an_element * elements, rel=0.05)


def test_what_a_run_would_refuse_is_refused(main):
    for bad in ("precision.keep_fp32=[nothing]", "optimizer=lbfgs"):
        done = main("mode=plan", "precision=16-mixed", "model=mlp", bad).check_refused()
        assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("name", STATEFUL.split())
def test_the_planned_optimizer_state_is_that_of_training(compose, name):
    node = compose(f"optimizer={name}").optimizer
    cases = [(torch.float32, "nearest"), *((torch.bfloat16, rule) for rule in UPDATE_RULES)]
    for dtype, update in cases:
        model, held = Sizes(dtype), 0
        split = parameters_by_optimizer(node, model, dict(model.named_parameters()))
        shares = [(key, part, [*named.values()]) for key, part, named in split]
        planned = sum(_state_bytes(*share, model, update) for share in shares)
        for key, part, params in shares:
            made = build_optimizer(key, part, params, embedding_parameters(model))
            attach_update(made, update)
            held += bytes_after_a_step(made, params)
        assert planned == pytest.approx(held, rel=1e-3), (dtype, update)


def bytes_after_a_step(optimizer, params):
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    states = [v for values in optimizer.state.values() for v in values.values()]
    return tensor_bytes(*(v for v in states if isinstance(v, torch.Tensor)))


@pytest.mark.parametrize("update", ["nearest", "remainders"])
@pytest.mark.parametrize("name", ["adamw", "nadam", "sgd", "adagrad"])
def test_the_plan_follows_the_dtype_of_the_state(compose, name, update):
    dtype = torch.float32 if update == "nearest" else torch.bfloat16
    node = compose(f"optimizer={name}", "optimizer.state_dtype=bfloat16").optimizer
    model = Sizes(dtype)
    params = [*model.parameters()]
    planned = _state_bytes("optimizer", node, params, model, update)
    made = build_optimizer("optimizer", node, params)
    attach_update(made, update, torch.bfloat16)
    assert planned == pytest.approx(bytes_after_a_step(made, params), rel=1e-3)


@pytest.mark.parametrize(("least", "bits"), [(0, 8), (10**6, 32)])
def test_it_follows_min_8bit_size(least, bits):
    model = nn.Linear(300, 300, bias=False)
    node = {"_target_": "runner.training.lowbit_optimizers.AdamW8bit", "min_8bit_size": least}
    planned = _state_bytes("optimizer", node, list(model.parameters()), model, "nearest")
    per_element = planned / 90_000
    assert per_element == pytest.approx(2 * bits / 8, rel=0.04)  # scales and tables


def test_the_state_of_sparse_adam_is_that_of_adam():
    model = nn.Embedding(30, 40, sparse=True)
    node = {"_target_": "torch.optim.SparseAdam", "lr": 0.1}
    planned = _state_bytes("optimizer", node, list(model.parameters()), model, "nearest")
    assert planned == 2 * 4 * 30 * 40


def test_an_optimizer_that_reads_values_is_estimated_from_a_small_tensor(monkeypatch):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["moment"] = torch.full_like(p, p.grad.sum().item())

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    model = nn.Linear(30, 30)
    node = {"_target_": "torch.optim.SGD", "lr": 0.1}
    assert _state_bytes("optimizer", node, list(model.parameters()), model, "nearest") == 4 * 930
