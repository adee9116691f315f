"""docs/precision-library.md: its code runs as it stands there, and what it says of Fabric and
Accelerate is so."""

import io
import re
import warnings
from contextlib import redirect_stdout
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from states import make_state, optimizer_gradients
from torch import nn
from torch.nn import functional as F

from runner.core.loop.step import train_step
from runner.core.loop.task import Task
from runner.precision import PolicyError, precision
from runner.precision.registry import precision_names


class Net(nn.Module):
    """Two layers, the same in every call; with labels it computes its own loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x, labels=None):
        output = self.head(self.body(x).relu())
        if labels is None:
            return output
        return SimpleNamespace(loss=F.cross_entropy(output.float(), labels))


def batches(count=8):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = torch.randn(32, 16, generator=generator)
        yield inputs, inputs[:, :4].argmax(1)


def groups_of(size, batches):
    iterator = iter(batches)
    while group := [*islice(iterator, size)]:
        yield group


class Watch:
    """F with the losses and the dtypes of what enters them noted."""

    def __init__(self):
        self.losses, self.dtypes = [], []

    def cross_entropy(self, output, target):
        loss = F.cross_entropy(output, target)
        self.losses.append(loss.item())
        self.dtypes.append(output.dtype)
        return loss


@pytest.fixture
def page(root):
    return (root / "docs" / "precision-library.md").read_text()


@pytest.fixture
def blocks(page):
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def names(**more):
    """What a block of the page takes as given."""
    model = Net()
    given = {"torch": torch, "nn": nn, "F": Watch(), "Net": Net, "precision": precision}
    return given | {"loader": [*batches()], "groups_of": groups_of, "model": model} | more


def block_with(blocks, text):
    (block,) = [block for block in blocks if text in block]
    return block


def loop_losses(block, **more):
    """Run a block of the page; return its losses, the dtypes of the outputs, and its names."""
    given = names(**more)
    # "warnings are errors" is this suite's rule, not the libraries'.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(block, given)
    return given["F"].losses, given["F"].dtypes, given


def test_every_block_is_run_by_a_test(blocks):
    """Twelve blocks: each test below names one by its words."""
    assert len(blocks) == 12
    assert len(block_with(blocks, "clip_norm=1.0").splitlines()) == 12


def test_the_loop_trains_and_continues_exactly(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = block_with(blocks, "clip_norm=1.0")
    whole, dtypes, _ = loop_losses(block)
    assert set(dtypes) == {torch.float32}
    assert whole[-1] < whole[0]
    *_, given = loop_losses(block, loader=[*batches()][:4])
    exec(block_with(blocks, "checkpoint.pt"), given)
    rest = block[block.index("with policy.session()") :]
    given |= {"F": Watch(), "loader": [*batches()][4:]}
    exec(rest, given)
    assert given["F"].losses == whole[4:]


def test_keys_are_python_values(blocks):
    given = names()
    exec(block_with(blocks, 'keep_fp32=["head"]'), given)
    model = given["policy"].convert(Net())
    assert (given["policy"].loss_scale, model.head.weight.dtype) == (1024.0, torch.float32)


def test_a_model_may_compute_its_own_loss(blocks):
    policy = precision("bf16-true")
    model = policy.convert(Net())
    inputs, labels = next(batches())
    given = names(policy=policy, model=model, batch={"x": inputs, "labels": labels})
    with policy.session():
        exec(block_with(blocks, "**policy.cast(batch)"), given)
    assert model.body.weight.grad.dtype is torch.bfloat16


def test_micro_batches_are_one_large_batch(blocks):
    block = block_with(blocks, "groups_of")
    micro_batches = [*batches()]
    halves = (micro_batches[:4], micro_batches[4:])
    large = [tuple(map(torch.cat, zip(*half, strict=True))) for half in halves]
    whole = block.replace("groups_of(4,", "groups_of(1,").replace("1 / 4", "1.0")
    weights = []
    for text, loader in ((block, micro_batches), (whole, large)):
        policy = precision("16-mixed")
        model = policy.convert(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        given = {"policy": policy, "model": model, "optimizer": optimizer, "scheduler": scheduler}
        *_, given = loop_losses(text, loader=loader, **given)
        assert (policy.steps, policy.skipped_steps, scheduler.last_epoch) == (2, 0, 2)
        assert 0 < given["norm"] < 100
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    start = nn.utils.parameters_to_vector(Net().parameters())
    assert (weights[0] - start).abs().max() > 1e-3
    torch.testing.assert_close(*weights, rtol=0, atol=2e-5)


def test_two_optimizers_step_together(blocks):
    policy = precision("16-mixed", loss_scale={"init_scale": 2.0**24})
    losses, *_ = loop_losses(
        block_with(blocks, "head_optimizer"),
        policy=policy,
        Body=lambda: nn.Linear(16, 8),
        Head=lambda: nn.Linear(8, 4),
    )
    assert policy.steps == 8 > policy.skipped_steps > 0
    assert len(losses) == 8


def gan_parts():
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return {"g": g, "d": nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))}


def gan_losses(text, name):
    """The last losses of 60 steps of the page's loop, with the numbers of plain PyTorch's."""
    generator = torch.Generator().manual_seed(1)
    loader = []
    for _ in range(60):
        real = torch.randn(32, 4, generator=generator) + 2
        loader.append((real, torch.randn(32, 8, generator=generator)))
    given = {"policy": precision(name), "bce": F.binary_cross_entropy_with_logits, "torch": torch}
    exec(text, given | gan_parts() | {"loader": loader}, found := {})
    return found["d_loss"].item(), found["g_loss"].item()


@pytest.mark.parametrize(
    ("name", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 2e-3), ("16-mixed", 2e-3)]
)
def test_a_gan_trains_as_plain_pytorch_or_is_refused(blocks, name, tolerance):
    block = block_with(blocks, "g_optimizer")
    assert gan_losses(block, name) == pytest.approx((1.36560, 0.80377), abs=tolerance)
    without_freeze = block.replace("d.requires_grad_(False)", "pass")
    with pytest.raises(PolicyError, match=r"4 parameters .* generator's loss leaves"):
        gan_losses(without_freeze, name)
    assert gan_losses(
        without_freeze.replace("policy.backward(d_", "d_optimizer.zero_grad(); policy.backward(d_"),
        name,
    ) == pytest.approx((1.36560, 0.80377), abs=tolerance)


def test_a_gan_in_the_runner_trains_each_part_by_its_own_loss(blocks):
    bce = F.binary_cross_entropy_with_logits
    parts = {"Generator": lambda: gan_parts()["g"], "Discriminator": lambda: gan_parts()["d"]}
    given = parts | {"torch": torch, "Task": Task, "bce": bce}
    exec(block_with(blocks, "class Gan("), given)
    state = make_state(given["Gan"](), "32-true", task=given["GanTask"]())
    seen = optimizer_gradients(state)
    torch.manual_seed(3)
    record = train_step(state, [(torch.ones(32, 4), torch.zeros(32))])
    g, d = gan_parts().values()
    torch.manual_seed(3)
    fake = g(torch.randn(32, 8))
    d_loss = bce(d(torch.ones(32, 4)), torch.ones(32, 1)) + bce(
        d(fake.detach()), torch.zeros(32, 1)
    )
    g_loss = bce(d(fake), torch.ones(32, 1))
    wanted = [
        *torch.autograd.grad(g_loss, g.parameters()),
        *torch.autograd.grad(d_loss, d.parameters()),
    ]
    assert record.measured["train/g_loss"] == g_loss
    torch.testing.assert_close(seen, wanted)


def test_fp8_shows_what_it_converted(blocks, page):
    out = io.StringIO()
    with redirect_stdout(out):
        exec(block_with(blocks, "float8-rowwise"), names())
    assert f"```\n{out.getvalue()}```" in page


@pytest.mark.filterwarnings("ignore")  # of peft and bitsandbytes, as they are imported
def test_lora_trains_over_frozen_four_bit_weights(blocks):
    pytest.importorskip("peft")
    given = names()
    exec(block_with(blocks, "bnb-nf4"), given)
    loop = block_with(blocks, "clip_norm=1.0")
    exec(loop[loop.index("with policy.session()") :], given)
    assert given["F"].losses[-1] < given["F"].losses[0]
    assert given["policy"].report.layer_counts == (1, 2)


@pytest.mark.filterwarnings("ignore")
def test_fabric_and_accelerate_have_the_same_losses_in_bf16_mixed(blocks):
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    _reset_accelerate()
    ours = block_with(blocks, "clip_norm=1.0").replace("16-mixed", "bf16-mixed")
    losses = [
        loop_losses(block)[0]
        for block in (ours, block_with(blocks, "fabric."), block_with(blocks, "accelerator."))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)


def _reset_accelerate():
    """Accelerate keeps the precision of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def product_dtype(model, inputs):
    """The dtype in which a model's first layer computes."""
    seen = []
    handle = model.body.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    output = model(inputs)
    handle.remove()
    return seen[0], output.dtype


