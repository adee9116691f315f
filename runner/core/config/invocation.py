"""Describe the command that a run's spec was composed from, and derive the run's labels from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.core.base.fmt import override_key, shorten_override
from runner.core.base.terminal import in_notebook, quote_command
from runner.core.config.schema import RunSpec


@dataclass(frozen=True)
class Invocation:
    """A command as one run sees it: options, overrides and, in a sweep, what differs between jobs.

    Attributes:
        choices: option chosen in each config group, for labels.
        overrides: what the user typed (or a sweep set) for this run.
        swept_overrides: those of `overrides` that differ between the jobs of the sweep.
        sweep: id of the sweep, None for a single run.
        config_dir: folder of the user's own configs.
        omitted_keys: keys that the sweep sets and that this job's precision does not take.
        caveat: sentence on how the job was changed to fit its precision.
        composed_config: the composed config with its interpolations unresolved, so that values of
            a checkpoint can still be merged into it; None where there is only the spec.
        given: keys in place of whose values a Python program gave objects, by the objects' roles.
        is_trusted: True if this user's commands composed all of the spec; False if a part comes
            from a checkpoint that is not signed with this user's key.
    """

    choices: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    swept_overrides: tuple[str, ...] = ()
    sweep: str | None = None
    config_dir: str | None = None
    omitted_keys: tuple[str, ...] = ()
    caveat: str = ""
    composed_config: Mapping[str, Any] | None = field(default=None, repr=False)
    given: Mapping[str, str] = field(default_factory=dict)
    is_trusted: bool = True

    @staticmethod
    def python_call(function: str, words: Sequence[str], given: Mapping[str, str]) -> str:
        """Return a call of the Python API as text.

        Args:
            function: of the package runner.
            words: overrides; those that stand for objects are left out, for they can be typed
                nowhere.
            given: keys of the objects by their roles.
        """
        typed = [word for word in words if override_key(word) not in given.values()]
        objects = "".join(f", {role}=..." for role in given)
        return f"runner.{function}({typed!r}{objects})"

    def command_text(self, words: Sequence[str] | None = None) -> str:
        """Return the command line, or the call of the Python API, that repeats this one run.

        Args:
            words: overrides of another run of this configuration; None takes this run's.
        """
        words = self.overrides if words is None else words
        if not self.given:
            return quote_command([*self._program, *words])
        return self.python_call("run", words, self.given)

    def resume_text(self, folder: object) -> str:
        """Return the command line, or the call of the Python API, that resumes a run's folder."""
        words = [f"checkpoint.resume={folder}"]
        if in_notebook():
            return self.python_call("run", words, self.given)
        return self.command_text(words)

    @property
    def command(self) -> list[str]:
        """Return the words of the command that repeats this one run."""
        return [*self._program, *self.overrides]

    @property
    def _program(self) -> list[str]:
        config_dir = ["--config-dir", self.config_dir] if self.config_dir else []
        return ["python", "-m", "runner", *config_dir]

    def option_name(self, group: str, node: Mapping[str, Any]) -> str:
        """Return the chosen option of a config group, or the last part of its node's target."""
        return self.choices.get(group) or str(node.get("_target_", "")).rpartition(".")[2]

    def overrides_key(self, key: str) -> bool:
        """Return whether an override sets this top-level key or a key under it."""
        keys = map(override_key, self.overrides)
        return any(each == key or each.startswith(f"{key}.") for each in keys)

    def label(self, spec: RunSpec) -> str:
        """Return a run's label.

        In a sweep it is the precision and the other swept overrides, else the precision, the model
        and the data.
        """
        return " ".join([self._precision_name(spec), *self._label_words(spec, "precision")])

    def settings(self, spec: RunSpec) -> list[str]:
        """Return the words of a run's label beside the precision and the seed."""
        return self._label_words(spec, "precision", "seed")

    def group_label(self, spec: RunSpec) -> str:
        """Return the label without the seed, which runs that differ only in their seed share."""
        return " ".join([self._precision_name(spec), *self.settings(spec)])

    def _precision_name(self, spec: RunSpec) -> str:
        return str(spec.precision.get("name", self.option_name("precision", spec.precision)))

    def _label_words(self, spec: RunSpec, *unnamed_keys: str) -> list[str]:
        if not self.sweep:
            return [self.option_name("model", spec.model), self.option_name("data", spec.data)]
        swept = (text for text in self.swept_overrides if override_key(text) not in unnamed_keys)
        return [*map(shorten_override, swept)]
