"""The sweeper of a sweep whose lists got longer, see sweep_extension."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from runner.config.overrides import override_key
from runner.sweeps.manifest import Manifest


@final
class ExtendedSweeper(BasicSweeper):
    """Hydra's own sweeper, with the jobs of a sweep's shorter lists first, in their order.

    The manifest in the sweep's folder says which lists it had before.
    """

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Return the overrides of all jobs in batches."""
        # Set by setup, which Hydra calls first.
        assert self.config is not None
        assert self.hydra_context is not None
        manifest = Manifest.read(Path(self.config.hydra.sweep.dir))
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        swept = {override.key_or_group for override in overrides if override.is_sweep_override()}
        numbers: dict[frozenset[str], int] = {}
        for words in manifest.earlier:
            parsed = parser.parse_overrides([*self._parse_config(), *words])
            for job in BasicSweeper.split_arguments(parsed, None)[0]:
                numbers.setdefault(_identity(job, swept), len(numbers))
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
        # Stable: new jobs stay in the order of the command.
        jobs.sort(key=lambda job: numbers.get(_identity(job, swept), len(numbers)))
        if max_batch_size is None:
            return [jobs]
        return [
            list(chunk) for chunk in BasicSweeper.split_overrides_to_chunks(jobs, max_batch_size)
        ]


def _identity(job: Sequence[str], swept: set[str]) -> frozenset[str]:
    """Return what tells one job from the others: its values of the keys that the sweep varies."""
    return frozenset(text for text in job if override_key(text) in swept)
