"""The numerical contract of every precision that runs on a CPU: from the same seed and data, the
first loss is float32's within the format's error, training lowers it, and what ran is what the
precision says.

The bounds are the formats' own. UNIT is the largest relative rounding error of one number: half a
unit in the last place (float16 11 bits, bfloat16 8, E4M3 4: IEEE 754; Micikevicius et al.,
arXiv:2209.05433), and for the packed weights half the widest gap between two codes, relative to
the largest of the block or row: NormalFloat4 0.138 between 0.723 and 1 (Dettmers et al.,
arXiv:2305.14314, appendix E), FP4 0.167 between 2/3 and 1, int8 1/254, int4 1/15. A
logit is a sum of many products whose errors are independent, so it stays well within one UNIT of
the logits' size, and the mean loss of a batch within that again.
"""

import pytest
import torch
from precision_models import CPU, UNIT, load_precision, precisions_on_cpu, train_state

from models.gpt import GPT
from models.mlp import MLP
from runner.core.loop.step import train_step
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import Language

STEPS = 25
# What the products take, as the probe sees it on a CPU.
COMPUTES = {
    "64-true": {"float64"},
    "32-true": {"float32"},
    "tf32": {"float32"},
    "bf16-mixed": {"bfloat16"},
    "bf16-true": {"bfloat16"},
    "16-mixed": {"float16"},
    "16-true": {"float16"},
    "int4": {"float32"},
    "int8": set(),  # its products are integers
    "nvfp4": {"float32"},
    "qat-int4": {"float32"},
    "qat-int8": {"float32"},
    "qat-nvfp4": {"float32"},
}
STORES = {
    "int4": "uint8",
    "int8": "int8",
    "nvfp4": "uint8",
    "bnb-nf4": "uint8",
    "bnb-nf4-dq": "uint8",
    "bnb-fp4": "uint8",
    "bnb-fp4-dq": "uint8",
    "bnb-int8": "int8",
    "64-true": "float64",
    "16-true": "float16",
    "bf16-true": "bfloat16",
    "transformer-engine-float16": "float16",
}


HERE = precisions_on_cpu()


def mlp():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(32, 1, 8, 8, generator=generator)
    target = torch.randint(10, (32,), generator=generator)
    return MLP([1, 8, 8], 10, [64, 48]), Classification(), (images, target), "layers.1"


def gpt():
    tokens = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(1))
    model = GPT(64, 16, layers=1, width=64, heads=4)
    return model, Language(), (tokens[:, :-1], tokens[:, 1:]), "blocks.0.expand"


def trained(name, make):
    """Losses of the first steps, the probe's rows by module, and a converted module's name."""
    precision = load_precision(name)
    torch.manual_seed(0)
    model, task, batch, watched = make()
    model, _ = precision.convert(model)
    state = train_state(precision, model, task=task)
    with precision.session(model, CPU):
        with DtypeProbe(model) as probe:
            losses = [train_step(state, [batch]).loss.item()]
        losses += [train_step(state, [batch]).loss.item() for _ in range(STEPS)]
    return losses, {row["module"]: row for row in probe.table()}, watched


@pytest.fixture(
    scope="module", params=[mlp, pytest.param(gpt, marks=pytest.mark.extended)], ids=["mlp", "gpt"]
)
def exact(request):
    return request.param, trained("32-true", request.param)[0]


def test_every_precision_that_runs_here_has_a_bound():
    assert set(HERE) == set(UNIT)


@pytest.mark.parametrize("name", HERE)
def test_the_first_loss_is_float32s_and_training_lowers_it(name, exact):
    make, reference = exact
    losses, rows, watched = trained(name, make)
    assert abs(losses[0] - reference[0]) <= UNIT[name] * reference[0]
    if name not in ("32-true", "64-true"):
        assert losses[0] != reference[0]
    # A loss scale skips the first steps; packed weights leave biases, norms and embeddings.
    is_packed = name.startswith("bnb") or name in ("int4", "int8", "nvfp4")
    assert losses[-1] < (0.97 if is_packed else 0.8) * losses[0]
    row = rows[watched]
    usual = "bfloat16" if name.startswith("transformer-engine") else "float32"
    assert STORES.get(name, usual) in row["stores"].split()
    computes = COMPUTES.get(name, {"bfloat16"})
    if not name.startswith(("float8", "torchao-", "transformer-engine")):
        assert computes <= set(row["computes"].split())
