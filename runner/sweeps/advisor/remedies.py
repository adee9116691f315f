"""Say why a precision fails, and search by trials for what heals it.

float32's numbers say what a narrower precision lacks, and in which modules. A remedy is an
override: a rule of precision.update, or the smallest set of modules to keep out of the precision.
One seed chooses a remedy, other seeds verify it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from runner.core import Precision, RunResult, targets
from runner.diagnostics.numerics import Numerics
from runner.output.console import plain_console
from runner.sweeps.advisor.trials import Trials
from runner.sweeps.verdict.ranking import PrecisionVerdict, unhealed_verdicts
from runner.sweeps.verdict.statistics import Verdict

FLOAT32 = "32-true"
"""The precision whose numbers explain the others, whatever the baseline is."""
MAX_SUSPECTS_PER_FORMAT = 16
"""Number of modules that each format of a precision adds to the suspects at most."""
_REASON_TEXTS = {
    "overflow": "overflow",
    "underflow": "become zero",
    "noise": "are rounding error",
    "swallowed": "are swallowed",
}
ACCEPTED_GAP_SHARE = 0.25
"""A remedy is accepted if at most this share of the gap to the baseline's loss remains."""
RULES_BY_BYTES = ("stochastic_rounding", "kahan", "remainders", "master_weights")
"""Rules that keep updates, the one of the fewest bytes per weight first; with AdamW 6, 8, 12 and 14
(bench/results/update_rules.md)."""
_IGNORE_KEY = "precision.ignore_modules"
Modules = tuple[str, ...]
"""Dotted names of modules, which are left out of a precision with all modules inside them."""


@dataclass(frozen=True)
class Diagnosis:
    """What float32's numbers say of a precision that fails.

    Attributes:
        finding: the first format that lacks range or precision, as a clause.
        suspects: modules that the precision harms most, by dotted name, the worst first.
        loses_updates: it rounds away updates that float32's weights keep.
    """

    finding: str
    suspects: Sequence[str]
    loses_updates: bool


def diagnose(numbers: Numerics, precision: Precision) -> Diagnosis:
    """Return what a precision lacks.

    Args:
        numbers: measured in a run with float32.
        precision: narrower than float32.
    """
    finding = f"in every module {FLOAT32}'s numbers other than 0 fit its formats"
    for fmt, kinds in precision.formats.items():
        shortage = numbers.sensitivity(fmt, kinds)
        if shortage != "none":
            finding = f"short of {fmt}'s {shortage}"
            # One reason: the clause is a cell of the report's table.
            for module, kind, reason, share in numbers.reasons(fmt, kinds)[:1]:
                finding += f": in {module} {share:.0%} of {kind} {_REASON_TEXTS[reason]}"
            break
    # A dict is a set that keeps the order: several formats may name one module.
    suspects: dict[str, None] = {}
    for fmt, kinds in precision.formats.items():
        for module, *_ in numbers.worst(fmt, MAX_SUSPECTS_PER_FORMAT, kinds):
            # A name in parentheses is the model as a whole.
            if not module.startswith("("):
                suspects[module] = None
    stored = [fmt for fmt, kinds in precision.formats.items() if "updates" in kinds]
    loses_updates = any(numbers.sensitivity(fmt, ("updates",)) != "none" for fmt in stored)
    return Diagnosis(finding, [*suspects], loses_updates)


