"""Choose the precisions of a command with mode=advise or mode=gate, and the keys of each."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from hydra.core.override_parser.types import Override, ValueType

from runner.config.overrides import PRECISION_ALIASES
from runner.config.schema import RunSpec
from runner.precision.registry import (
    PrecisionSupport,
    load_precision,
    precision_config,
    precision_names,
)
from runner.sweeps.advisor.recorded_baseline import RecordedBaseline, read_recorded_baseline
from runner.utils.errors import ConfigError

_EMULATE = "precision.emulate"


def typed_precisions(overrides: Sequence[Override], known: Sequence[str]) -> list[str] | None:
    """Return the names after `precision=`, None where it was not typed.

    Raises:
        ConfigError: one of them is not the name of a precision.
    """
    override = next((o for o in overrides if o.get_key_element() == "precision"), None)
    if override is None:
        return None
    lists = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP)
    values = [override.value()]
    if override.is_sweep_override():
        if override.value_type not in lists:
            raise ConfigError(f"{override.input_line}: name the precisions, one after another.")
        values = [*override.sweep_string_iterator()]
    # The strings of a sweep keep the quotes that were typed.
    plain = [str(value).strip("'\"") for value in values]
    # Each precision once: an alias and its name may both have been typed.
    names = list(dict.fromkeys(PRECISION_ALIASES.get(name, name) for name in plain))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"precision={unknown[0]} is not known. Allowed: {', '.join(known)}.")
    return names


def check_gate(typed: Sequence[str] | None) -> None:
    """Refuse a mode=gate that does not name one precision."""
    if typed is None:
        raise ConfigError(
            "mode=gate asks about one precision. Type precision=<it>, as in precision=bf16-true."
        )
    if len(typed) > 1:
        raise ConfigError(
            f"mode=gate asks about one precision, and precision={','.join(typed)} names "
            f"{len(typed)}. Type one of them, or mode=advise to compare all."
        )


def read_baseline(
    spec: RunSpec, judged: Sequence[str], config_dir: Path | None
) -> tuple[str, RecordedBaseline | None]:
    """Return the precision of the baseline, and its runs if they are recorded.

    Raises:
        ConfigError: advise.baseline is neither a precision nor a run or sweep, or cannot be
            compared with.
    """
    typed = spec.advise.baseline
    name = PRECISION_ALIASES.get(typed, typed)
    if name in precision_names(config_dir):
        return name, None
    recorded = read_recorded_baseline(typed, spec, judged)
    return recorded.precision, recorded


def with_baseline(names: Sequence[str], baseline: str, mode: str) -> list[str]:
    """Return precisions with the baseline first.

    Raises:
        ConfigError: there is none to compare with the baseline.
    """
    precisions = [baseline, *(name for name in names if name != baseline)]
    if len(precisions) > 1:
        return precisions
    if mode == "gate":
        raise ConfigError(
            f"mode=gate compares a precision with the baseline, and precision={baseline} is it. "
            "Type another precision, or another advise.baseline."
        )
    raise ConfigError(
        f"mode=advise compares precisions with {baseline}, and was given no other. Leave "
        "precision= out to try all that this machine has, or name some: "
        "precision=bf16-mixed,16-mixed."
    )


def check_extras(extras: Mapping[str, Override], fitting: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys under precision that no precision takes."""
    used = {word.partition("=")[0] for words in fitting.values() for word in words}
    # Checked before other keys: precisions have it, and it is unused as long as none is emulated.
    if _EMULATE in {*extras} - used:
        raise ConfigError(
            "precision.emulate=true: this machine lacks none of "
            f"{', '.join(fitting)} that could be emulated. Leave it out."
        )
    unused = [key for key in extras if key not in used]
    if unused:
        raise ConfigError(
            f"{unused[0]}: none of {', '.join(fitting)} has such a key. Leave it out, or name the "
            "precisions that it is for."
        )


def emulatable(
    supported: Sequence[PrecisionSupport],
    extras: dict[str, Override],
    config_dir: Path | None,
) -> list[str]:
    """Return precisions that this machine lacks and emulates, if precision.emulate=true was typed.

    Args:
        supported: what this machine has and lacks.
        extras: overrides of keys under precision; precision.emulate=false, which is every
            precision's default, is removed.

    Raises:
        ConfigError: precision.emulate is neither true nor false.
    """
    if _EMULATE not in extras:
        return []
    value = extras[_EMULATE].value()
    if not isinstance(value, bool):
        raise ConfigError(f"precision.emulate={value} is not known. Allowed: true, false.")
    if not value:
        del extras[_EMULATE]
        return []
    # A reason (`why`) stands only in the rows of precisions that this machine lacks.
    lacking = [row.name for row in supported if row.why]
    return [name for name in lacking if has_key(name, "emulate", config_dir)]


def missing_precisions(
    supported: Sequence[PrecisionSupport], chosen: Collection[str]
) -> dict[str, str]:
    """Return the precisions that this machine lacks, each with the reason."""
    return {row.name: row.why for row in supported if row.why and row.name not in chosen}


def trainable_here(
    spec: RunSpec,
    emulated: Collection[str],
    supported: Sequence[PrecisionSupport],
    config_dir: Path | None,
) -> Iterator[str]:
    """Yield the precisions that this device has or emulates, and that are worth a trial."""
    has_adapter = bool(spec.adapter.get("_target_"))
    for row in supported:
        if not row.runs and row.name not in emulated:
            continue
        precision = load_precision(row.name, config_dir)
        # Frozen 4-bit and 8-bit weights train nothing without an adapter.
        trains_nothing = precision.freezes and not has_adapter
        # float64 costs time and memory, and can only win on quality.
        is_float64 = precision.storage is torch.float64
        cannot_win = is_float64 and spec.advise.objective != "quality"
        # Weights for a later packing cost time and quality now.
        cannot_win = cannot_win or bool(precision.trains_for)
        if not (trains_nothing or cannot_win):
            yield row.name


def has_key(name: str, key: str, config_dir: Path | None) -> bool:
    """Return whether a precision's config has a key."""
    return key in precision_config(name, config_dir)


def fitting_extras(
    name: str, extras: Mapping[str, Override], is_emulated: bool, config_dir: Path | None
) -> Iterator[str]:
    """Yield the overrides of keys that a precision has; what runs here is not emulated."""
    for key, override in extras.items():
        is_wanted = is_emulated or key != _EMULATE
        if is_wanted and has_key(name, key.split(".")[1], config_dir):
            assert override.input_line is not None
            # Once precision=<name> is chosen, the key exists: Hydra refuses `+` for it.
            yield override.input_line.lstrip("+")
