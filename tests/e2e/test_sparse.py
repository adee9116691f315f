"""Embeddings with sparse gradients train as in plain PyTorch, or are refused in one message."""

import json

import pytest
import torch
from torch import nn

NET = """
import torch
from torch import nn


class Bag(nn.Module):
    def __init__(self, bag=False):
        super().__init__()
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(32, 8, sparse=True)
        self.head = nn.Linear(8, 4)
        self.bag = bag

    def forward(self, x):
        found = self.table(x)
        return self.head(found if self.bag else found.mean(1))


def sets():
    x = torch.randint(0, 32, (16, 6), generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.TensorDataset(x, x[:, 0] % 4)
    return rows, rows
"""
PLAIN = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.lr=0.5")


@pytest.fixture
def sparse(main, tmp_path):
    (tmp_path / "rows.py").write_text(NET)
    for group, text in (
        ("model", "_target_: rows.Bag\nbag: false\n"),
        ("data", "_target_: rows.sets\n"),
    ):
        path = tmp_path / "conf" / group / "own.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return lambda *words: main(
        "--config-dir",
        "conf",
        "model=own",
        "data=own",
        "tracking=none",
        "data.shuffle=false",
        "train.batch_size=16",
        "train.max_steps=5",
        "train.log_every=1",
        "train.eval_every=1",
        "hydra.run.dir=out",
        "accelerator=cpu",
        *words,
    )


def losses_by_hand(tmp_path, scaled, accumulate=1):
    """The same training in plain PyTorch, with gradients clipped to a norm of 0.1."""
    space = {}
    exec(NET, space)
    torch.manual_seed(0)
    model, (train, _) = space["Bag"](), space["sets"]()
    x, y = train.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaled):
            output = model(x)
        loss = nn.functional.cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        dense = [p.grad.to_dense() for p in model.parameters()]
        norm = torch.stack([g.norm() for g in dense]).norm()
        for p in model.parameters():
            p.grad = p.grad * (0.1 / (norm + 1e-6)).clamp(max=1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "precision", [("precision=32-true",), ("precision=16-mixed", "precision.loss_scale.fixed=1024")]
)
def test_it_trains_as_by_hand(sparse, tmp_path, precision):
    done = sparse(*PLAIN, *precision, "train.clip_norm=0.1", "init.weights=null")
    assert done.rc == 0, done.stderr
    losses = losses_by_hand(tmp_path, "16-mixed" in precision[0])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["train_loss"] == pytest.approx(losses[-1], rel=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        (*PLAIN, "precision=bf16-true"),
        (*PLAIN, "optimizer.momentum=0.9", "train.accumulate=2", "train.batch_size=4"),
        (*PLAIN, "model.bag=true"),
        ("optimizer=adagrad", "precision=bf16-mixed"),
    ],
)
def test_it_trains(sparse, words):
    done = sparse(*words)
    assert done.rc == 0, done.stderr


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (
            "",
            [
                "optimizer: AdamW refuses the sparse gradients of table.weight",
                "Type optimizer=sgd optimizer.weight_decay=0",
                "sparse=False",
            ],
        ),
        ("optimizer=sgd", ["SGD refuses the sparse gradients of table.weight"]),
        ("optimizer=sgd optimizer.weight_decay=0 +optimizer.fused=true", ["fused", "sparse"]),
    ],
)
def test_an_optimizer_that_refuses_is_reported(sparse, typed, parts):
    done = sparse(*typed.split())
    assert done.rc == 2, done
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