@dataclass(eq=False)
class RemedySearch:
    """The search by trials for what heals the precisions that fail.

    Args:
        trials: runs the jobs.
        diagnoses: of each precision that failed; empty if they are not known.
    """

    trials: Trials
    diagnoses: Mapping[str, Diagnosis]

    def __post_init__(self) -> None:
        self.console = plain_console()
        self.command = self.trials.command
        self._longest_trial_seconds = 0.0

    def search_update_rules(self) -> None:
        """Try the rules for each precision that fails and loses updates, until one helps."""
        for verdict in unhealed_verdicts(self.trials.advice().verdicts):
            name = verdict.group.precision
            loses_updates = name in self.diagnoses and self.diagnoses[name].loses_updates
            if not loses_updates or not self.command.takes_update_rule(name):
                continue
            self.console.print(f"{name} fails: searching for a rule that keeps its updates")
            max_gap = self._max_gap(verdict)
            overrides = (f"precision.update={rule}" for rule in RULES_BY_BYTES)
            helps = (each for each in overrides if self._is_enough(verdict, each, max_gap))
            remedy = next(helps, None)
            if remedy is not None:
                self._verify(name, remedy)
            else:
                self.console.print(f"{name}: no rule of precision.update helps{self._limit}")

    def search_fp32_modules(self) -> None:
        """Search for the modules that have to stay in float32, for each precision that fails.

        Precisions for which the user has named modules are not searched.
        """
        node = self.command.spec.model
        # Only names are needed: on the meta device weights take no memory and no time.
        try:
            with torch.device("meta"):
                model: nn.Module = targets.build_group("model", node)
        except (NotImplementedError, RuntimeError):
            # Its constructor reads values of tensors, which the meta device does not have.
            model = targets.build_group("model", node)
        tree: dict[str, list[str]] = {}
        for name, module in model.named_modules():
            # A child of the model itself has no dot before its name.
            tree[name] = [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]

        def gain(verdict: PrecisionVerdict) -> float:
            ratio = verdict.comparison.speed_ratio
            return ratio.value if ratio else 0.0

        failing = unhealed_verdicts(self.trials.advice().verdicts)
        # The budget may end during any of the searches: the fastest precision comes first.
        for verdict in sorted(failing, key=gain, reverse=True):
            name = verdict.group.precision
            if verdict.rating is Verdict.STALLED:
                continue  # its loss is good: only a rule of precision.update keeps its updates
            key = _exclusion_key(self.command.load_precision(name))
            overrides = self.trials.request.overrides.get(name, ())
            if key and not any(word.startswith(key) for word in overrides):
                self._search_modules(verdict, key, tree)

    def _search_modules(
        self, verdict: PrecisionVerdict, key: str, tree: Mapping[str, Sequence[str]]
    ) -> None:
        """Search for the smallest set of modules for one precision, and verify it.

        Args:
            verdict: the verdict on the precision.
            key: leaves modules out of the precision.
            tree: children of each module by dotted name.
        """
        name = verdict.group.precision
        suspects = self.diagnoses[name].suspects if name in self.diagnoses else ()
        max_gap = self._max_gap(verdict)
        # A precision that converts no module at all is float32: that set needs no trial.
        every_module = frozenset(tree[""]) if key == _IGNORE_KEY else None
        tried: dict[frozenset[str] | None, bool] = {every_module: True}

        def is_enough(modules: Modules) -> bool:
            chosen = frozenset(modules)
            if chosen not in tried:
                tried[chosen] = self._is_enough(verdict, _override(key, modules), max_gap)
            return tried[chosen]

        self.console.print(f"{name} fails: searching for modules to keep out of it")
        modules = find_minimal_set(tree, suspects, is_enough)
        if modules is None or frozenset(modules) == every_module:
            self.console.print(f"{name}: no set of modules that was tried helps{self._limit}")
            return
        self._verify(name, _override(key, modules))

    @property
    def _has_time(self) -> bool:
        # The longest trial so far, not the mean: a trial that starts is not stopped by the budget.
        return self.trials.remaining_seconds >= self._longest_trial_seconds

    @property
    def _limit(self) -> str:
        return "" if self._has_time else " in the time that was left"

    def _is_enough(self, verdict: PrecisionVerdict, override: str, max_gap: float) -> bool:
        """Return whether the first seed's loss with an override is near enough to the baseline's.

        Args:
            verdict: on the precision without the override.
            override: the remedy.
            max_gap: see _max_gap().
        """
        (seed,) = self.command.trial_seeds(1)
        result = self._run_trial(verdict.group.precision, seed, override)
        loss = self.trials.request.judged_loss(result.metrics) if result else None
        if not result or result.outcome != "finished" or loss is None:
            return False
        return loss - self.trials.advice().baseline_losses[seed] <= max_gap

    def _max_gap(self, verdict: PrecisionVerdict) -> float:
        """Return the largest gap to the baseline's loss with which a remedy is accepted.

        It is advise.max_gap, or two standard deviations of the baseline's loss between seeds, or a
        share of the gap that the precision has without a remedy, if that is larger.
        """
        margin = self.trials.request.max_gap
        if margin is None:
            # One trial decides, and seeds alone seldom put a loss further away than two deviations.
            margin = 2 * self.trials.advice().baseline_spread
        if not verdict.test or verdict.rating is not Verdict.WORSE:
            return margin
        return max(margin, ACCEPTED_GAP_SHARE * verdict.test.value)

    def _run_trial(self, name: str, seed: int, *remedy: str) -> RunResult | None:
        """Return the result of one trial, None if the budget has no time for it.

        Args:
            name: of the precision.
            seed: the trial's.
            remedy: the override to try, if any.
        """
        if not self._has_time:
            return None
        began = perf_counter()
        result = self.trials.run(name, seed, *remedy)
        self._longest_trial_seconds = max(self._longest_trial_seconds, perf_counter() - began)
        return result

    def _verify(self, name: str, override: str) -> None:
        """Run trials of a remedy with other seeds than the one that chose it.

        Args:
            name: of the precision.
            override: the remedy.
        """
        self.console.print(f"{name}: {override} helps; verifying it with other seeds")
        # A remedy that was chosen by a seed's loss is biased towards that seed.
        request = self.trials.request
        for seed in self.command.trial_seeds(request.seeds + 1)[1:]:
            # The baseline has no loss for the last seed, which is one after those of the rounds.
            if seed not in self.trials.advice().baseline_losses:
                self._run_trial(request.baseline, seed)
            if not self._run_trial(name, seed, override):
                break
        verified = f"{name} {override}"
        if any(one.name == verified and one.is_failing for one in self.trials.advice().verdicts):
            self.console.print(f"{verified}: with other seeds it does not help")


