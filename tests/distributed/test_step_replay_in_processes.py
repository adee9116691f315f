"""Several processes that compute a step twice: all of them stop where one computes wrong."""

import pytest
import torch
from processes import NET

pytestmark = pytest.mark.slow

OWN = (
    *NET,
    "deterministic=true",
    "model._target_=bit_flips.Net",
    "~model.hidden",
    "~model.input_shape",
)
TWICE = "guard.replay_every=3"
JOBS = {
    "ddp": ["strategy=ddp"],
    "ddp-twice": ["strategy=ddp", TWICE],
    "fsdp": ["strategy=fsdp"],
    "fsdp-twice": ["strategy=fsdp", TWICE],
    # Step 3 is the computations 3 and 4.
    "ddp-wrong": ["strategy=ddp", TWICE, "+model.flip_forward=[4]", "+model.rank=1"],
    "fsdp-wrong": ["strategy=fsdp", TWICE, "+model.flip_backward=[3]", "+model.rank=1"],
}
PLACES = {
    "ddp-wrong": ("the output of body.3 in process 1 differs", "the first one", "the second one"),
    "fsdp-wrong": (
        "the gradient of the input of body.3 in process 1 differs",
        "the second one",
        "the first one",
    ),
}


@pytest.fixture(scope="module")
def outcomes(run_in_processes, tmp_path_factory):
    jobs = {name: [*OWN, *typed] for name, typed in JOBS.items()}
    return run_in_processes(2, jobs, tmp_path_factory.mktemp("replayed"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_steps_that_are_computed_twice_leave_the_weights_of_a_plain_run(outcomes, strategy):
    expected = outcomes[strategy].weights()
    weights = outcomes[f"{strategy}-twice"].weights()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert outcomes[strategy].values("perf/replay_ms") == {}
    assert [*outcomes[f"{strategy}-twice"].values("perf/replay_ms")] == [3, 6]


@pytest.mark.parametrize("name", PLACES)
def test_a_fault_in_one_process_stops_all(outcomes, name):
    place, agreeing, wrong = PLACES[name]
    for rank in (0, 1):
        message = outcomes[name].text(f"refused-{rank}.txt")
        assert f"guard.corruption: step 3 was computed twice, and {place}." in message
        assert f"A third computation agrees with {agreeing}: a transient fault" in message
        assert f"hardware in {wrong}" in message
    assert outcomes[name].content()["step"] == 2
