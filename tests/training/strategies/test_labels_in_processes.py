"""Several processes train GPT-2 on masked and padded sequences as one large batch by hand does."""

import pytest
import torch
from masked_language import GPT2, by_hand, pad, sets
from processes import close

pytestmark = pytest.mark.slow

STEPS, LARGE = 6, 6
OWN = (
    "~model +model._target_=masked_language.GPT2 ~data task=language "
    "+data._target_=masked_language.sets data.shuffle=false optimizer=sgd optimizer.lr=0.1 "
    "optimizer.momentum=0 optimizer.weight_decay=0 scheduler=constant "
    f"train.max_steps={STEPS} train.log_every=1 precision=64-true"
)
BATCHES = {
    "parts": "train.batch_size=3 train.accumulate=2",  # one process has an example less
    "one-example": "train.batch_size=1 train.accumulate=6",  # and here none
}
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def by_large_batches():
    """Losses, gradient norms and weights of a plain loop over batches of six sequences."""
    train, val = sets()
    model = GPT2().double()
    losses, norms = {}, {}
    for step in range(STEPS):
        start = LARGE * (step % 3)  # of thirteen sequences
        losses[step + 1] = by_hand(model, *pad(train.sequences[start : start + LARGE])).item()
        grads = [p.grad for p in model.parameters()]
        norms[step + 1] = torch.nn.utils.get_total_norm(grads).item()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return losses, norms, model.state_dict(), by_hand(model, *pad(val.sequences)).item()


@pytest.fixture(scope="module")
def several(run_in_processes, tmp_path_factory):
    jobs = {
        f"{strategy}-{name}": f"{OWN} strategy={strategy} {typed}"
        for strategy in ("ddp", "fsdp")
        for name, typed in BATCHES.items()
    }
    return run_in_processes(2, jobs, tmp_path_factory.mktemp("labels"))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_equal_one_large_batch(several, by_large_batches, strategy, name):
    losses, norms, weights, validation = by_large_batches
    found = several[f"{strategy}-{name}"]
    close(found.values("train/loss"), losses, **EXACT)
    close(found.values("train/grad_norm"), norms, **EXACT)
    assert found.values("val/loss")[STEPS] == pytest.approx(validation, rel=1e-12)
    trained = found.weights()
    close(trained, {name: weights[name] for name in trained}, **EXACT)  # a tied one is saved once
