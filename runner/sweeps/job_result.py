"""Describe the job that HydraConfig holds, and write a result for a job that wrote none itself.

A job that fails before training, or dies with its process, still needs a result.json: the sweep's
table and report are made from these files alone.
"""

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from runner.config.hydra_plugins import register_resolver
from runner.config.overrides import as_typed, override_texts
from runner.config.python_objects import given_keys
from runner.config.resolve import KEY_PREFIX
from runner.core import Invocation, fmt, layout, secrets
from runner.sweeps.manifest import Manifest

if TYPE_CHECKING:
    from runner.core import run_result


def is_sweep_job() -> bool:
    """Return whether HydraConfig's job is one of a sweep: it has a number in a sweep's folder."""
    settings = HydraConfig.get()
    has_number = not OmegaConf.is_missing(settings.job, "num")
    return has_number and Path(settings.sweep.dir, layout.MANIFEST).is_file()


def use_sweep_time() -> None:
    """Let ${now:...} in the config of HydraConfig's job be the time when its sweep began.

    Each job composes its own config, and all jobs of a sweep have one time.
    """
    began = datetime.fromtimestamp(Manifest.read(Path(HydraConfig.get().sweep.dir)).began_ms / 1000)
    # OmegaConf 2.4 reads a resolver's signature, which a built-in method does not have.
    register_resolver("now", lambda form: began.strftime(form), use_cache=True, replace=True)


def job_overrides() -> tuple[str, ...]:
    """Return the overrides of HydraConfig's job, redacted: they become labels and are stored.

    Keys that a sweep leaves out for the job's precision are missing.
    """
    typed = map(as_typed, override_texts(HydraConfig.get().overrides.task))
    texts = tuple(map(secrets.redact_override, typed))
    if not is_sweep_job():
        return texts
    left_out = keys_left_out_of_job()
    texts = tuple(text for text in texts if fmt.override_key(text) not in left_out)
    # A plus that was typed for other precisions of the sweep says nothing of this job's.
    return tuple(
        text.lstrip("+") if fmt.override_key(text).startswith(KEY_PREFIX) else text
        for text in texts
    )


def keys_left_out_of_job() -> list[str]:
    """Return the keys under precision that HydraConfig's job runs without, as one of a sweep."""
    settings = HydraConfig.get()
    precision = str(settings.runtime.choices.get("precision"))
    pairs = [text.partition(" ") for text in Manifest.read(Path(settings.sweep.dir)).left_out]
    return [key for name, _, key in pairs if name == precision]


def job_invocation(sweeping: bool) -> Invocation:
    """Return where the config of HydraConfig's job comes from.

    Args:
        sweeping: the job is one of a sweep, whose manifest is in hydra.sweep.dir.
    """
    choices = {str(k): str(v) for k, v in HydraConfig.get().runtime.choices.items() if v}
    overrides = job_overrides()
    config_dirs = [
        source.path
        for source in HydraConfig.get().runtime.config_sources
        if source.provider == "command-line"
    ]
    config_dir = os.path.relpath(config_dirs[0]) if config_dirs else None
    if not sweeping:
        return Invocation(choices, overrides, config_dir=config_dir, given=given_keys())
    sweep = Manifest.read(Path(HydraConfig.get().sweep.dir))
    # Compared by key: the text of a value changes when Hydra quotes it again for a job.
    typed = OverridesParser.create().parse_overrides([*sweep.overrides])
    fixed = {override.key_or_group for override in typed if not override.is_sweep_override()}
    keyed = ((fmt.override_key(text), text) for text in overrides)
    # Keys of tracking say where a run is recorded and name no job; sweep.resume may change them.
    swept = (text for key, text in keyed if key not in fixed and not key.startswith("tracking."))
    left_out = tuple(keys_left_out_of_job())
    return Invocation(
        choices, overrides, tuple(swept), sweep.id, config_dir, left_out, given=given_keys()
    )


def job_words() -> list[str]:
    """Return the name of HydraConfig's job, one of a sweep: precision and the rest."""
    swept = job_invocation(True).swept_overrides
    precision = str(HydraConfig.get().runtime.choices.get("precision"))
    return [precision, *(text for text in swept if not text.startswith("precision="))]


def record_result(
    config: DictConfig, folder: Path, status: "run_result.Status", message: str
) -> None:
    """Write result.json for a job that failed before producing a result.

    HydraConfig must be that job's, see job_hydra_config.

    Args:
        config: the job's.
        folder: the job's.
        status: how the job ended.
        message: why, for the table, the report and MLflow.
    """
    from runner.core import RunResult

    precision, *words = job_words()
    settings = [text for text in words if fmt.override_key(text) != "seed"]
    RunResult(
        precision=precision,
        label=" ".join([precision, *words]),
        folder=str(folder),
        status=status,
        error=message,
        overrides=job_overrides(),
        group=" ".join([precision, *settings]),
        settings=settings,
        seed=config.get("seed"),
        left_out=keys_left_out_of_job(),
    ).write(folder)
