"""Search for the modules to keep out of a precision that fails, by trials.

One seed chooses the set of modules, other seeds verify it.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from runner.config.targets import build_group
from runner.precision.contract import Precision
from runner.sweeps.advisor.minimal_set import Modules, find_minimal_set
from runner.sweeps.advisor.remedy_trials import RemedyTrials
from runner.sweeps.advisor.request import AdviseRequest
from runner.sweeps.verdict.ranking import PrecisionVerdict

_IGNORE_KEY = "precision.ignore_modules"


class Float32ModuleSearch:
    """The search for modules that have to stay in float32.

    Args:
        remedies: runs the trials.
    """

    def __init__(self, remedies: RemedyTrials) -> None:
        self.remedies = remedies
        self.request = remedies.request
        self.console = remedies.console

    def run(self, suspects: Mapping[str, Sequence[str]]) -> None:
        """Search for each precision that fails, the fastest one first, while there is time.

        Args:
            suspects: modules by dotted name for each precision, the most suspicious first.
        """
        tree = _module_tree(self.request)
        # The budget may end during any of the searches: the one that gains most comes first.
        for verdict in sorted(self._failing(), key=_expected_gain, reverse=True):
            self._search(verdict, tree, suspects.get(verdict.group.precision, ()))

    def _search(
        self,
        verdict: PrecisionVerdict,
        tree: Mapping[str, Sequence[str]],
        suspects: Sequence[str],
    ) -> None:
        """Search for the smallest set of modules for one precision, and verify it.

        Args:
            verdict: the verdict on the precision.
            tree: children of each module by dotted name.
            suspects: modules by dotted name, the most suspicious first.
        """
        name = verdict.group.precision
        key = _exclusion_key(self.request.load_precision(name))
        max_gap = self.remedies.max_gap(verdict)
        # A precision that converts no module at all is float32: that set needs no trial.
        every_module = frozenset(tree[""]) if key == _IGNORE_KEY else None
        tried: dict[frozenset[str] | None, bool] = {every_module: True}

        def is_enough(modules: Modules) -> bool:
            chosen = frozenset(modules)
            if chosen not in tried:
                override = _override(key, modules)
                tried[chosen] = self.remedies.is_enough(verdict, override, max_gap)
            return tried[chosen]

        self.console.print(f"{name} fails: searching for modules to keep out of it")
        modules = find_minimal_set(tree, suspects, is_enough)
        if modules is None or frozenset(modules) == every_module:
            limit = "" if self.remedies.has_time else " in the time that was left"
            self.console.print(f"{name}: no set of modules that was tried helps{limit}")
            return
        self.remedies.verify(name, _override(key, modules))

    def _failing(self) -> Iterator[PrecisionVerdict]:
        """Yield verdicts on precisions that fail and can leave modules out.

        Precisions for which the user has named modules are not searched.
        """
        for verdict in self.remedies.failing():
            name = verdict.group.precision
            key = _exclusion_key(self.request.load_precision(name))
            overrides = self.request.precision_overrides.get(name, ())
            if key and not any(word.startswith(key) for word in overrides):
                yield verdict


def _expected_gain(verdict: PrecisionVerdict) -> float:
    """Return a precision's speed over the baseline's, 0 if it is unknown."""
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
