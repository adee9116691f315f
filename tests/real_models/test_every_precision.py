"""Real architectures in every precision that runs here: what a run claims is what ran."""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import ClassVar

import architectures
import pytest
import torch
from architectures import ARCHITECTURES, LANGUAGE
from run_folders import read_json
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from runner.core.record.tracker import NoTracker
from runner.core.run.run import run_spec
from runner.precision.conversion import is_converted
from runner.precision.registry import load_precision

STEPS = 2
BATCH = 4
RATE = 0.01
NATIVE = ("64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
TE = ("current", "block", "mxfp8", "nvfp4", "float16")
EMULATED = (
    *("tf32", "transformer-engine", *(f"transformer-engine-{recipe}" for recipe in TE)),
    *("float8-tensorwise", "float8-rowwise", "float8-rowwise-hp", "torchao-mxfp8"),
)
TRAINED = (*NATIVE, *EMULATED, "bnb-int8-training", "qat-int4", "qat-int8", "qat-nvfp4")
FROZEN = ("bnb-nf4", "bnb-nf4-dq", "bnb-fp4", "bnb-fp4-dq", "bnb-int8")
"""Packed weights do not train; norms, biases and embeddings do."""
CONVERTS = ("transformer-engine", "float8-", "torchao-", "bnb-", "qat-")


PLAIN_RUN = (
    *("optimizer=sgd", f"optimizer.lr={RATE}", "optimizer.momentum=0", "optimizer.weight_decay=0"),
    *(f"train.max_steps={STEPS}", f"train.batch_size={BATCH}", "data.shuffle=false"),
    *("accelerator=cpu", "checkpoint.final=false"),
)


class Memory(NoTracker):
    """Keeps the metrics of each step in this process."""

    values: ClassVar[dict] = {}

    def log_metrics(self, records):
        for step, _, values in records:
            Memory.values.setdefault(step, {}).update(values)


@contextmanager
def modules_that_run():
    """The modules whose forward ran while autograd recorded, each with the dtypes it returned."""
    ran = defaultdict(set)

    def note(module, args, output):
        if torch.is_grad_enabled():
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            ran[module] |= {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}

    handle = register_module_forward_hook(note)
    try:
        yield ran
    finally:
        handle.remove()


def held_by(module):
    """Elements of a module's own parameters of two dimensions or more."""
    return {id(p): p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2}


@pytest.fixture
def trained(compose, tmp_path):
    """A few steps of an architecture in a precision: its folder, metrics, and what hooks saw."""

    def trained(name, precision, *overrides):
        emulate = ["precision.emulate=true"] if precision in EMULATED else []
        spec = compose(f"precision={precision}", *emulate, *PLAIN_RUN, *overrides)
        spec = replace(
            spec,
            model={"_target_": "architectures.build", "name": name},
            data={"_target_": "architectures.data", "name": name, "shuffle": False},
            task={"_target_": ARCHITECTURES[name].task},
            tracking={"_target_": f"{__name__}.Memory"},
        )
        Memory.values = {}
        architectures.MODELS.clear()
        with modules_that_run() as ran:
            result = run_spec(spec, tmp_path / "run")
        assert result.status == "finished", result.error
        return tmp_path / "run", Memory.values, ran, architectures.MODELS[-1]

    return trained


def mean_loss(name, output, target):
    """Return the cross entropy over the labels that count, by hand, in float64."""
    scores = output.detach().double()
    if ARCHITECTURES[name].task == LANGUAGE:
        scores, target = scores.flatten(0, 1), target.flatten()
    log_probabilities = scores.log_softmax(1)
    counted = target != architectures.IGNORED
    chosen = log_probabilities.gather(1, target.masked_fill(~counted, 0).unsqueeze(1)).squeeze(1)
    return float(-chosen[counted].sum() / counted.sum())


def cross_entropy(name, output, target):
    if ARCHITECTURES[name].task == LANGUAGE:
        output, target = output.flatten(0, 1), target.flatten()
    return F.cross_entropy(output, target)


DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def by_hand(name, precision):
    """Train a new model in plain PyTorch; the losses of its steps and over the validation set."""
    torch.manual_seed(0)
    dtype = DTYPES.get(precision, torch.float32)
    model = architectures.build(name).to(dtype)
    train, val = architectures.data(name)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    wide = torch.float64 if precision == "64-true" else torch.float32

    def forward(inputs):
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        half = AUTOCAST.get(precision)
        with default_dtype(dtype), torch.autocast("cpu", half, enabled=half is not None):
            return model(inputs).to(wide)

    losses = []
    for step in range(STEPS):
        start = BATCH * step % architectures.EXAMPLES
        inputs, target = train[start : start + BATCH]
        loss = cross_entropy(name, forward(inputs), target)
        losses.append(float(loss.detach()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        halves = [val[:BATCH], val[BATCH:]]
        output = torch.cat([forward(inputs) for inputs, _ in halves])
    return losses, mean_loss(name, output, val.tensors[1])


TOLERANCE = dict(zip(NATIVE, (1e-9, 1e-5, 2e-2, 5e-3, 3e-2, 1e-2), strict=True))


THOROUGH = ("gpt2", "torchvision-swin")
"""Architectures that are tried in every native precision."""
NATIVE_EVERYWHERE = ("32-true", "bf16-mixed", "16-true")
"""Precisions that every architecture is tried in: as built, under autocast, and cast."""
NATIVE_CASES = [
    (name, precision)
    for name in ARCHITECTURES
    for precision in NATIVE
    if name in THOROUGH or precision in NATIVE_EVERYWHERE
]


def pairwise(cases, everywhere):
    """Mark cases `extended` but for each architecture once and gpt2 in each precision."""
    marked = []
    for name, precision in cases:
        turn = everywhere[[*ARCHITECTURES].index(name) % len(everywhere)]
        marks = [] if name == "gpt2" or precision == turn else [pytest.mark.extended]
        marked.append(pytest.param(name, precision, marks=marks))
    return marked


@pytest.mark.parametrize(("name", "precision"), pairwise(NATIVE_CASES, NATIVE_EVERYWHERE))
def test_losses_are_those_of_a_plain_loop(trained, name, precision):
    _, metrics, *_ = trained(name, precision)
    losses, validation = by_hand(name, precision)
    recorded = [metrics[step + 1]["train/loss"] for step in range(STEPS)]
    assert recorded == pytest.approx(losses, rel=TOLERANCE[precision])
    assert metrics[STEPS]["val/loss"] == pytest.approx(validation, rel=TOLERANCE[precision])


EVERYWHERE = ("transformer-engine-current", "bnb-nf4", "bnb-int8-training")
"""Converting precisions that every architecture is tried in."""
CONVERSIONS = [
    (name, precision)
    for name in ARCHITECTURES
    for precision in (*TRAINED, *FROZEN)
    if precision in EVERYWHERE or (name == "gpt2" and precision.startswith(CONVERTS))
    if name != "torchvision-segmentation"  # it has convolutions alone
]
# Its attention reads weights without calling their layers: one precision of each other layer kind.
CONVERSIONS += [("torchvision-swin", precision) for precision in ("bnb-int8", "float8-rowwise-hp")]
NOISE = {"transformer-engine-nvfp4": 0.2, "bnb-fp4": 0.2, "bnb-fp4-dq": 0.2}
"""How far the first loss may be from float32's, relative; 0.1 elsewhere."""


@pytest.mark.parametrize(("name", "precision"), pairwise(CONVERSIONS, EVERYWHERE))
def test_what_a_conversion_claims_is_what_ran(trained, name, precision):
    folder, metrics, ran, model = trained(name, precision)
    plain = architectures.build(name)
    _check_count(read_json(folder / "conversion.json"), ran, model, plain)
    table = read_json(folder / "dtypes.json")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    _check_dtypes(rows, ran, model)
    (first, *_), _ = by_hand(name, "32-true")
    assert metrics[1]["train/loss"] == pytest.approx(first, rel=NOISE.get(precision, 0.1))
    assert metrics[STEPS]["val/loss"] == pytest.approx(evaluated(name, precision, model), rel=1e-6)


def _check_count(rows, ran, model, plain):
    claimed = {row["module"]: row["converted"] for row in rows if row["done"] and row["elements"]}
    ours = {path for path, m in model.named_modules() if is_converted(m) and m in ran}
    found = {path: sum(held_by(plain.get_submodule(path)).values()) for path in ours}
    assert claimed == {path: count for path, count in found.items() if count}  # not a norm
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    assert sum(row["elements"] for row in rows) == sum(p.numel() for p in matrices)
    assert all(row["why"] for row in rows if not row["done"])


def _check_dtypes(rows, ran, model):
    modules = dict(model.named_modules())
    modules["(model)"] = model
    assert rows
    for row in rows:
        assert set(row["outputs"].split()) == ran[modules[row["module"]]], row


@torch.no_grad()
def evaluated(name, precision, model):
    """The mean loss of a trained model over the validation set, in its precision, by hand."""
    emulate = {"emulate": True} if precision in EMULATED else {}
    policy = load_precision(precision, **emulate)
    device = torch.device("cpu")
    _, val = architectures.data(name)
    model.eval()
    outputs = []
    with policy.session(model, device), policy.eval_context(model):
        for start in range(0, architectures.EXAMPLES, BATCH):
            inputs, _ = val[start : start + BATCH]
            with policy.forward(device):
                outputs.append(model(policy.cast(inputs)).float())
    return mean_loss(name, torch.cat(outputs), val.tensors[1])
