"""task.metrics and task.after_evaluation in several processes."""

import pytest
import torch
from masked_language import GPT2, VOCAB, pad, sets
from processes import close
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

pytestmark = pytest.mark.slow

METRICS = (
    "task.metrics=[{_target_:torchmetrics.classification.MulticlassF1Score,num_classes:13,"
    "average:none},{_target_:torchmetrics.classification.MulticlassAUROC,num_classes:13}]"
)
OWN = (
    "~model +model._target_=masked_language.GPT2 ~data task=language "
    "+data._target_=masked_language.sets +data.share=0.9 optimizer=sgd optimizer.lr=0.1 "
    "train.max_steps=4 train.eval_every=2 train.log_every=1"
)
NOTE = "task.after_evaluation=evaluation_hooks.note"
# Of seven examples the second process has three; one, at a distance; none.
BATCHES = {"halves": (2, 7), "one-left": (3, 4), "alone": (2, 1)}
# The processes of both strategies gather alike; FSDP gathers the model's weights, too.
CASES = [*(("ddp", name) for name in BATCHES), ("fsdp", "halves")]


@pytest.fixture(scope="module")
def several(run_in_processes, tmp_path_factory):
    jobs = {}
    for strategy, name in CASES:
        size, count = BATCHES[name]
        keys = f"{METRICS} {NOTE} train.batch_size={size} +data.val={count}"
        jobs[f"{strategy}-{name}"] = f"{OWN} {keys} strategy={strategy}"
    for strategy in ("ddp", "fsdp"):
        fail = "task.after_evaluation=evaluation_hooks.fail train.batch_size=2"
        jobs[f"{strategy}-fail"] = f"{OWN} {fail} strategy={strategy}"
    jobs["ddp-plain"] = f"{OWN} train.batch_size=2 +data.val=7 strategy=ddp"
    return run_in_processes(2, jobs, tmp_path_factory.mktemp("metrics"))


@pytest.mark.filterwarnings("ignore:No positive samples in targets")
@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_metrics_are_those_of_one_process(several, strategy, name):
    found = several[f"{strategy}-{name}"]
    model = GPT2()
    model.load_state_dict(found.weights(), strict=False)
    model.gpt.tie_weights()
    inputs, target = pad(sets(share=0.9, val=BATCHES[name][1])[1].sequences)
    counted = target != -100
    with torch.no_grad():
        logits = model(inputs)[counted]
    f1 = MulticlassF1Score(VOCAB, average="none")
    auroc = MulticlassAUROC(VOCAB)
    expected = f1(logits, target[counted]).tolist()
    for i, value in enumerate(expected):
        assert found.values(f"val/multiclass_f1_score/{i}")[4] == pytest.approx(value, abs=1e-6)
    area = auroc(logits, target[counted]).item()
    for rank in (0, 1):
        recorded = found.values("val/multiclass_auroc", rank)[4]
        assert recorded == pytest.approx(area, abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_numbers_of_a_hook_are_those_of_the_main_process(several, strategy):
    found = several[f"{strategy}-halves"]
    for rank in (0, 1):
        assert found.values("val/rank", rank) == {2: 0, 4: 0}
    written = sorted(path.name for path in (found.folder / "samples").rglob("*.txt"))
    assert written == ["rank-0.txt", "rank-0.txt"]
    others = sorted(path.name for path in (found.folder / "ranks").rglob("rank-*.txt"))
    assert others == (["rank-1.txt", "rank-1.txt"] if strategy == "fsdp" else [])


def test_a_hook_changes_no_step(several):
    plain, hooked = several["ddp-plain"], several["ddp-halves"]
    close(plain.weights(), hooked.weights(), rtol=0, atol=0)
    assert plain.values("val/loss") == hooked.values("val/loss")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_hook_that_fails_ends_all_processes(several, strategy):
    found = several[f"{strategy}-fail"]
    for rank in (0, 1):
        text = found.text(f"refused-{rank}.txt")
        assert "at step 4, fails: ValueError: failed as it was told to" in text
    assert found.checkpoint().name == "step-00000004.pt"
