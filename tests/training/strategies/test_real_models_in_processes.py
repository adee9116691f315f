"""Two processes train models of Hugging Face and timm as one does, on padded batches of fields."""

import pytest
from processes import close
from safetensors.torch import load_file
from tiny_models import typed

pytestmark = pytest.mark.slow

OWN = "train.max_steps=3 train.batch_size=6 precision=64-true"
FOLDER = "checkpoint.pretrained=true"
DORA = "adapter=lora adapter.use_dora=true adapter.init=pissa adapter.rank=2"
CASES = {
    # The model, what both trainings are told, and those of two processes.
    "t5-ddp": ("t5", "", "strategy=ddp"),
    "bert-masked-parts": ("bert-masked", "", "strategy=ddp train.batch_size=3 train.accumulate=2"),
    "gpt2-fsdp": ("gpt2", "", f"strategy=fsdp train.activation_checkpointing=true {FOLDER}"),
    "gpt2-lora": ("gpt2", "adapter=lora", f"strategy=fsdp {FOLDER}"),
    "gpt2-dora-fsdp": ("gpt2", DORA, f"strategy=fsdp {FOLDER}"),
    "gpt2-dora-ddp": ("gpt2", DORA, "strategy=ddp"),
    "timm-vit-fsdp": ("timm-vit", "", "strategy=fsdp"),
}


@pytest.fixture(scope="module")
def runs(run_in_processes, tmp_path_factory):
    """Outcomes of one process, and of two, by the name of the case."""
    folder = tmp_path_factory.mktemp("models")
    alone, several = {}, {}
    for case, (name, both, two) in CASES.items():
        alone[f"one-{case}"] = " ".join([*typed(name, folder), OWN, both])
        several[case] = f"{alone[f'one-{case}']} {two}"
    one = run_in_processes(1, alone, folder)
    two = run_in_processes(2, several, folder)
    return {case: (one[f"one-{case}"], two[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(runs, case):
    one, two = runs[case]
    close(two.values("train/loss"), one.values("train/loss"), rtol=1e-12, atol=0)
    close(two.values("val/loss"), one.values("val/loss"), rtol=1e-9, atol=0)
    close(two.weights(), one.weights(), rtol=1e-6, atol=1e-9)


def test_sharded_weights_are_gathered_in_the_folder_of_transformers(runs):
    one, two = runs["gpt2-fsdp"]
    found = load_file(two.folder / "pretrained" / "model.safetensors")
    close(found, {name: one.weights()[name] for name in found}, rtol=1e-6, atol=1e-9)
    assert not (two.folder / "adapter").exists()


@pytest.mark.parametrize("case", ["gpt2-lora", "gpt2-dora-fsdp"])
def test_a_sharded_adapter_is_gathered_in_the_folder_of_peft(runs, case):
    one, two = (run.folder / "adapter" / "adapter_model.safetensors" for run in runs[case])
    close(load_file(two), load_file(one), rtol=1e-6, atol=1e-9)
