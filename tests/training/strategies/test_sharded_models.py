"""strategy=fsdp: only the main process makes the weights, and the others receive their shards."""

import pytest
from processes import IMAGES, SGD, close

pytestmark = pytest.mark.slow

OWN = f"{IMAGES} {SGD} ~model +model._target_=nets.MadeOn"
JOBS = {
    "plain": "",
    "attribute": "+model.stray=true",
    "lora": "adapter=lora adapter.modules=[body.*] precision=bf16-true",
    "float8": "precision=float8-tensorwise precision.emulate=true",
}
ONLY_FSDP = {
    "each": "strategy.cpu_ram_efficient_loading=false",
    "units": "strategy.units=['body.*'] precision=bf16-mixed",
    "evaluated": "mode=evaluate",
}
SECOND_MAKES_ON = {
    "plain": "meta",
    "attribute": "meta cpu",
    "lora": "meta",
    "float8": "meta",
    "each": "cpu",
    "units": "meta",
    "evaluated": "meta",
}


def typed(strategy, name, more, folder):
    """Return the overrides of a job."""
    if name == "evaluated":
        more += f" checkpoint.path={folder / 'fsdp-plain'}"
    return f"{OWN} +model.log={strategy}-{name} strategy={strategy} {more}"


@pytest.fixture(scope="module")
def runs(run_in_processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    kinds = {"ddp": JOBS, "fsdp": JOBS | ONLY_FSDP}
    jobs = {
        f"{strategy}-{name}": typed(strategy, name, more, folder)
        for strategy, named in kinds.items()
        for name, more in named.items()
    }
    return run_in_processes(2, jobs, folder), folder


@pytest.mark.parametrize("name", JOBS)
def test_shards_hold_what_whole_models_hold(runs, name):
    """Parameters, tied ones, buffers that are saved and those that are not, and an adapter's."""
    found, _ = runs
    whole, sharded = found[f"ddp-{name}"], found[f"fsdp-{name}"]
    tolerance = 1e-6 if name != "lora" else 1e-2
    for key in ("train/loss", "val/loss"):
        close(whole.values(key), sharded.values(key), rtol=tolerance, atol=tolerance)
        assert sharded.values(key) == sharded.values(key, rank=1)
    close(whole.weights(), sharded.weights(), rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("name", SECOND_MAKES_ON)
def test_only_the_main_process_makes_the_weights(runs, name):
    _, folder = runs
    makes = [(folder / f"fsdp-{name}-{rank}.txt").read_text().strip() for rank in (0, 1)]
    assert makes == ["cpu", SECOND_MAKES_ON[name]]


def test_a_model_that_each_process_makes_is_the_same(runs):
    found, _ = runs
    close(found["fsdp-plain"].weights(), found["fsdp-each"].weights(), rtol=0, atol=0)


def test_a_sharded_model_is_evaluated(runs):
    found, _ = runs
    trained, evaluated = found["fsdp-plain"], found["fsdp-evaluated"]
    assert evaluated.values("val/loss")[6] == pytest.approx(trained.values("val/loss")[6], rel=1e-6)
    assert evaluated.values("val/loss") == evaluated.values("val/loss", rank=1)
