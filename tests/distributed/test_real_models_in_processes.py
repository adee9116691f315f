"""Two processes train models of Hugging Face and timm as one does, on padded batches of fields."""

import pytest
from processes import close
from tiny_models import typed

pytestmark = pytest.mark.slow

OWN = ("train.max_steps=3", "train.batch_size=6", "precision=64-true")
CASES = {
    "t5-ddp": ("t5", "strategy=ddp"),
    "bert-masked-parts": (
        "bert-masked",
        "strategy=ddp",
        "train.batch_size=3",
        "train.accumulate=2",
    ),
    "gpt2-fsdp": ("gpt2", "strategy=fsdp", "train.activation_checkpointing=true"),
    "timm-vit-fsdp": ("timm-vit", "strategy=fsdp"),
}


@pytest.fixture(scope="module")
def runs(run_in_processes, tmp_path_factory):
    """Outcomes of one process, and of two, by the name of the case."""
    folder = tmp_path_factory.mktemp("models")
    alone = {case: [*typed(name, folder), *OWN] for case, (name, *_) in CASES.items()}
    several = {case: [*alone[case], *more] for case, (_, *more) in CASES.items()}
    one = run_in_processes(1, {f"one-{case}": typed for case, typed in alone.items()}, folder)
    two = run_in_processes(2, several, folder)
    return {case: (one[f"one-{case}"], two[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(runs, case):
    one, two = runs[case]
    close(two.values("train/loss"), one.values("train/loss"), rtol=1e-12, atol=0)
    close(two.values("val/loss"), one.values("val/loss"), rtol=1e-9, atol=0)
    close(two.weights(), one.weights(), rtol=1e-6, atol=1e-9)
