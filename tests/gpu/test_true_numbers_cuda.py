"""What CPUs show of models that change themselves, casts and evaluations, shown on CUDA."""

from functools import partial

import pytest
import torch
from autocast_calls import CALLS, HALF, dtypes_of
from run_folders import read_json
from states import follow_own_state, make_state
from torch import nn
from torch.nn import functional as F

from runner.core.base.tensor_facts import narrow_parameters
from runner.core.loop.step import train_step
from runner.precision import precision
from runner.precision.casting import CastCacheWatch
from runner.precision.emulation.autocast_kernels import cuda_casts

pytestmark = pytest.mark.gpu


def test_the_emulated_casts_give_the_dtypes_of_the_device():
    compared = 0
    for name, arguments in CALLS.items():
        for dtypes in ([HALF], [torch.float32], [HALF, torch.float32], [torch.float32, HALF]):
            expected = dtypes_of(name, arguments, dtypes, "cuda")
            if isinstance(expected, type):
                continue
            compared += 1
            with cuda_casts():
                assert dtypes_of(name, arguments, dtypes, "cpu") == expected, (name, dtypes)
    assert compared > 200


class Changing(nn.Module):
    """Has a batch norm, a mean that is another tensor after each step, and a queue."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.norm, self.head = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("late", torch.zeros(64), persistent=False)

    def forward(self, x):
        y = self.norm(self.line(x))
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0).float()
            self.late += y.mean(0)
        return self.head(F.relu(y))


def state_of(model, name, **options):
    sgd = partial(torch.optim.SGD, lr=0.01)
    return make_state(model, name, optimizer=sgd, device=torch.device("cuda", 0), **options)


def batch(seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(16, n, generator=generator) for n in (32, 8))
    return inputs.cuda() * factor, targets.cuda()


def test_a_skipped_step_leaves_no_trace_and_no_step_waits(refused_waits):
    values = []
    for order in ((1, 2, 3, "bad", 4), (1, 2, 3, 4)):
        state = state_of(Changing(), "16-mixed", loss_scale={"fixed": 1024.0})
        own_state = follow_own_state(state)
        batches = [batch(7, 1e30) if seed == "bad" else batch(seed) for seed in order]
        for i, each in enumerate(batches):
            if i < 2:
                train_step(state, [each])
                own_state.end_first_step()
                continue
            with refused_waits():
                train_step(state, [each])
        values.append([*state.model.state_dict().values(), state.model.late])
    for after_skip, without in zip(*values, strict=True):
        assert torch.equal(after_skip, without)


def test_a_weight_that_is_exchanged_within_a_forward_is_cast_again():
    torch.manual_seed(0)
    layer, reference = nn.Linear(16, 16, bias=False).cuda(), torch.randn(16, 16, device="cuda")
    x = torch.randn(8, 16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), CastCacheWatch(layer) as watch:
        layer(x)
        with torch.no_grad():
            layer.weight.copy_(reference)
        made = layer(x)
    assert torch.equal(made, F.linear(x.bfloat16(), reference.bfloat16()))
    assert [*watch.rewritten] == ["weight"]


@pytest.mark.parametrize(("is_wide", "norm"), [(True, 1.0), (False, 0.5)])
def test_gradients_of_16_bits_are_added_in_float32(is_wide, norm):
    state = state_of(nn.Linear(1, 1, bias=False), "bf16-true")
    nn.init.ones_(state.model.weight)
    state.widened = narrow_parameters(state.model.parameters()) if is_wide else ()
    # The loss is the square of w - 1 / 2.
    micros = [(torch.ones(1, 1).cuda(), torch.full((1, 1), 0.5).cuda())] * 512
    assert float(train_step(state, micros).norms) == norm


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        h = torch.tanh(self.a(x.flatten(1)))
        return self.b(h + 0.1 * torch.randn_like(h))


RUN = (
    *("accelerator=cuda", "tracking=none", "debug.overfit=2", "train.batch_size=16"),
    *("train.max_steps=6", "train.log_every=1", "model=mlp", f"model._target_={__name__}.Noisy"),
    *("~model.hidden", "~model.input_shape", "~model.classes"),
)


def val_loss(folder):
    return read_json(folder / "result.json")["metrics"]["val/loss"]


@pytest.mark.parametrize("name", ["32-true", "16-mixed", "bf16-true"])
def test_evaluations_draw_alike_and_leave_the_training_its_numbers(name, main, tmp_path):
    losses = []
    for every in (2, 6):
        folder = f"every{every}"
        main(
            *RUN, f"precision={name}", f"train.eval_every={every}", f"hydra.run.dir={folder}"
        ).check_ok()
        losses.append(val_loss(tmp_path / folder))
    typed = ("mode=evaluate", "tracking=none", "debug.overfit=2", "checkpoint=every6")
    main(*typed, "accelerator=cuda", "hydra.run.dir=evaluated").check_ok()
    losses.append(val_loss(tmp_path / "evaluated"))
    assert len({*losses}) == 1


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed"])
def test_an_rms_norm_by_hand_is_emulated_as_the_device_computes_it(name):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.line, self.head = nn.Linear(32, 512), nn.Linear(512, 8)

        def forward(self, x):
            h = self.line(x)
            h = h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / 512)
            return self.head(h)

    x = 50 * torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    outputs = []
    for device in ("cuda", "cpu"):
        policy = precision(name, device=device, **({"emulate": True} if device == "cpu" else {}))
        model = policy.convert(Norm()).to(device)
        with policy.session(), policy.forward():
            outputs.append(model(policy.cast(x.to(device))).float().cpu())
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)
    assert outputs[0].isfinite().all()
