"""Hold what was measured of a run's numbers, write it as numerics.json, and judge formats by it.

A snapshot holds the measurements of one optimizer step; the file calls the snapshots `probes`.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from runner.precision.emulation.formats import FORMATS
from runner.utils.errors import ConfigError
from runner.utils.files import write_text
from runner.utils.layout import NUMERICS

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
    def computed_in(self) -> str:
        """Return the run's compute format; float16 in place of one that is not in FORMATS."""
        return self.compute if self.compute in FORMATS else "float16"

    @property
    def stored_in(self) -> str:
        """Return the run's storage format; bfloat16 in place of one that is not in FORMATS."""
        return self.storage if self.storage in FORMATS else "bfloat16"

    def worst(
        self, fmt: str, most: int | None = None, kinds: Sequence[str] = KINDS
    ) -> list[Complaint]:
        """Return what the format loses per module, as means over the snapshots.

        What overflows comes first, then the largest share. Modules without a loss are left out;
        `noise` is listed from NOISE_SHARE_LIMIT on.

        Args:
            fmt: of those measured.
            most: how many; None for all.
            kinds: those of KINDS that the format would hold.

        Raises:
            ValueError: no such format was measured.
        """
        complaints: list[Complaint] = []
        for (module, kind), lost in self._mean_losses(fmt).items():
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

    def reasons(self, fmt: str, kinds: Sequence[str] = KINDS) -> list[Complaint]:
        """Return those of `worst` that make the verdict of `sensitivity`, worst first.

        Raises:
            ValueError: no such format was measured.
        """
        verdict = self.sensitivity(fmt, kinds)
        if verdict == "none":
            return []
        means = self._mean_losses(fmt)
        everything = self.worst(fmt, kinds=kinds)
        return [row for row in everything if _lacks(row[1], means[row[0], row[1]]) == verdict]

    def sensitivity(self, fmt: str, kinds: Sequence[str] = KINDS) -> Sensitivity:
        """Return what the format lacks for this model, at the loss scale in force.

        "range": activations, weights or gradients of a module overflow, the share that vanishes
        reaches VANISHING_SHARE_LIMIT, or the noise of values that become zero or subnormal reaches
        NOISE_SHARE_LIMIT. Else "precision": the noise reaches NOISE_SHARE_LIMIT, or the share of a
        module's updates that is swallowed reaches SWALLOWED_SHARE_LIMIT, which matters where
        weights are stored in the format. Else "none".

        Raises:
            ValueError: no such format was measured.
        """
        verdict: Sensitivity = "none"
        for (_, kind), lost in self._mean_losses(fmt).items():
            if kind not in kinds:
                continue
            lacks = _lacks(kind, lost)
            # One module that lacks range decides, whatever the others lack.
            if lacks == "range":
                return "range"
            if lacks != "none":
                verdict = lacks
        return verdict

    def _mean_losses(self, fmt: str) -> dict[tuple[str, str], QuantizationLoss]:
        """Return the mean loss of each module and kind over the snapshots."""
        rows: dict[tuple[str, str], list[QuantizationLoss]] = defaultdict(list)
        for snapshot in self.probes:
            for stats in snapshot.measured:
                if fmt not in stats.formats:
                    known = ", ".join(stats.formats)
                    raise ValueError(f"{fmt} was not measured. Known: {known}.")
                rows[stats.module, stats.kind].append(self.quantization_loss(stats, fmt))
        return {key: _mean(losses) for key, losses in rows.items()}

    def quantization_loss(self, stats: TensorStats, fmt: str) -> QuantizationLoss:
        """Return what a format loses of a measured tensor.

        A value that is not finite has left the range of the run's own compute format, and with it
        that of every narrower one.
        """
        lost = stats.formats[fmt]
        largest = FORMATS[fmt.removesuffix("_unscaled")].largest
        # A run in float32 has left float32's range, and so that of every format here.
        own_largest = FORMATS[self.compute].largest if self.compute in FORMATS else math.inf
        if not stats.not_finite or largest > own_largest:
            return lost
        return lost._replace(overflow=min(1.0, lost.overflow + stats.not_finite))

    def write(self, path: Path) -> Path:
        """Write the file and return its path. Raises OSError: it cannot be written."""
        return write_text(path, json.dumps(asdict(self), allow_nan=False) + "\n")


def read(folder: Path) -> Numerics:
    """Read the numerics.json in a run's folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = folder / NUMERICS
    if not path.is_file():
        raise ConfigError(f"{path} is no file. Train with numerics.every=<steps> to have it.")
    try:
        content = json.loads(path.read_text())
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
            f"{path} is damaged: {type(error).__name__}: {error}. Train with numerics.every=<steps>"
            " to have it anew."
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
