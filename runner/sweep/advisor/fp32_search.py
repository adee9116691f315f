"""What to keep out of a precision that fails, found by trials and verified by other seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from time import perf_counter

import torch
from torch import nn

from runner.config.targets import build_group
from runner.modes.result import RunResult
from runner.precision.precision import Precision
from runner.precision.registry import load_precision
from runner.sweep.advisor.minimal_set import Modules, smallest_set
from runner.sweep.advisor.request import AdviseRequest
from runner.sweep.advisor.trials import Trials
from runner.sweep.report.compare import BASE
from runner.sweep.report.ranking import Advice, PrecisionVerdict
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.console import plain_console

_IGNORE = "precision.ignore_modules"
CLOSED = 0.25
"""A set that leaves so much of the gap to float32, or less, heals."""


class Float32ModuleSearch:
    """The search for islands.

    Args:
        asked: the command.
        trials: where jobs run.
        words: overrides that set the length of a precision's trial.
        advice: on what the trials so far say.
    """

    def __init__(
        self,
        asked: AdviseRequest,
        trials: Trials,
        words: Callable[[str], Sequence[str]],
        advice: Callable[[], Advice],
    ) -> None:
        self.asked, self.trials, self.words, self.advice = asked, trials, words, advice
        self.console, self.took = plain_console(), 0.0

    def run(self, suspects: Mapping[str, Sequence[str]]) -> None:
        """Each precision that fails, the one that promises most first, while there is time.

        Args:
            suspects: of each, modules by dotted name, the most suspicious first.
        """
        advice = self.advice()
        tree = _tree(self.asked)
        if isnan(advice.spread):
            self.console.print("no time to look for modules that heal what fails")
            return
        for line in sorted(self._failing(advice), key=_promise, reverse=True):
            self._heal(line, advice, tree, suspects.get(line.group.precision, ()))

    def _heal(
        self,
        line: PrecisionVerdict,
        advice: Advice,
        tree: Mapping[str, Sequence[str]],
        suspects: Sequence[str],
    ) -> None:
        name, key = line.group.precision, _key(line.group.precision)
        allowed = self._allowed(line, advice)
        base = self._base()[self.asked.seed]
        # Without any module it would convert nothing: what it is then needs no trial.
        all_out = frozenset(tree[""]) if key == _IGNORE else None
        tried: dict[frozenset[str] | None, bool] = {all_out: True}

        def heals(found: Modules) -> bool:
            if frozenset(found) not in tried:
                result = self._try(name, key, found, self.asked.seed)
                gap = _gap(result, base) if result else float("inf")
                tried[frozenset(found)] = gap <= allowed
            return tried[frozenset(found)]

        self.console.print(f"{name} fails: looking for modules to keep out of it")
        found = smallest_set(tree, suspects, heals)
        if found is None or frozenset(found) == all_out:
            late = " in the time that there was" if self.trials.left < self.took else ""
            self.console.print(f"{name}: nothing that was tried heals it{late}")
            return
        self.console.print(f"{name}: {_word(key, found)} heals it; verifying")
        first, count = self.asked.seed, self.asked.spec.advise.seeds
        for seed in range(first + 1, first + count + 1):  # the first one has chosen the set
            if seed not in self._base() and self.trials.left > self.took:
                self.trials.launch([self.asked.trial(BASE, seed, *self.words(BASE))])
            if self._try(name, key, found, seed) is None:
                break
        healed = f"{name} {_word(key, found)}"
        if any(one.name == healed and one.failing for one in self.advice().lines):
            self.console.print(f"{healed}: other seeds say that it does not heal it")

    def _failing(self, advice: Advice) -> Iterator[PrecisionVerdict]:
        """Precisions whose numbers fail, and that can leave modules out, as nobody has said yet."""
        for line in advice.lines:
            name = line.group.precision
            key = "" if line.group.settings or not line.failing else _key(name)
            if key and not any(word.startswith(key) for word in self.asked.own.get(name, ())):
                yield line

    def _try(self, name: str, key: str, found: Modules, seed: int) -> RunResult | None:
        """One trial with the set; None where the budget has no time for it."""
        if self.trials.left < self.took:
            return None
        began = perf_counter()
        trial = self.asked.trial(name, seed, *self.words(name), _word(key, found))
        result = self.trials.launch([trial])[0]
        self.took = max(self.took, perf_counter() - began)
        return result

    def _base(self) -> dict[int | None, float]:
        """Float32's losses by seed."""
        found = (r for r in self.trials.results() if r.group == BASE and r.outcome == "finished")
        return {r.seed: r.metrics[VAL_LOSS] for r in found}

    def _allowed(self, line: PrecisionVerdict, advice: Advice) -> float:
        """Gap of one seed that counts as healed."""
        margin = 2 * advice.spread
        if line.judged is None:
            return margin
        return max(margin, CLOSED * line.judged.gap) if line.outcome == "worse" else margin


def _gap(result: RunResult, base: float) -> float:
    loss = result.metrics.get(VAL_LOSS)
    if result.outcome != "finished" or loss is None:
        return float("inf")
    return loss - base


def _promise(line: PrecisionVerdict) -> float:
    return line.beside.speed.value if line.beside and line.beside.speed else 0.0


def _key(precision: str) -> str:
    """What leaves modules out of a precision; empty where nothing does."""
    policy: Precision = load_precision(precision)
    if policy.freezes:  # what it freezes is no matter of its numbers
        return ""
    if hasattr(policy, "ignore_modules"):
        return _IGNORE
    return "precision.keep_fp32" if policy.compute.itemsize < 4 else ""


def _word(key: str, found: Modules) -> str:
    """An override; names that YAML or Hydra would read as numbers are quoted."""
    names = (name if name.replace(".", "_").isidentifier() else f"'{name}'" for name in found)
    return f"{key}=[{','.join(names)}]"


def _tree(asked: AdviseRequest) -> dict[str, list[str]]:
    """The children of every module, by dotted name; the model's own is empty."""
    node = asked.spec.model
    try:
        with torch.device("meta"):
            model: nn.Module = build_group("model", node)
    except (NotImplementedError, RuntimeError):  # its code reads values
        model = build_group("model", node)
    tree: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        tree[name] = [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
    return tree
