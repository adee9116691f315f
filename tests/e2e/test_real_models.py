"""Models of Hugging Face and timm from yaml alone, in several precisions: what is trained, and how.

test_precisions.py shows each precision; here each family of them meets an architecture.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from precision_models import EMULATED
from run_folders import losses_in, metrics_in, read_json
from safetensors.torch import load_file
from tiny_models import NAMES, train_by_hand, typed

STEPS = 3
JOURNAL = "tracking._target_=runner.core.record.tracker.ProcessJournal"
SHORT = ("tracking=none", JOURNAL, f"train.max_steps={STEPS}")
by_hand = cache(train_by_hand)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture
def train(main, files, tmp_path, result):
    """Train a model from yaml; return its folder and its losses by step."""

    def run(name, *overrides):
        main(*typed(name, files), *SHORT, *overrides).check_ok()
        folder = tmp_path / result(tmp_path)["folder"]
        return folder, losses_in(folder)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_weights_are_those_of_a_loop_by_hand(train, name):
    folder, losses = train(name, "checkpoint.safetensors=true", "checkpoint.final=false")
    model, expected, validation = by_hand(name, STEPS)
    assert losses == expected
    saved, own = load_file(folder / "model.safetensors"), model.state_dict()
    assert all(torch.equal(saved[key], own[key]) for key in saved)
    assert metrics_in(folder)["val/loss"] == pytest.approx(validation, rel=1e-6)


FAMILIES = {
    "16-mixed": "vit",
    "bf16-true": "timm-resnet",
    "bnb-nf4": "t5",
    "bnb-int8-training": "bert-masked",
    "qat-int4": "gpt2",
    "float8-rowwise": "bert-token",
    "transformer-engine-nvfp4": "timm-vit",
}
"""The architecture in which a precision of each family is tried."""
CONVERTS = ("bnb-", "float8-", "qat-", "torchao-", "transformer-engine")


@pytest.mark.parametrize(("precision", "name"), FAMILIES.items())
def test_a_precision_trains_and_names_what_it_leaves(train, name, precision):
    emulate = ["precision.emulate=true"] if precision.startswith(EMULATED) else []
    folder, losses = train(name, f"precision={precision}", *emulate)
    _, expected, _ = by_hand(name, STEPS)
    assert losses[0] == pytest.approx(expected[0], rel=0.05)
    assert losses == pytest.approx(expected, rel=0.15)
    assert metrics_in(folder)["val/loss"] < 1.1 * by_hand(name, STEPS)[2]
    if precision.startswith(CONVERTS):
        _check_conversion(read_json(folder / "conversion.json"))


def _check_conversion(rows):
    """Check that all products of the blocks are converted, and that the rest says why not."""
    blocks = [row for row in rows if _is_product_of_a_block(row)]
    assert len(blocks) >= 8
    for row in blocks:
        # T5 casts to the dtype of this weight, which packed is no floating one.
        reads_weight = row["module"].endswith("DenseReluDense.wo")
        assert row["done"] or (reads_weight and "reads its weight itself" in row["why"])
    assert all(row["why"] for row in rows if not row["done"])


def _is_product_of_a_block(row):
    """Return whether a row is that of a product of an attention or an MLP, by its name."""
    is_in_block = any(part.isdigit() for part in row["module"].split("."))
    return is_in_block and row["kind"] in ("Linear", "Conv1D")


def test_saved_weights_are_those_that_transformers_reads(train, files):
    from transformers import AutoModelForCausalLM

    folder, _ = train("gpt2", "checkpoint.safetensors=true")
    (folder / "config.json").write_text((files / "gpt2.json").read_text())
    read = AutoModelForCausalLM.from_pretrained(Path(folder)).state_dict()
    own = by_hand("gpt2", STEPS)[0].state_dict()
    assert all(torch.equal(read[key], own[key]) for key in own)
