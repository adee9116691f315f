"""Several processes train on a contrastive loss of the whole batch as one process by hand does."""

import pytest
import torch
from contrastive import EXAMPLES, Towers, loss_of, pairs
from processes import close

pytestmark = pytest.mark.slow

STEPS, SIZE = 4, 6  # 6, 6 and 1 example: of the last, one process has none
OWN = (
    "~model +model._target_=contrastive.Towers ~data +data._target_=contrastive.sets ~task "
    "+task._target_=contrastive.Contrastive task.whole_batch=true data.shuffle=false optimizer=sgd "
    "optimizer.lr=0.1 optimizer.momentum=0 optimizer.weight_decay=0 scheduler=constant "
    f"train.max_steps={STEPS} train.log_every=1 precision=64-true train.batch_size={SIZE}"
)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_equal_one_batch(run_in_processes, tmp_path, strategy):
    extra = " strategy.units=[a,b]" if strategy == "fsdp" else ""
    job = {strategy: f"{OWN} strategy={strategy}{extra}"}
    found = run_in_processes(2, job, tmp_path)[strategy]
    model, losses = Towers().double(), {}
    for step in range(STEPS):
        start = SIZE * (step % 3)
        loss = loss_of(model(pairs()[start : start + SIZE]))
        losses[step + 1] = loss.item()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    close(found.values("train/loss"), losses, **EXACT)
    close(found.weights(), model.state_dict(), **EXACT)
    parts = [loss_of(model(part)).item() * len(part) for part in pairs().split(SIZE)]
    assert found.values("val/loss")[STEPS] == pytest.approx(sum(parts) / EXAMPLES, rel=1e-12)
