"""Whole commands on a GPU: train, checkpoint, resume, evaluate in every precision, and diff."""

import pytest
import torch
from run_folders import read_json

from runner.precision import registry

pytestmark = [pytest.mark.gpu, pytest.mark.imitated]
SMALL = (
    "accelerator=cuda model=gpt model.layers=1 model.width=32 model.heads=2 data=synthetic_tokens "
    "data.count=64 data.context=16 train.batch_size=8 train.log_every=1 tracking=none "
    "optimizer.eps=1e-4"
).split()
FIRST = (
    *("tf32", "16-mixed", "bf16-mixed", "bf16-true", "transformer-engine", "float8-rowwise"),
    *("bnb-nf4", "bnb-int8-training", "int4", "qat-int8"),
)
"""One of each kind; test_precisions_cuda.py takes steps in every precision."""
NAMES = [
    pytest.param(name, marks=() if name in FIRST else pytest.mark.extended)
    for name in registry.precision_names()
]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_trains_resumes_and_is_evaluated(name, main, tmp_path):
    typed = [*SMALL, f"precision={name}", "checkpoint.every_steps=2", "checkpoint.keep=2"]
    rows = registry.supported_precisions(torch.device("cuda", 0))
    if not next(row.runs for row in rows if row.name == name):
        typed.append("precision.emulate=true")  # kernels of another GPU
    is_frozen = registry.load_precision(name).freezes
    trained = ["train.max_steps=4", *(["adapter=lora"] if is_frozen else [])]
    half = "checkpoint.resume=whole/checkpoints/step-00000002.pt"
    losses = []
    for more, folder in (
        ([*trained, "hydra.run.dir=whole"], "whole"),
        ([*trained, half], "whole"),  # a resumed run continues in its folder
        (["mode=evaluate", "checkpoint.path=whole", "hydra.run.dir=evaluated"], "evaluated"),
    ):
        main(*typed, *more).check_ok()
        result = read_json(tmp_path / folder / "result.json")
        losses.append(result["metrics"]["val/loss"])
    assert len(set(losses)) == 1


@pytest.mark.parametrize(("own", "other"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_executions_on_two_devices_are_compared(own, other, main, tmp_path):
    typed = [*SMALL, f"accelerator={own}", f"against={other}", "model=mixture"]
    main("mode=diff", *typed, "precision=bf16-mixed", "hydra.run.dir=compared").check_ok()
    assert read_json(tmp_path / "compared" / "diff.json")["parts"] is False