def _exclusion_key(precision: Precision) -> str:
    """Return the key that leaves modules out of a precision, empty if there is none."""
    if precision.freezes:
        # Frozen weights stay quantized: float32 modules would not train either.
        return ""
    if precision.converts_layers:
        return _IGNORE_KEY
    # What computes in 4 bytes has nothing to gain from float32.
    return "precision.keep_fp32" if precision.compute.itemsize < 4 else ""


def _override(key: str, modules: Modules) -> str:
    """Return the override that leaves modules out."""
    names = []
    for name in modules:
        # YAML or Hydra would read names such as `0` as numbers.
        is_plain = name.replace(".", "_").isidentifier()
        names.append(name if is_plain else f"'{name}'")
    return f"{key}=[{','.join(names)}]"


def find_minimal_set(
    tree: Mapping[str, Sequence[str]], suspects: Sequence[str], is_enough: Callable[[Modules], bool]
) -> Modules | None:
    """Return a set of modules that is enough, and of which none can be left out or narrowed.

    First the most suspicious modules are tried alone, then all modules together. From the first
    set that is enough, one module after another is left out, the least suspicious first; then
    modules are replaced by their parts. Another set of the same size may be enough as well.

    Args:
        tree: the children of each module by dotted name; the model's own name is empty.
        suspects: names, the most suspicious first; modules that are not among them come last.
        is_enough: returns whether a set is; False once nothing more may be tried.

    Returns:
        None if not even all modules together are enough.
    """

    def suspicion(name: str) -> int:
        """Return the place of the most suspicious module in a module, 0 the highest."""
        inside = (i for i, each in enumerate(suspects) if f"{each}.".startswith(f"{name}."))
        return next(inside, len(suspects))

    def leave_out(modules: Modules) -> Modules:
        """Return the set without the modules that can be left out one after another."""
        # Zeller and Hildebrandt's ddmin ("Simplifying and Isolating Failure-Inducing Input", 2002),
        # one module at a time. The least suspicious first, which can most probably be left out.
        for name in sorted(modules, key=suspicion, reverse=True):
            fewer = tuple(other for other in modules if other != name)
            # The empty set is the precision itself, which fails.
            if fewer and is_enough(fewer):
                modules = fewer
        return modules

    def narrower(modules: Modules) -> Iterator[Modules]:
        """Yield the sets with one module replaced by few of its parts that are enough."""
        for name in modules:
            others = tuple(other for other in modules if other != name)
            parts = sorted(tree.get(name, ()), key=suspicion)
            # The two most suspicious parts are tried alone; a single part is tried as all parts.
            alone = parts[:2] if len(parts) > 1 else []
            yield from filter(is_enough, ((*others, part) for part in alone))
            # Where the module's own arithmetic needs float32, even all parts are not enough.
            if parts and is_enough((*others, *parts)):
                yield leave_out((*others, *parts))

    # One, two and four suspects, then everything. Each set is a trial: a right suspicion is
    # confirmed by the first, and a wrong one costs three before the search starts from all modules.
    starts = [tuple(suspects[:n]) for n in (1, 2, 4) if n <= len(suspects)]
    starts.append(tuple(sorted(tree[""], key=suspicion)))
    enough = next(filter(is_enough, starts), None)
    # One level of the tree at a time: large modules that can be left out are never taken apart, and
    # trials are spent below the others only.
    smaller = leave_out(enough) if enough else None
    while smaller:
        enough = smaller
        smaller = next(narrower(enough), None)
    return enough
