"""Write a job's result where the job itself wrote none."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.config.invocation import Invocation
from runner.config.precision_keys import without_keys
from runner.sweep.manifest import Manifest
from runner.utils.secrets import redact_override

if TYPE_CHECKING:
    from runner.modes.result import Status


def job_overrides() -> tuple[str, ...]:
    """Without secrets: they are labels, and stored. Without keys that a sweep leaves out for the
    job's precision."""
    texts = tuple(redact_override(str(text)) for text in HydraConfig.get().overrides.task)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return without_keys(texts, keys_left_out_of_job())
    return texts


def keys_left_out_of_job() -> list[str]:
    """Keys under precision that HydraConfig's job, one of a sweep, runs without."""
    settings = HydraConfig.get()
    manifest = Manifest.read(Path(settings.sweep.dir))
    return manifest.keys_left_out(str(settings.runtime.choices.get("precision")))


def job_origin(sweeping: bool) -> Invocation:
    """Where the config of HydraConfig's job comes from."""
    choices = {str(k): str(v) for k, v in HydraConfig.get().runtime.choices.items() if v}
    overrides = job_overrides()
    own = [
        source.path
        for source in HydraConfig.get().runtime.config_sources
        if source.provider == "command-line"
    ]
    mine = os.path.relpath(own[0]) if own else None
    if not sweeping:
        return Invocation(choices, overrides, config_dir=mine)
    sweep = Manifest.read(Path(HydraConfig.get().sweep.dir))
    # By key: the text of a value changes when Hydra quotes it again for a job.
    typed = OverridesParser.create().parse_overrides([*sweep.overrides])
    fixed = {override.key_or_group for override in typed if not override.is_sweep_override()}
    keyed = ((text.lstrip("+~").partition("=")[0], text) for text in overrides)
    # Where a run is recorded names no job; sweep.resume takes it beside the sweep's own overrides.
    swept = (t for key, t in keyed if key not in fixed and not key.startswith("tracking."))
    left_out = tuple(keys_left_out_of_job())
    return Invocation(choices, overrides, tuple(swept), sweep.id, mine, left_out)


def record_result(config: DictConfig, folder: Path, status: "Status", message: str) -> None:
    """The result of a job that came to none. HydraConfig is that job's."""
    from runner.modes.result import RunResult

    swept = job_origin(True).swept_overrides
    precision = str(HydraConfig.get().runtime.choices.get("precision"))
    others = [text for text in swept if not text.startswith("precision=")]
    unseeded = [text for text in others if not text.startswith("seed=")]
    RunResult(
        precision,
        " ".join([precision, *others]),
        str(folder),
        status,
        message,
        job_overrides(),
        " ".join([precision, *unseeded]),
        config.get("seed"),
        left_out=keys_left_out_of_job(),
    ).write(folder)
