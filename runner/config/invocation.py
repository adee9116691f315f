"""Where a spec came from, and what runs are called after it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runner.config.schema import RunSpec
from runner.utils.formatting import shorten_override


@dataclass(frozen=True)
class Invocation:
    """Where a spec came from.

    Attributes:
        choices: option chosen in each config group, for labels.
        overrides: what the user typed (or a sweep set) for this run.
        swept: those of them that differ between the jobs of the sweep.
        sweep: id of the sweep, None for a single run.
        config_dir: folder of the user's own configs.
        left_out: keys that the sweep sets and that this job's precision does not take.
        composed: the config with its interpolations, which a checkpoint's values may have yet to
            be put under; None where there is only the spec.
        own: this user's commands composed all of the spec; False where a part comes from a
            checkpoint that this user's key has not signed.
    """

    choices: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    swept: tuple[str, ...] = ()
    sweep: str | None = None
    config_dir: str | None = None
    left_out: tuple[str, ...] = ()
    composed: Mapping[str, Any] | None = field(default=None, repr=False)
    own: bool = True

    @property
    def command(self) -> list[str]:
        """Words of the command that does this one run again."""
        own = ["--config-dir", self.config_dir] if self.config_dir else []
        return ["python", "-m", "runner", *own, *self.overrides]

    def resuming(self, folder: object) -> list[str]:
        """Words of the command that goes on with the run in a folder."""
        own = ["--config-dir", self.config_dir] if self.config_dir else []
        return ["python", "-m", "runner", *own, f"checkpoint.resume={folder}"]

    def chosen(self, group: str, node: dict[str, Any]) -> str:
        """What a group is called: its option, or the last part of its target."""
        return self.choices.get(group) or str(node.get("_target_", "")).rpartition(".")[2]

    def touches(self, key: str) -> bool:
        """Whether an override sets this top-level key or anything under it."""
        heads = (text.lstrip("+~").partition("=")[0] for text in self.overrides)
        return any(head == key or head.startswith(f"{key}.") for head in heads)

    def label(self, spec: RunSpec) -> str:
        """What a run is called: in a sweep what was swept, else precision, model and data."""
        name = str(spec.precision.get("name", self.chosen("precision", spec.precision)))
        if self.sweep:
            others = (shorten_override(t) for t in self.swept if not t.startswith("precision="))
            return " ".join([name, *others])
        return f"{name} {self.chosen('model', spec.model)} {self.chosen('data', spec.data)}"

    def group(self, spec: RunSpec) -> str:
        """The label without the seed: what runs share that differ in their seeds alone."""
        unseeded = tuple(text for text in self.swept if not text.startswith("seed="))
        return replace(self, swept=unseeded).label(spec)
