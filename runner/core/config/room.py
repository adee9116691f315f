"""A room adds sections of the schema, modes, commands and callbacks to a run.

`runner/rooms.py` lists the rooms. This module knows none of them: the command line and the Python
API install that list once in a process, before they read a config.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from runner.core.config.command import Command

if TYPE_CHECKING:
    from runner.core.config.schema import RunSpec
    from runner.core.loop.callback import RunCallback
    from runner.core.loop.strategy import Strategy
    from runner.core.loop.train_state import TrainState
    from runner.core.record.checkpoint_file import LoadedCheckpoint
    from runner.core.run.run_context import PlannedRun, RunContext, RunOutcome, RunWatch
    from runner.core.run.run_result import RunResult


class Mode:
    """What `mode=<name>` does with a spec.

    A subclass sets what its mode needs, and imports what runs it when it is called: the command
    line reads modes before torch is imported.

    Attributes:
        name: as it is typed.
        trains: reads training data, changes weights, and can be resumed.
        adapts: adds a new adapter to the model; other modes load a run's.
        is_recorded: is a run of the store, with metrics and a result.
        takes_processes: several processes may share it.
        needs_data: reads the data sets; else the shapes of data.meta are enough.
        takes_checkpoint: loads what checkpoint= names.
        reads_training_data: reads the training set, not only those that are evaluated.
        failure_status: exit status of a command that fails, but for what was typed.
        chooses_jobs: is a sweep whose jobs are chosen as results come in.
    """

    name: str
    trains: bool = False
    adapts: bool = False
    is_recorded: bool = False
    takes_processes: bool = False
    needs_data: bool = True
    takes_checkpoint: bool = False
    reads_training_data: bool = True
    failure_status: int = 1
    chooses_jobs: bool = False

    @staticmethod
    def all() -> "dict[str, Mode]":
        """Return the modes of all rooms by their names."""
        return {mode.name: mode for room in Room.installed for mode in room.modes}

    @staticmethod
    def named(name: str) -> "Mode":
        """Return a mode; one that needs nothing for a name that no room has, which
        RunSpec.problems reports."""
        return Mode.all().get(name, Mode())

    def key_problems(self, spec: "RunSpec") -> Iterator[str]:
        """Yield a message for each key of this mode that the spec, of any mode, uses wrongly."""
        yield from ()

    def plan(
        self, plan: "PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> "PlannedRun":
        """Return what to run, completed by what the spec names: a checkpoint, another run.

        Args:
            plan: this command's own run.
            say: prints a line.
            strategy: by which the processes of the run agree.

        Raises:
            ConfigError: the spec names what cannot be used.
        """
        return plan

    def run(self, context: "RunContext", saved: "LoadedCheckpoint | None") -> "RunOutcome | None":
        """Run a spec.

        Args:
            context: the parts of the run.
            saved: the checkpoint that the plan found.

        Returns:
            The outcome; None of a mode that is not recorded.
        """
        raise NotImplementedError

    def records_sweep(self, config: Any) -> bool:
        """Return whether a sweep of a composed config is a run of the store."""
        return self.is_recorded or self.chooses_jobs

    def exit_status(self, result: "RunResult") -> int:
        """Return the exit status of a command whose run finished with a result."""
        return 0


@dataclass(frozen=True)
class Room:
    """What a room adds to a run.

    Attributes:
        sections: top-level keys of the schema, each with a dataclass of keys, or the meaning of a
            single value, a text that is null by default.
        modes: in the order in which they are listed.
        commands: other than a run.
        problems: yields what cannot run of a spec, all at once.
        callbacks: yields callbacks of a training, of the run and its state, which may also be given
            hooks of its steps (`state.hooks`).
        watch: makes the RunWatch of a run of any mode.
        parts: builds the object that a run has of a group of the spec, by the group; of the spec,
            the strategy and the torch device.
        check: raises ConfigError for what would fail later, once the strategy is known.
        sweep_answer: returns what the results of a sweep's jobs say, as an Answer of
            runner.sweeps.verdict; None for jobs that another room answers for.
    """

    installed: ClassVar[list["Room"]] = []
    """The rooms that this process knows."""

    sections: Mapping[str, type | str] = field(default_factory=dict)
    modes: Sequence[Mode] = ()
    commands: Sequence[Command] = ()
    problems: Callable[["RunSpec"], Iterable[str]] = lambda spec: ()
    callbacks: Callable[["RunContext", "TrainState"], Iterable["RunCallback"]] = lambda *_: ()
    watch: Callable[["RunContext"], "RunWatch"] | None = None
    parts: Mapping[str, Callable[["RunSpec", "Strategy", Any], Any]] = field(default_factory=dict)
    check: Callable[["RunSpec", "Strategy"], None] = lambda spec, strategy: None
    sweep_answer: Callable[[Sequence["RunResult"]], Any] = lambda results: None

    @classmethod
    def install(cls, rooms: Sequence["Room"]) -> None:
        """Have this process know the rooms, in place of those that it knew."""
        cls.installed[:] = rooms

    @classmethod
    def all_commands(cls) -> dict[str, Command]:
        """Return the commands of all rooms by their names, sorted by name."""
        commands = {command.name: command for room in cls.installed for command in room.commands}
        return dict(sorted(commands.items()))

    @classmethod
    def all_sections(cls) -> dict[str, type | str]:
        """Return the sections of all rooms."""
        return {key: kind for room in cls.installed for key, kind in room.sections.items()}