INPUTS = torch.zeros(32, 16)


def fabric_of(name, model):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=name)
    return fabric, fabric.setup(model)


@pytest.mark.filterwarnings("ignore:The `srun` command is available")  # where Slurm is installed
def test_what_fabric_does():
    lightning = pytest.importorskip("lightning")
    assert lightning.__version__.startswith("2.6")
    model = Net()
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        fabric, wrapped = fabric_of("16-mixed", model)
    wrapped(INPUTS)
    assert fabric._precision.precision == "bf16-mixed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert product_dtype(model, INPUTS)[0] is torch.float32  # only through its wrapper
        _, wrapped = fabric_of("64-true", Net())
        assert wrapped(INPUTS.double()).dtype is torch.float32
        with pytest.raises(ValueError, match=r"Allowed precision values: \(.*'bf16-mixed'"):
            fabric_of("bnb-nf4", Net())
        with pytest.raises(ModuleNotFoundError, match="transformer_engine"):
            fabric_of("transformer-engine", Net())
        from lightning.fabric.plugins import BitsandbytesPrecision, MixedPrecision

        assert BitsandbytesPrecision
        scaler = torch.amp.GradScaler("cpu")
        norm = _clipped_norm_of_fabric(MixedPrecision("16-mixed", "cpu", scaler))
    assert norm > 1000  # the scaled gradients' norm, and no error


