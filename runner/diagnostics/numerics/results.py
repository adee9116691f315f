"""Hold what was measured of a run's numbers, write it as numerics.json, and judge formats and loss
scales by it.

A snapshot holds the measurements of one optimizer step; the file calls the snapshots `probes`.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from runner.core import ConfigError, files, fmt, layout
from runner.precision.emulation.formats import FLOAT16, FORMATS

KINDS = ("activations", "weights", "gradients", "updates")
Sensitivity = Literal["range", "precision", "none"]
Complaint = tuple[str, str, str, float]
"""(module, kind, what, share): what is overflow, underflow, swallowed or noise."""

VANISHING_SHARE_LIMIT = 0.05
"""Least share of a module's values that become zero at which a format lacks range."""
NOISE_SHARE_LIMIT = 0.01
"""Least energy of a module's rounding error, over that of its values, at which a format lacks range
or precision: 20 dB, an error of a tenth."""
SWALLOWED_SHARE_LIMIT = 0.5
"""Least share of a module's updates that are swallowed at which a format lacks precision."""
NEGLIGIBLE_EXPONENT_GAP = 20
"""Powers of two. Values further than this below the largest of a module and kind are taken for
float32's rounding error: 2**-24 in one operation, 4 bits more in a sum of some hundred terms."""

INITIAL_SCALE = 2.0**16
"""The scale that 16-mixed and torch's GradScaler begin with."""
_SCALE_EXPONENTS = range(-32, 97)
"""Exponents of the scales that are tried."""
_LEAST_FLOAT16_EXPONENT = FLOAT16.exponent - FLOAT16.mantissa
"""Exponent of the least subnormal value. Values under half of it become zero."""
_BIN_ENERGY = 7 / 3
"""Mean of x**2 over [1, 2): energy of a value in units of 4**exponent."""


class QuantizationLoss(NamedTuple):
    """The loss of a tensor's values that are not zero, rounded to one format.

    Shares are from 0 to 1. numerics.json holds a list in the order of the fields.

    Attributes:
        underflow: become zero.
        subnormal: become subnormal, with fewer bits than the format has.
        overflow: are past its largest value.
        sqnr_db: signal to quantisation noise, dB; overflow counted as the largest value. None:
            no value changes, or there is none.
        swallowed: of weights that had a gradient, those that the update leaves as the format
            holds them; None where this was not asked.
        negligible: become zero and are under 2**-20 of the largest of the module's values of this
            kind, float32's own rounding error: part of `underflow`.
        underflow_noise: energy of the rounding error of the values that become zero or subnormal,
            over the energy of all.
    """

    underflow: float
    subnormal: float
    overflow: float
    sqnr_db: float | None
    swallowed: float | None = None
    negligible: float = 0.0
    underflow_noise: float = 0.0

    @property
    def noise(self) -> float:
        """Energy of the rounding error over that of the signal."""
        return 0.0 if self.sqnr_db is None else 10 ** (-self.sqnr_db / 10)

    @property
    def vanishing(self) -> float:
        """Share of values that become zero and are not negligible."""
        return max(0.0, self.underflow - self.negligible)

    @property
    def sensitivity(self) -> Sensitivity:
        """Return what the format lacks for activations, weights or gradients with this loss."""
        if self.overflow or self.vanishing >= VANISHING_SHARE_LIMIT:
            return "range"
        # Noise of values under the least normal one is a matter of range: more bits do not help.
        if self.underflow_noise >= NOISE_SHARE_LIMIT:
            return "range"
        return "precision" if self.noise >= NOISE_SHARE_LIMIT else "none"


