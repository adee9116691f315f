"""Embeddings with sparse gradients train as in plain PyTorch, or are refused in one message."""

import runpy

import pytest
import torch
from refusals import message_table
from run_folders import FILES, copy_files
from torch import nn
from typed_runs import TypedRuns

PLAIN = "optimizer=sgd optimizer.momentum=0 optimizer.weight_decay=0 optimizer.lr=0.5"


@pytest.fixture
def runs(main, tmp_path):
    copy_files("sparse", tmp_path)
    words = (
        "--config-dir conf model=own data=own tracking=none data.shuffle=false "
        "train.batch_size=16 train.max_steps=5 train.log_every=1 train.eval_every=1 accelerator=cpu"
    )
    return TypedRuns(main, tmp_path, words)


def losses_by_hand(scaled):
    """The same training in plain PyTorch, with gradients clipped to a norm of 0.1."""
    space = runpy.run_path(FILES / "sparse" / "rows.py")
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
    "precision", ["precision=32-true", "precision=16-mixed precision.loss_scale.fixed=1024"]
)
def test_it_trains_as_by_hand(runs, precision):
    run = runs.train(f"{PLAIN} {precision} train.clip_norm=0.1 init.weights=null")
    losses = losses_by_hand("16-mixed" in precision)
    assert run.result["train_loss"] == pytest.approx(losses[-1], rel=1e-3)


@pytest.mark.parametrize(
    "typed",
    [
        f"{PLAIN} precision=bf16-true",
        f"{PLAIN} optimizer.momentum=0.9 train.accumulate=2 train.batch_size=4",
        f"{PLAIN} model.bag=true",
        "optimizer=adagrad precision=bf16-mixed",
    ],
)
def test_it_trains_as_with_dense_gradients(runs, typed):
    sparse = runs.train(typed).result["train_loss"]
    dense = runs.train(f"{typed} model.sparse=false").result["train_loss"]
    assert sparse == pytest.approx(dense, rel=1e-3)


REFUSED = message_table("""
model.bag=false => optimizer: AdamW refuses the sparse gradients of table.weight
    Type optimizer=sgd optimizer.weight_decay=0 | sparse=False
optimizer=sgd => SGD refuses the sparse gradients of table.weight
optimizer=sgd optimizer.weight_decay=0 +optimizer.fused=true => fused | sparse
""")


@pytest.mark.parametrize(("typed", "parts"), REFUSED)
def test_an_optimizer_that_refuses_is_reported(runs, typed, parts):
    message = runs.fail(typed)
    assert [part for part in parts if part not in message] == []