def _clipped_norm_of_fabric(plugin):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, target = next(batches())
    fabric.backward(F.cross_entropy(model(inputs), target))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return norm


@pytest.mark.filterwarnings("ignore")
def test_what_accelerate_does():
    accelerate = pytest.importorskip("accelerate")
    assert accelerate.__version__.startswith("1.15")
    _reset_accelerate()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    model = accelerator.prepare(Net())
    assert accelerator.mixed_precision == "fp16"
    assert accelerator.scaler is None
    assert product_dtype(model, INPUTS) == (torch.float32, torch.float32)
    _reset_accelerate()
    fp8 = accelerate.Accelerator(cpu=True, mixed_precision="fp8")
    layers = fp8.prepare(*_model_and_optimizer())[0]
    assert [type(layer).__name__ for layer in layers] == ["Linear", "Float8Linear", "Linear"]
    assert layers(INPUTS[:, :16]).isfinite().all()
    assert hasattr(accelerate.Accelerator, "optimizer_step_was_skipped")
    _reset_accelerate()
    with pytest.raises(ValueError, match="64-true"):
        accelerate.Accelerator(cpu=True, mixed_precision="64-true")
    _reset_accelerate()
    accelerate.Accelerator(cpu=True)
    assert _clipped_norm_of_accelerate() > 1000  # the scaled gradients' norm, and no error
    _reset_accelerate()


def _clipped_norm_of_accelerate():
    from accelerate.optimizer import AcceleratedOptimizer

    # Accelerate makes a scaler on a GPU only, and wraps the optimizer so.
    scaler = torch.amp.GradScaler("cpu")
    model = Net()
    optimizer = AcceleratedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), device_placement=False, scaler=scaler
    )
    inputs, target = next(batches())
    scaler.scale(F.cross_entropy(model(inputs), target)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return norm


def _model_and_optimizer():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_the_policy_does():
    policy = precision("16-mixed")
    model = policy.convert(Net())
    with policy.session(), policy.forward():
        assert product_dtype(model, INPUTS)[0] is torch.float16
    wide = precision("64-true")
    model = wide.convert(Net())
    with wide.session():
        with wide.forward():
            output = model(wide.cast(INPUTS))
        assert wide.loss(F.cross_entropy, output, torch.zeros(32).long()).dtype is torch.float64


def test_the_page_counts_the_precisions(page):
    assert f"| the {len(precision_names())} of [precisions.md]" in page