@dataclass(frozen=True)
class TensorStats:
    """The statistics of one kind of a module's numbers at one step.

    Attributes:
        module: dotted name; "(model)" is the model itself.
        kind: of KINDS; gradients are multiplied by the loss scale.
        elements: how many there are, zeros included.
        zeros: share of them that is zero.
        not_finite: share of them that is infinite or NaN, which no other number counts.
        largest: magnitude; None where some are not finite.
        exponents: count of values by exponent, those of [2**e, 2**(e+1)) at e; e=-127 has all
            below 2**-126. Counts of a sample of many, times its stride.
        formats: by name. FP8 is as after a scale per tensor to its largest value; with
            `_unscaled` it is without.
    """

    module: str
    kind: str
    elements: int
    zeros: float
    not_finite: float
    largest: float | None
    exponents: Mapping[int, int]
    formats: Mapping[str, QuantizationLoss]


@dataclass(frozen=True)
class NumericsSnapshot:
    """All modules in one optimizer step, with the loss scale in force (None without one)."""

    step: int
    loss_scale: float | None
    measured: Sequence[TensorStats]


@dataclass(frozen=True)
class Numerics:
    """The measurements of a run, as numerics.json has them.

    Attributes:
        every: optimizer steps between two snapshots.
        precision: name of the run's precision.
        storage, compute: torch's names of the dtypes that it stores and computes in.
        probes: the snapshots, in the order of their steps.
    """

    every: int
    precision: str
    storage: str
    compute: str
    probes: Sequence[NumericsSnapshot]

    @property
    def measured(self) -> list[TensorStats]:
        """Return the statistics of all snapshots."""
        return [stats for snapshot in self.probes for stats in snapshot.measured]

    @property
    def computed_in(self) -> str:
        """Return the run's compute format; float16 in place of one that is not in FORMATS."""
        return self.compute if self.compute in FORMATS else "float16"

    @property
    def stored_in(self) -> str:
        """Return the run's storage format; bfloat16 in place of one that is not in FORMATS."""
        return self.storage if self.storage in FORMATS else "bfloat16"

    def worst(
        self, name: str, most: int | None = None, kinds: Sequence[str] = KINDS
    ) -> list[Complaint]:
        """Return what the format loses per module, as means over the snapshots.

        What overflows comes first, then the largest share. Modules without a loss are left out;
        `noise` is listed from NOISE_SHARE_LIMIT on.

        Args:
            name: of those measured.
            most: how many; None for all.
            kinds: those of KINDS that the format would hold.

        Raises:
            ValueError: no such format was measured.
        """
        complaints: list[Complaint] = []
        for (module, kind), lost in self._mean_losses(name).items():
            if kind not in kinds:
                continue
            shares = {"swallowed": lost.swallowed or 0.0}
            if kind != "updates":
                noise = min(lost.noise, 1.0) if lost.noise >= NOISE_SHARE_LIMIT else 0.0
                shares = {"overflow": lost.overflow, "underflow": lost.vanishing, "noise": noise}
            complaints += [
                (module, kind, what, share) for what, share in shares.items() if share > 0
            ]
        return sorted(complaints, key=lambda row: (row[2] != "overflow", -row[3]))[:most]

    def reasons(self, name: str, kinds: Sequence[str] = KINDS) -> list[Complaint]:
        """Return those of `worst` that make the verdict of `sensitivity`, worst first.

        Raises:
            ValueError: no such format was measured.
        """
        verdict = self.sensitivity(name, kinds)
        if verdict == "none":
            return []
        means = self._mean_losses(name)
        everything = self.worst(name, kinds=kinds)
        return [row for row in everything if _lacks(row[1], means[row[0], row[1]]) == verdict]

    def sensitivity(self, name: str, kinds: Sequence[str] = KINDS) -> Sensitivity:
        """Return what the format lacks for this model, at the loss scale in force.

        "range": activations, weights or gradients of a module overflow, the share that vanishes
        reaches VANISHING_SHARE_LIMIT, or the noise of values that become zero or subnormal reaches
        NOISE_SHARE_LIMIT. Else "precision": the noise reaches NOISE_SHARE_LIMIT, or the share of a
        module's updates that is swallowed reaches SWALLOWED_SHARE_LIMIT, which matters where
        weights are stored in the format. Else "none".

        Raises:
            ValueError: no such format was measured.
        """
        losses = self._mean_losses(name)
        lacks = {_lacks(kind, lost) for (_, kind), lost in losses.items() if kind in kinds}
        # One module that lacks range decides, whatever the others lack.
        if "range" in lacks:
            return "range"
        return "precision" if "precision" in lacks else "none"

    def unjudged(self) -> dict[str, list[str]]:
        """Return by kind the modules all of whose measured numbers are 0; not of updates, for those
        of 0 may be swallowed ones."""
        is_judged: dict[tuple[str, str], bool] = defaultdict(bool)
        for stats in self.measured:
            is_judged[stats.kind, stats.module] |= stats.largest != 0 or stats.kind == "updates"
        return fmt.grouped(key for key, judged in is_judged.items() if not judged)

    def _mean_losses(self, name: str) -> dict[tuple[str, str], QuantizationLoss]:
        """Return the mean loss of each module and kind over the snapshots that have values."""
        rows: dict[tuple[str, str], list[QuantizationLoss]] = defaultdict(list)
        for stats in self.measured:
            if name not in stats.formats:
                known = ", ".join(stats.formats)
                raise ValueError(f"{name} was not measured. Known: {known}.")
            # No format loses anything of zeros, which would hide what it loses of others.
            if stats.largest != 0 or stats.kind == "updates":
                rows[stats.module, stats.kind].append(self.quantization_loss(stats, name))
        return {key: _mean(losses) for key, losses in rows.items()}

    def quantization_loss(self, stats: TensorStats, name: str) -> QuantizationLoss:
        """Return what a format loses of a measured tensor.

        A value that is not finite has left the range of the run's own compute format, and with it
        that of every narrower one.
        """
        lost = stats.formats[name]
        largest = FORMATS[name.removesuffix("_unscaled")].largest
        # A run in float32 has left float32's range, and so that of every format here.
        own_largest = FORMATS[self.compute].largest if self.compute in FORMATS else math.inf
        if not stats.not_finite or largest > own_largest:
            return lost
        return lost._replace(overflow=min(1.0, lost.overflow + stats.not_finite))

    def write(self, path: Path) -> Path:
        """Write the file and return its path. Raises OSError: it cannot be written."""
        return files.write_text(path, json.dumps(asdict(self), allow_nan=False) + "\n")


