"""What looks at a run's numbers found: kept as numerics.json, and judged format by format."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runner.precision.emulation.formats import FORMATS
from runner.utils.errors import ConfigError
from runner.utils.files import write_text
from runner.utils.layout import NUMERICS

KINDS = ("activations", "weights", "gradients", "updates")
Sensitivity = Literal["range", "precision", "none"]
Worst = tuple[str, str, str, float]
"""(module, kind, what, share): what is overflow, underflow, swallowed or noise."""

VANISHED = 0.05
"""Share of a module's values that may become zero before a format lacks range."""
NOISE = 0.01
"""Share of a module's energy that rounding may be: 20 dB, an error of a tenth."""
SWALLOWED = 0.5
"""Share of a module's updates that storage may swallow."""
NEGLIGIBLE = 20
"""Powers of two below the largest value of a module and kind. What is smaller is taken for
float32's rounding error: 2**-24 in one operation, 4 bits more in a sum of some hundred terms."""


class QuantizationLoss(NamedTuple):
    """What one format does to a tensor's values that are not zero. Shares are 0 to 1. In the file a
    list in this order.

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
    def lacks(self) -> Sensitivity:
        """What activations, weights or gradients that lose this are short of. A noise that comes
        from values under the least normal one is a matter of range: more bits do not help it."""
        if self.overflow or self.vanishing >= VANISHED or self.underflow_noise >= NOISE:
            return "range"
        return "precision" if self.noise >= NOISE else "none"


@dataclass(frozen=True)
class TensorStats:
    """One kind of a module's numbers at one step.

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
    """The looks of a run, in order, and what it stores and computes in (names of torch's)."""

    every: int
    precision: str
    storage: str
    compute: str
    looks: Sequence[NumericsSnapshot]

    @property
    def computed_in(self) -> str:
        """The run's compute format; float16 for a wider one, which is asked what it would lose."""
        return self.compute if self.compute in FORMATS else "float16"

    @property
    def stored_in(self) -> str:
        """The run's storage format; bfloat16 for a wider one."""
        return self.storage if self.storage in FORMATS else "bfloat16"

    def worst(self, fmt: str, most: int, kinds: Sequence[str] = KINDS) -> list[Worst]:
        """Return what the format loses per module, as means over the snapshots.

        What overflows comes first, then the largest share. Modules without a loss are left out;
        `noise` is listed from NOISE on.

        Args:
            fmt: of those measured.
            most: how many.
            kinds: those of KINDS that the format would hold.

        Raises:
            ValueError: no such format was measured.
        """
        found = [
            (module, kind, what, share)
            for (module, kind), lost in self._means(fmt).items()
            if kind in kinds
            for what, share in _complaints(kind, lost)
        ]
        return sorted(found, key=lambda w: (w[2] != "overflow", -w[3]))[:most]

    def reasons(self, fmt: str, kinds: Sequence[str] = KINDS) -> list[Worst]:
        """Return those of `worst` that make the verdict of `sensitivity`, worst first.

        Raises:
            ValueError: no such format was measured.
        """
        lacks = self.sensitivity(fmt, kinds)
        means = self._means(fmt)
        found = self.worst(fmt, 4 * len(means), kinds)
        return [w for w in found if lacks != "none" and _lacks(w[1], means[w[0], w[1]]) == lacks]

    def sensitivity(self, fmt: str, kinds: Sequence[str] = KINDS) -> Sensitivity:
        """Return what the format lacks for this model, at the loss scale in force: "range" if
        activations, weights or gradients of a module overflow, vanish (VANISHED) or lose NOISE by
        becoming zero or subnormal; else "precision" if NOISE is passed or its updates are
        SWALLOWED, which matters where weights are stored in the format; else "none".

        Raises:
            ValueError: no such format was measured.
        """
        verdict: Sensitivity = "none"
        for (_, kind), lost in self._means(fmt).items():
            if kind not in kinds:
                continue
            lacks = _lacks(kind, lost)
            if lacks == "range":
                return "range"
            verdict = lacks if lacks != "none" else verdict
        return verdict

    def _means(self, fmt: str) -> dict[tuple[str, str], QuantizationLoss]:
        """Of each module and kind over the looks; noise as a share, too."""
        rows: dict[tuple[str, str], list[QuantizationLoss]] = defaultdict(list)
        for look in self.looks:
            for m in look.measured:
                if fmt not in m.formats:
                    raise ValueError(f"{fmt} was not measured. Known: {', '.join(m.formats)}.")
                rows[m.module, m.kind].append(self.lost(m, fmt))
        return {key: _mean(found) for key, found in rows.items()}

    def lost(self, m: TensorStats, fmt: str) -> QuantizationLoss:
        """Return what a format loses of a measured tensor.

        A value that is not finite has left the range of the run's own compute format, and with it
        that of every narrower one.
        """
        lost, kind = m.formats[fmt], FORMATS[fmt.removesuffix("_unscaled")]
        own = FORMATS[self.compute].largest if self.compute in FORMATS else math.inf
        if not m.not_finite or kind.largest > own:
            return lost
        return lost._replace(overflow=min(1.0, lost.overflow + m.not_finite))

    def write(self, path: Path) -> Path:
        """Write the file and return its path. Raises OSError: it cannot be written."""
        return write_text(path, json.dumps(asdict(self), allow_nan=False) + "\n")


def read(folder: Path) -> Numerics:
    """Read the numerics that a run left in its folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = folder / NUMERICS
    if not path.is_file():
        raise ConfigError(f"{path} is no file. Train with numerics.every=<steps> to have it.")
    try:
        content = json.loads(path.read_text())
        return Numerics(**{**content, "looks": [_look(look) for look in content["looks"]]})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged: {type(error).__name__}: {error}. Train with numerics.every=<steps>"
            " to have it anew."
        ) from error


def _look(content: Mapping[str, Any]) -> NumericsSnapshot:
    return NumericsSnapshot(**{**content, "measured": [_measured(m) for m in content["measured"]]})


def _measured(content: Mapping[str, Any]) -> TensorStats:
    exponents = {int(e): count for e, count in content["exponents"].items()}
    formats = {name: QuantizationLoss(*lost) for name, lost in content["formats"].items()}
    return TensorStats(**{**content, "exponents": exponents, "formats": formats})


def _lacks(kind: str, lost: QuantizationLoss) -> Sensitivity:
    """Return what one kind of a module's numbers is short of."""
    if kind != "updates":
        return lost.lacks
    return "precision" if (lost.swallowed or 0.0) >= SWALLOWED else "none"


def _complaints(kind: str, lost: QuantizationLoss) -> Iterator[tuple[str, float]]:
    if kind == "updates":
        found = {"swallowed": lost.swallowed or 0.0}
    else:
        found = {"overflow": lost.overflow, "underflow": lost.vanishing}
        if lost.noise >= NOISE:
            found["noise"] = min(lost.noise, 1.0)
    yield from ((what, share) for what, share in found.items() if share > 0)


def _mean(found: Sequence[QuantizationLoss]) -> QuantizationLoss:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    noise = mean([lost.noise for lost in found])
    swallowed = [lost.swallowed for lost in found if lost.swallowed is not None]
    return QuantizationLoss(
        mean([lost.underflow for lost in found]),
        mean([lost.subnormal for lost in found]),
        mean([lost.overflow for lost in found]),
        -10 * math.log10(noise) if noise else None,
        mean(swallowed) if swallowed else None,
        mean([lost.negligible for lost in found]),
        mean([lost.underflow_noise for lost in found]),
    )
