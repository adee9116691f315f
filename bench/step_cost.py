"""What does a step cost over a hand-written PyTorch loop?

MLP 16-16-4, batch 8, fused AdamW, one thread. The runner records loss, learning rate, gradient
norm and loss scale of every step; `raw + list` is the hand-written loop that does the same; the
peers record nothing, and have no 16-mixed on a CPU: there Lightning runs bf16-mixed and Accelerate
float32. Contenders run in turn; CPU time per step, medians. The first losses of all must agree, or
nothing is printed.
"""

import argparse
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from common import interleave, median, spread, table, versions, write
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from runner.accelerator import Accelerator
from runner.data.loading import Loader
from runner.loop import fit
from runner.observers.recorder import Recorder
from runner.precision.support import load
from runner.spec import TrainSpec
from runner.state import Driven, TrainState
from runner.tasks.classification import Classification
from runner.tracking.journal import Journal
from runner.tracking.none import NoTracker

CPU = torch.device("cpu")
FIRST: dict[str, float] = {}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)


torch.manual_seed(1)
X, Y = torch.randn(8 * 64, 16), torch.randint(4, (8 * 64,))
INDICES = torch.arange(len(X)).split(8)


def batches(steps: int):
    return itertools.islice(((X[i], Y[i]) for i in itertools.cycle(INDICES)), steps)


class Loading:
    """The same batches as an iterable, which the Trainer takes as a loader."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        return batches(self.steps)


def raw(precision: str, steps: int, record: bool) -> None:
    net = model()
    opt = optimizer(net)
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    params, records = list(net.parameters()), []
    for step, (x, y) in enumerate(batches(steps)):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = F.cross_entropy(net(x), y)
        if step == 0:
            FIRST[f"raw {precision}"] = loss.item()
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            if record:
                scaler.unscale_(opt)
        if record:
            norm = torch.nn.utils.get_total_norm([p.grad for p in params])
            scale = scaler.get_scale() if scaler else None
            records.append((step, loss.item(), opt.param_groups[0]["lr"], norm.item(), scale))
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()


def runner(precision: str, steps: int, journal: Path | None) -> None:
    policy = load(precision)
    net, _ = policy.convert(model())
    driven = [Driven(optimizer(net))]
    state = TrainState(net, policy, Classification(), policy.scale(CPU), driven, CPU)
    loader = Loader(TensorDataset(X, Y), 8, shuffle=False, seed=0, device=CPU)
    train = TrainSpec(max_steps=steps, eval_every=10**9, log_every=20)
    tracker = NoTracker()
    if journal is not None:
        book = Journal(journal)
        tracker.metrics_many = book.metrics  # the journal alone, without a process that reads it
    recorder = Recorder(tracker, state, Accelerator(CPU))
    validation = Loader(TensorDataset(X[:8], Y[:8]), 8, shuffle=False, seed=0, device=CPU)
    kept = []
    with policy.session(net, CPU):
        for record in fit(state, loader, validation, train):
            if isinstance(record, tuple) and not hasattr(record, "metrics"):
                kept += record
                if journal is not None:
                    recorder.steps(record)
    assert len(kept) == steps
    FIRST[f"runner {precision}"] = kept[0].loss


def fabric(precision: str, steps: int) -> None:
    from lightning.fabric import Fabric

    fab = Fabric(accelerator="cpu", devices=1, precision=precision)
    net = model()
    net, opt = fab.setup(net, optimizer(net))
    for step, (x, y) in enumerate(batches(steps)):
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        if step == 0:
            FIRST[f"Fabric {precision}"] = loss.item()
        fab.backward(loss)
        opt.step()


def accelerate(precision: str, steps: int) -> None:
    from accelerate import Accelerator as HuggingFace
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    names = {"32-true": "no", "bf16-mixed": "bf16"}
    acc = HuggingFace(mixed_precision=names[precision], cpu=True)
    net = model()
    net, opt = acc.prepare(net, optimizer(net))
    for step, (x, y) in enumerate(batches(steps)):
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        if step == 0:
            FIRST[f"Accelerate {precision}"] = loss.item()
        acc.backward(loss)
        opt.step()


def trainer(precision: str, steps: int) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if self.global_step == 0:
                FIRST[f"Trainer {precision}"] = loss.item()
            return loss

        def configure_optimizers(self):
            return optimizer(self.net)

    bare = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False}  # fmt: skip
    L.Trainer(max_steps=steps, accelerator="cpu", devices=1, precision=precision, **bare).fit(
        Module(), Loading(steps)
    )


def contenders(precision: str, steps: int, folder: Path) -> dict[str, Callable[[], None]]:
    found = {
        "raw": lambda: raw(precision, steps, False),
        "raw + list": lambda: raw(precision, steps, True),
        "runner": lambda: runner(precision, steps, None),
        "runner + journal": lambda: runner(precision, steps, Path(tempfile.mkdtemp(dir=folder))),
    }
    if precision == "16-mixed":
        return found  # on a CPU Lightning runs bf16-mixed instead, Accelerate float32
    return found | {
        "Fabric": lambda: fabric(precision, steps),
        "Trainer": lambda: trainer(precision, steps),
        "Accelerate": lambda: accelerate(precision, steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("32-true", "bf16-mixed", "16-mixed"):
            chosen = contenders(precision, options.steps, Path(folder))
            if options.only:
                chosen = {k: v for k, v in chosen.items() if k in options.only.split(",")}
            times = interleave(chosen, options.rounds)
            per_step = {k: [cpu / options.steps * 1e6 for cpu, _ in v] for k, v in times.items()}
            losses = {k: v for k, v in FIRST.items() if k.endswith(precision)}
            assert max(losses.values()) - min(losses.values()) < 1e-3, losses
            for name, values in per_step.items():
                over = [v - r for v, r in zip(values, per_step["raw"], strict=True)]
                ratio = median(values) / median(per_step["raw"])
                cells = [precision, name, spread(values), f"{median(over):+.1f}", f"{ratio:.2f}"]
                rows.append(cells)
    body = table(["precision", "contender", "µs CPU per step", "over raw", "ratio"], rows)
    note = (
        f"{options.steps} steps x {options.rounds} rounds; {versions('lightning', 'accelerate')}."
    )
    body = f"{note} Medians (least to greatest).\n\n{body}"
    write("step_cost", "What does a step cost over a hand-written PyTorch loop?", body)


if __name__ == "__main__":
    main()
