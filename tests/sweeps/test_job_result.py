"""The config of a sweep's job."""

from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from runner.config.hydra_plugins import VERSION_BASE
from runner.config.resolve import register_schema
from runner.sweeps.manifest import Manifest, is_sweep_job, use_sweep_time

BEGAN_MS = 1_700_000_000_000


def compose_job(folder, *overrides):
    """Set HydraConfig to that of a job in a sweep's folder."""
    register_schema()
    with initialize_config_module("runner.conf", **VERSION_BASE):
        config = compose("config", [f"hydra.sweep.dir={folder}", *overrides], True)
    HydraConfig.instance().set_config(config)


def test_a_job_of_a_sweep_has_a_number_in_a_sweeps_folder(tmp_path):
    compose_job(tmp_path, "hydra.job.num=0")
    assert not is_sweep_job()
    Manifest("id", ["python"], began_ms=BEGAN_MS).write(tmp_path)
    assert is_sweep_job()
    compose_job(tmp_path)
    assert not is_sweep_job()


def test_jobs_of_a_sweep_have_the_time_of_the_sweep(tmp_path):
    Manifest("id", ["python"], began_ms=BEGAN_MS).write(tmp_path)
    compose_job(tmp_path, "hydra.job.num=0")
    use_sweep_time()
    assert OmegaConf.create({"day": "${now:%Y-%m-%d}"}).day in ("2023-11-14", "2023-11-15")
