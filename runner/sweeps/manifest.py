"""Read and write sweep.json, which says what a sweep was asked for and how far it got; and describe
the job that HydraConfig holds by it.

A job that fails before training, or dies with its process, still needs a result.json: the sweep's
table and report are made from these files alone.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from runner.config.hydra_plugins import register_resolver
from runner.config.overrides import as_typed, override_texts
from runner.config.python_objects import given_keys
from runner.config.resolve import KEY_PREFIX
from runner.core import ConfigError, Invocation, files, fmt, layout, secrets, signature

if TYPE_CHECKING:
    from runner.core import run_result

_WORD_LIST_KEYS = ("command", "overrides", "left_out")


@dataclass(frozen=True)
class Manifest:
    """The command of a sweep, and how far the sweep got.

    Attributes:
        id: tag under which the store finds the sweep's jobs.
        command: words of the command line.
        overrides: words of the command that Hydra composes the jobs from.
        cwd: the working directory of the command.
        began_ms: Unix time in milliseconds.
        jobs: number of jobs; 0 where the launcher does not say.
        jobs_at_once: how many of them run at the same time; 0 where that is not known.
        max_trials: largest number of trials of mode=advise and mode=gate; 0 where it is not known.
        budget_end_ms: when the budget of these modes ends, Unix time in milliseconds.
        finished: no job needs to run again.
        answer: of the sweep; empty before it has one.
        busy: share of the processors that other programs kept busy meanwhile, 0 to 1; 0 where other
            machines run the jobs.
        left_out: `<precision> <key>` for each key under precision that the command sets and that
            one of its precisions does not take; jobs of that precision run without it.
        tolerance: advise.tolerance, see Tolerance.
        max_gap: advise.max_gap.
        signature: of the command and its working directory, with the key of the user who typed it.
    """

    id: str
    command: Sequence[str]
    overrides: Sequence[str] = ()
    cwd: str = "."
    began_ms: int = 0
    jobs: int = 0
    jobs_at_once: int = 0
    max_trials: int = 0
    budget_end_ms: int = 0
    finished: bool = False
    answer: str = ""
    busy: float = 0.0
    left_out: Sequence[str] = ()
    tolerance: float = 1.0
    max_gap: float | None = None
    signature: str = ""

    def signed(self) -> "Manifest":
        """Return the manifest of a command that this user has typed, with its signature."""
        return replace(self, signature=signature.sign(layout.MANIFEST, self._signed_text))

    @property
    def is_signed_by_user(self) -> bool:
        """Return whether this user has typed the command, in the manifest's working directory."""
        return signature.is_signed(layout.MANIFEST, self._signed_text, self.signature)

    @property
    def _signed_text(self) -> str:
        # As the file holds it, without secrets. Relative paths of the command, as that of
        # --config-dir, are read from the directory.
        return json.dumps(secrets.redact_values([self.cwd, *self.command]))

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a sweep's folder.

        Raises:
            ConfigError: the folder holds none, or a damaged one.
        """
        path = folder / layout.MANIFEST
        if not path.is_file():
            raise ConfigError(f"{folder} is not a sweep: it holds no {layout.MANIFEST}.")
        try:
            values = files.dataclass_fields_from_json(cls, files.read_json(path))
            for key in _WORD_LIST_KEYS:
                values[key] = [str(word) for word in values.get(key, ())]
            return cls(**values)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the manifest to a sweep's folder, atomically and without secrets.

        Raises:
            OSError: the file cannot be written.
        """
        files.write_json(folder / layout.MANIFEST, asdict(self))


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
    is_of_sweep = is_sweep_job()
    left_out = keys_left_out_of_job() if is_of_sweep else ()
    texts = []
    for typed in override_texts(HydraConfig.get().overrides.task):
        text = secrets.redact_override(as_typed(typed))
        key = fmt.override_key(text)
        # A plus that was typed for other precisions of the sweep says nothing of this job's.
        if is_of_sweep and key.startswith(KEY_PREFIX):
            text = text.lstrip("+")
        if key not in left_out:
            texts.append(text)
    return tuple(texts)


def keys_left_out_of_job() -> list[str]:
    """Return the keys under precision that HydraConfig's job runs without, as one of a sweep."""
    settings = HydraConfig.get()
    precision = str(settings.runtime.choices.get("precision"))
    pairs = [text.partition(" ") for text in Manifest.read(Path(settings.sweep.dir)).left_out]
    return [key for name, _, key in pairs if name == precision]


def typed_config_dir(hydra: Any) -> Path | None:
    """Return the folder that --config-dir names, None without it.

    Args:
        hydra: the node of Hydra's in a composed config.
    """
    sources = hydra.runtime.config_sources
    return next((Path(s.path) for s in sources if s.provider == "command-line"), None)


def job_invocation(sweeping: bool) -> Invocation:
    """Return where the config of HydraConfig's job comes from.

    Args:
        sweeping: the job is one of a sweep, whose manifest is in hydra.sweep.dir.
    """
    hydra = HydraConfig.get()
    choices = {str(k): str(v) for k, v in hydra.runtime.choices.items() if v}
    overrides = job_overrides()
    folder = typed_config_dir(hydra)
    config_dir = os.path.relpath(folder) if folder else None
    invocation = Invocation(choices, overrides, config_dir=config_dir, given=given_keys())
    if not sweeping:
        return invocation
    sweep = Manifest.read(Path(hydra.sweep.dir))
    # Compared by key: the text of a value changes when Hydra quotes it again for a job.
    typed = OverridesParser.create().parse_overrides([*sweep.overrides])
    fixed = {override.key_or_group for override in typed if not override.is_sweep_override()}
    keyed = ((fmt.override_key(text), text) for text in overrides)
    # Keys of tracking say where a run is recorded and name no job; sweep.resume may change them.
    swept = tuple(text for key, text in keyed if not (key in fixed or key.startswith("tracking.")))
    left_out = tuple(keys_left_out_of_job())
    return replace(invocation, swept_overrides=swept, sweep=sweep.id, omitted_keys=left_out)


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
