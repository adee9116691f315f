"""Every precision that this GPU has, on it: trains, evaluates, comes back from a checkpoint."""

import copy

import pytest
import torch
from precision_models import UNIT

from models.gpt import GPT
from runner.core.loop.step import loss_of, train_step
from runner.core.loop.step_records import HostTransfer
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.precision import registry
from runner.training.model import BuiltModel
from runner.training.tasks.language import Language

pytestmark = [pytest.mark.gpu, pytest.mark.imitated]
# The bounds of a CPU, but for these precisions, whose kernels on CUDA are others.
CUDA_UNIT = UNIT | {
    "tf32": 2**-10,
    **dict.fromkeys(("bnb-int8", "bnb-int8-training"), 1 / 127 + 2**-8),
    **dict.fromkeys(("int8", "qat-int8"), 1 / 127),
}
FP8 = ("float8-", "torchao-", "transformer-engine")
DEVICE = torch.device("cuda", 0)


def state_of(name):
    row = next(r for r in registry.supported_precisions(DEVICE) if r.name == name)
    if not row.runs:
        pytest.skip(f"{row.why} {row.remedy}")
    precision = registry.load_precision(name)
    torch.manual_seed(0)
    model, report = precision.convert(GPT(64, 16, layers=2, width=64, heads=4), DEVICE)
    built = BuiltModel(model.to(DEVICE), report, 0)
    params = [p for p in built.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3, eps=1e-4, fused=True)
    scale = precision.scale(DEVICE)
    return TrainState(
        built.model, precision, Language(), scale, [ScheduledOptimizer(optimizer)], DEVICE
    )


def batch(count):
    tokens = torch.randint(50, (count, 17), generator=torch.Generator().manual_seed(1)).cuda()
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def reference():
    state = state_of("32-true")
    return loss_of(state, *batch(8)).item()


@pytest.mark.parametrize("name", registry.precision_names())
def test_a_precision_trains_from_float32s_loss_and_an_odd_last_batch_never_fails(name, reference):
    state = state_of(name)
    unit = 2**-4 if name.startswith(FP8) else CUDA_UNIT[name]
    with state.precision.session(state.model, DEVICE):
        with DtypeProbe(state.model) as probe:
            pending = [train_step(state, [batch(8)])]
        pending += [train_step(state, [batch(8 if step % 2 else 3)]) for step in range(30)]
        losses = [record.loss for record in HostTransfer(pending, 0.0).records(0)]
    assert abs(losses[0] - reference) <= unit * reference
    is_packed = name.startswith("bnb") or bool(state.precision.trained_in)
    assert losses[-1] < (0.97 if is_packed else 0.8) * losses[0]
    rows = {row["module"]: row for row in probe.table()}
    if name.startswith("float8-"):
        assert "float8_e4m3fn" in rows["blocks.0.expand"]["computes"]


@pytest.mark.parametrize("name", registry.precision_names())
def test_a_checkpoint_restores_the_outputs(name, tmp_path):
    state = state_of(name)
    precision, model = state.precision, state.model
    with precision.session(model, DEVICE):
        for _ in range(3):
            train_step(state, [batch(8)])
        saved = {"model": model.state_dict(), "precision": precision.state_dict(model)}
        torch.save(copy.deepcopy(saved), tmp_path / "saved.pt")
        content = torch.load(tmp_path / "saved.pt", weights_only=True)
        fresh = state_of(name)
        fresh.model.load_state_dict(content["model"])
        fresh.precision.load_state_dict(fresh.model, content["precision"])
        outputs = []
        for each in (state, fresh):
            each.model.eval()
            with torch.no_grad(), each.precision.forward(DEVICE):
                outputs.append(each.model(each.precision.cast(batch(8)[0])))
    assert torch.equal(*outputs)
