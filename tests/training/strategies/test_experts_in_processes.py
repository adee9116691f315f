"""Two processes train a mixture whose experts are converted as one process does, and resume."""

import pytest
import torch
from processes import close

pytestmark = pytest.mark.slow

RUN = (
    "data=digits ~model +model._target_=nets.Mixes accelerator=cpu data.shuffle=false "
    "train.batch_size=6 train.max_steps=4 train.eval_every=2 train.log_every=1"
)
LORA = "adapter=lora adapter.modules=[head,body.3.first,body.3.second]"
# An expert without a token in one process has some in the other one.
QAT, INT4, NF4 = "precision=qat-int4", f"precision=int4 {LORA}", f"precision=bnb-nf4 {LORA}"
extended = pytest.mark.extended
CASES = [
    pytest.param((INT4, "strategy=fsdp", 1e-5), id="int4-fsdp"),
    pytest.param((NF4, "strategy=ddp", 1e-4), id="nf4-ddp"),
    pytest.param((QAT, "strategy=ddp", 1e-5), id="qat-int4-ddp", marks=extended),
    pytest.param((QAT, "strategy=fsdp", 1e-5), id="qat-int4-fsdp", marks=extended),
]
"""What is typed, the strategy, and by how much losses may differ: products are rounded by rows."""


@pytest.fixture(scope="module", params=CASES)
def runs(request, run_in_processes, tmp_path_factory):
    """Return outcomes by name, and by how much losses may differ."""
    words, strategy, within = request.param
    folder = tmp_path_factory.mktemp("experts")
    two = f"{RUN} {words} {strategy}"
    jobs = {"whole": two, "cut": f"{two} train.max_steps=2"}
    found = run_in_processes(2, jobs, folder)
    rest = {"rest": f"{two} checkpoint.resume={folder / 'cut'}"}
    run_in_processes(2, rest, folder)
    evaluated = {"evaluated": f"mode=evaluate checkpoint={folder / 'whole'} accelerator=cpu"}
    return found | run_in_processes(1, {"one": f"{RUN} {words}", **evaluated}, folder), within


def test_two_processes_train_experts_as_one(runs):
    outcomes, within = runs
    for key in ("train/loss", "val/loss"):
        alone, many = outcomes["one"].values(key), outcomes["whole"].values(key)
        close(many, alone, rtol=within, atol=within)
    assert outcomes["whole"].weights().keys() == outcomes["one"].weights().keys()
    assert outcomes["whole"].content()["experts"] == {"body.3.first": True, "body.3.second": False}


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(runs):
    outcomes, _ = runs
    whole, rest = outcomes["whole"].weights(), outcomes["cut"].weights()
    assert all(torch.equal(rest[key], whole[key]) for key in whole)
    assert outcomes["cut"].content()["step"] == 4


def test_one_process_evaluates_what_two_have_trained(runs):
    outcomes, within = runs
    trained = outcomes["whole"].values("val/loss")[4]
    assert outcomes["evaluated"].values("val/loss")[4] == pytest.approx(trained, rel=within)