def read(folder: Path) -> Numerics:
    """Read the numerics.json in a run's folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = folder / layout.NUMERICS
    if not path.is_file():
        raise ConfigError(f"{path} is no file. Train with numerics.every=<steps> to have it.")
    try:
        content = files.read_json(path)
        snapshots = []
        for probe in content["probes"]:
            measured = []
            for stats in probe["measured"]:
                # JSON has strings as keys only.
                exponents = {int(e): count for e, count in stats["exponents"].items()}
                formats = {name: QuantizationLoss(*lost) for name, lost in stats["formats"].items()}
                changes = {"exponents": exponents, "formats": formats}
                measured.append(TensorStats(**{**stats, **changes}))
            snapshots.append(NumericsSnapshot(**{**probe, "measured": measured}))
        return Numerics(**{**content, "probes": snapshots})
    # A file of another version has other fields: TypeError or KeyError, no traceback for the user.
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged: {type(error).__name__}: {error}. Type numerics.every=<steps>."
        ) from error


def _lacks(kind: str, lost: QuantizationLoss) -> Sensitivity:
    """Return what a format lacks for one kind of a module's numbers."""
    # An update is added to a weight: that it underflows by itself does not matter.
    if kind != "updates":
        return lost.sensitivity
    return "precision" if (lost.swallowed or 0.0) >= SWALLOWED_SHARE_LIMIT else "none"


