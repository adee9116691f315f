"""Search for the modules to keep out of a precision that fails, by trials.

One seed chooses the set of modules, other seeds verify it.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from time import perf_counter

import torch
from torch import nn

from runner.config.targets import build_group
from runner.modes.result import RunResult
from runner.precision.contract import Precision
from runner.sweeps.advisor.minimal_set import Modules, find_minimal_set
from runner.sweeps.advisor.request import AdviseRequest
from runner.sweeps.advisor.settings import AdviseSettings
from runner.sweeps.advisor.trials import Trials
from runner.sweeps.report.compare import BASELINE
from runner.sweeps.report.ranking import Advice, PrecisionVerdict, rank_precisions
from runner.sweeps.report.statistics import Verdict
from runner.utils.console import plain_console

_IGNORE_KEY = "precision.ignore_modules"
ACCEPTED_GAP_SHARE = 0.25
"""A set of modules is accepted if at most this share of the gap to float32's loss remains."""


class Float32ModuleSearch:
    """The search for modules that have to stay in float32.

    Args:
        request: the command.
        trials: runs the jobs.
        settings: set the length of a trial.
    """

    def __init__(self, request: AdviseRequest, trials: Trials, settings: AdviseSettings) -> None:
        self.request = request
        self.trials = trials
        self.settings = settings
        self.console = plain_console()
        self._longest_trial_seconds = 0.0

    def run(self, suspects: Mapping[str, Sequence[str]]) -> None:
        """Search for each precision that fails, the fastest one first, while there is time.

        Args:
            suspects: modules by dotted name for each precision, the most suspicious first.
        """
        advice = self._advice()
        tree = _module_tree(self.request)
        # Without a spread of float32's loss between seeds there is no gap to accept a set by.
        if len(advice.baseline_losses) < 2:
            self.console.print("no time to search for modules to keep out of what fails")
            return
        # The budget may end during any of the searches: the one that gains most comes first.
        for verdict in sorted(self._failing(advice), key=_expected_gain, reverse=True):
            self._search(verdict, advice, tree, suspects.get(verdict.group.precision, ()))

    def _search(
        self,
        verdict: PrecisionVerdict,
        advice: Advice,
        tree: Mapping[str, Sequence[str]],
        suspects: Sequence[str],
    ) -> None:
        """Search for the smallest set of modules for one precision, and verify it.

        Args:
            verdict: the verdict on the precision.
            advice: what the trials so far say.
            tree: children of each module by dotted name.
            suspects: modules by dotted name, the most suspicious first.
        """
        name = verdict.group.precision
        key = _exclusion_key(self.request.load_precision(name))
        seed = self.request.seed
        max_gap = self._max_gap(verdict, advice)
        base_loss = advice.baseline_losses[seed]
        # A precision that converts no module at all is float32: that set needs no trial.
        every_module = frozenset(tree[""]) if key == _IGNORE_KEY else None
        tried: dict[frozenset[str] | None, bool] = {every_module: True}

        def is_enough(modules: Modules) -> bool:
            chosen = frozenset(modules)
            if chosen not in tried:
                result = self._run_trial(name, key, modules, seed)
                gap = _gap(result, base_loss, advice.settings) if result else inf
                tried[chosen] = gap <= max_gap
            return tried[chosen]

        self.console.print(f"{name} fails: searching for modules to keep out of it")
        modules = find_minimal_set(tree, suspects, is_enough)
        if modules is None or frozenset(modules) == every_module:
            has_time = self.trials.remaining_seconds >= self._longest_trial_seconds
            limit = "" if has_time else " in the time that was left"
            self.console.print(f"{name}: no set of modules that was tried helps{limit}")
            return
        self._verify(name, key, modules)

    def _verify(self, name: str, key: str, modules: Modules) -> None:
        """Run trials of a set of modules with other seeds than the one that chose it."""
        override = _override(key, modules)
        self.console.print(f"{name}: {override} helps; verifying it with other seeds")
        # A set that was chosen by a seed's loss is biased towards that seed.
        first = self.request.seed + 1
        for seed in range(first, first + self.request.spec.advise.seeds):
            has_time = self.trials.remaining_seconds > self._longest_trial_seconds
            # float32 has no loss for the last seed, which is one after those of the rounds.
            if seed not in self._advice().baseline_losses and has_time:
                length = self.settings.length_overrides(BASELINE)
                self.trials.launch(self.request.trial_overrides(BASELINE, seed, *length))
            if self._run_trial(name, key, modules, seed) is None:
                break
        verified = f"{name} {override}"
        verdicts = self._advice().verdicts
        if any(verdict.name == verified and verdict.is_failing for verdict in verdicts):
            self.console.print(f"{verified}: with other seeds it does not help")

    def _failing(self, advice: Advice) -> Iterator[PrecisionVerdict]:
        """Yield verdicts on precisions that fail and can leave modules out.

        Precisions for which the user has named modules are not searched.
        """
        for verdict in advice.verdicts:
            name = verdict.group.precision
            if verdict.group.settings or not verdict.is_failing:
                continue
            key = _exclusion_key(self.request.load_precision(name))
            overrides = self.request.precision_overrides.get(name, ())
            if key and not any(word.startswith(key) for word in overrides):
                yield verdict

    def _run_trial(self, name: str, key: str, modules: Modules, seed: int) -> RunResult | None:
        """Return the result of one trial with the set, None if the budget has no time for it."""
        # The longest trial so far, not the mean: a trial that starts is not stopped by the budget.
        if self.trials.remaining_seconds < self._longest_trial_seconds:
            return None
        began = perf_counter()
        words = [*self.settings.length_overrides(name), _override(key, modules)]
        result = self.trials.launch(self.request.trial_overrides(name, seed, *words))
        self._longest_trial_seconds = max(self._longest_trial_seconds, perf_counter() - began)
        return result

    def _advice(self) -> Advice:
        """Return what the trials so far say."""
        return rank_precisions(self.trials.results(), self.settings)

    def _max_gap(self, verdict: PrecisionVerdict, advice: Advice) -> float:
        """Return the largest gap to float32's loss with which a set of modules is accepted.

        It is two standard deviations of float32's loss between seeds, or a share of the gap that
        the whole precision has, if that is larger.
        """
        # One trial decides, and seeds alone seldom put a loss further away than two deviations.
        margin = 2 * advice.baseline_spread
        if verdict.test is None or verdict.rating is not Verdict.WORSE:
            return margin
        return max(margin, ACCEPTED_GAP_SHARE * verdict.test.value)


def _gap(result: RunResult, base_loss: float, settings: AdviseSettings) -> float:
    """Return how far a trial's loss is above float32's, infinity if it did not finish."""
    loss = settings.judged_loss(result.metrics)
    if result.outcome != "finished" or loss is None:
        return inf
    return loss - base_loss


def _expected_gain(verdict: PrecisionVerdict) -> float:
    """Return a precision's speed over float32's, 0 if it is unknown."""
    ratio = verdict.comparison.speed_ratio
    return ratio.value if ratio else 0.0


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


def _module_tree(request: AdviseRequest) -> dict[str, list[str]]:
    """Return the children of every module by dotted name; the model's own name is empty."""
    node = request.spec.model
    # Only names are needed: on the meta device weights take no memory and no time.
    try:
        with torch.device("meta"):
            model: nn.Module = build_group("model", node)
    except (NotImplementedError, RuntimeError):
        # Its constructor reads values of tensors, which the meta device does not have.
        model = build_group("model", node)
    tree: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        # A child of the model itself has no dot before its name.
        tree[name] = [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
    return tree