def _mean(losses: Sequence[QuantizationLoss]) -> QuantizationLoss:
    """Return the mean of each field; of the SQNR that of the noise, in dB."""
    means = {
        name: sum(getattr(lost, name) for lost in losses) / len(losses)
        for name in ("underflow", "subnormal", "overflow", "negligible", "underflow_noise", "noise")
    }
    noise = means.pop("noise")
    sqnr_db = -10 * math.log10(noise) if noise else None
    swallowed = [lost.swallowed for lost in losses if lost.swallowed is not None]
    mean_swallowed = sum(swallowed) / len(swallowed) if swallowed else None
    return QuantizationLoss(**means, sqnr_db=sqnr_db, swallowed=mean_swallowed)


class LossScaleRange(NamedTuple):
    """The lowest and the highest power of two that would do."""

    least: float
    greatest: float


def loss_scales(numerics: Numerics) -> LossScaleRange | None:
    """Return the loss scales at which float16 would hold all measured gradients.

    At these no gradient of any snapshot overflows and no module's gradients lack range. The run's
    own scale is divided out.

    Returns:
        Their range; None where no scale would do, or no gradient is other than 0.
    """
    modules: dict[str, list[tuple[TensorStats, float]]] = defaultdict(list)
    for snapshot in numerics.probes:
        for stats in snapshot.measured:
            if stats.kind == "gradients" and stats.largest != 0:
                modules[stats.module].append((stats, snapshot.loss_scale or 1.0))
    fits = [k for k in _SCALE_EXPONENTS if all(_fits(found, k) for found in modules.values())]
    if not (fits and modules):
        return None
    return LossScaleRange(2.0 ** fits[0], 2.0 ** fits[-1])


def _fits(measured: Sequence[tuple[TensorStats, float]], power: int) -> bool:
    """Return whether float16 holds one module's gradients times 2**power.

    Args:
        measured: the gradients at each snapshot, with the loss scale in force.
        power: exponent of the scale that is tried.
    """
    vanishing = 0.0
    noise = 0.0
    for stats, scale in measured:
        factor = 2.0**power / scale
        # A single overflow skips a step, so it is not averaged over the snapshots as the rest is.
        if stats.not_finite or (stats.largest or 0.0) * factor >= FLOAT16.overflow:
            return False
        # Scales are powers of two, but a run may begin with any number: the nearest power then.
        shift = round(math.log2(factor))
        vanished_share, noise_share = _losses_below_range(stats.exponents, shift)
        vanishing += vanished_share / len(measured)
        noise += noise_share / len(measured)
    return vanishing < VANISHING_SHARE_LIMIT and noise < NOISE_SHARE_LIMIT


def _losses_below_range(exponents: Mapping[int, int], shift: int) -> tuple[float, float]:
    """Return what float16 loses of values under its least normal one.

    Only counts by exponent are known: values are taken for evenly spread between powers of two.

    Args:
        exponents: count of values by exponent.
        shift: added to the exponents.

    Returns:
        The share of values that become zero and are not negligible, and the energy that is lost,
        over that of all values.
    """
    values = sum(exponents.values())
    if not values:
        return 0.0, 0.0
    floor = max(exponents) - NEGLIGIBLE_EXPONENT_GAP
    zero = _LEAST_FLOAT16_EXPONENT - 1 - shift
    vanished = sum(n for e, n in exponents.items() if floor <= e < zero)
    energy = sum(n * _BIN_ENERGY * 4.0**e for e, n in exponents.items())
    # The variance of an error that is evenly spread over a step is the step squared, over 12.
    rounding_energy = 4.0 ** (_LEAST_FLOAT16_EXPONENT - shift) / 12
    small = {e: n for e, n in exponents.items() if e < FLOAT16.exponent - shift}
    # A value that becomes zero loses its own energy and no more.
    lost = sum(n * min(_BIN_ENERGY * 4.0**e, rounding_energy) for e, n in small.items())
    return vanished / values, lost / energy
