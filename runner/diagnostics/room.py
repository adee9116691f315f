"""The modes that look into a run (explain, replay, diff), and measured numerics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runner.core import Command, ConfigError, Mode, Room, RunSpec, errors, fmt

if TYPE_CHECKING:
    from runner.core import (
        LoadedCheckpoint,
        RunCallback,
        RunContext,
        Strategy,
        TrainState,
        run_context,
    )


@dataclass(frozen=True)
class NumericsSpec:
    """Measurement of a run's numbers while it trains.

    Attributes:
        every: optimizer steps between snapshots, which measure the activations, weights, gradients
            and updates of every module; null takes none.
    """

    every: int | None = None

    def problems(self, spec: RunSpec) -> Iterator[str]:
        """Yield a message for each value that is not allowed."""
        yield from errors.count_problems("numerics", self, ("every",))
        if self.every is not None:
            yield from _hook_problems(spec, f"numerics.every={self.every} measures")


@dataclass(frozen=True)
class DiffSpec:
    """What mode=diff compares, and writes.

    Attributes:
        steps: optimizer steps whose forward and backward are compared; up to each of them the
            reference is trained.
        dump: write what the reference computes to diff-<step>.safetensors in the run's folder, with
            which another machine, commit or version of torch can be compared (against=<file>).
    """

    steps: list[int] = field(default_factory=lambda: [1])
    dump: bool = False

    def problems(self, spec: RunSpec) -> Iterator[str]:
        """Yield a message for each value that is not allowed."""
        if not self.steps or min(self.steps) < 1:
            text = str(self.steps).replace(" ", "")
            yield f"diff.steps={text} names no steps. Allowed: numbers from 1, as in [1,100]."


def _hook_problems(spec: RunSpec, watcher: str) -> Iterator[str]:
    """Yield why modules cannot be watched by hooks; empty where they can."""
    compiles = fmt.typed_value(spec.train.compile)
    if spec.train.compile:
        yield (
            f"{watcher} modules by hooks, which train.compile={compiles} would compile into the "
            "model. Type train.compile=false."
        )


class Explain(Mode):
    """Show what modules store, take, compute in and give in a forward and backward."""

    name = "explain"
    adapts = True

    def key_problems(self, spec: RunSpec) -> Iterator[str]:
        if (spec.mode == self.name) != (spec.value("explain") is not None):
            yield (
                "mode=explain needs explain=<module>, and explain= needs mode=explain. Type "
                "python -m runner explain <module>, for example blocks.0, or '*' for the model."
            )
        if spec.mode == self.name:
            yield from _hook_problems(spec, "mode=explain watches")

    def run(self, context: "RunContext", saved: "LoadedCheckpoint | None") -> None:
        from runner.modes.explain import explain

        explain(context)


class Replay(Mode):
    """Compute a saved batch again, and find where its numbers stop being finite."""

    name = "replay"

    def key_problems(self, spec: RunSpec) -> Iterator[str]:
        if (spec.mode == self.name) != (spec.value("batch") is not None):
            yield (
                "debug=replay needs batch=<a saved batch>, and batch= needs debug=replay. Type "
                "debug=replay batch=outputs/runs/<time>/guard/batch-<step>.json."
            )

    def plan(
        self, plan: "run_context.PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> "run_context.PlannedRun":
        from runner.modes.replay import plan_replay

        return plan_replay(plan)

    def run(self, context: "RunContext", saved: "LoadedCheckpoint | None") -> None:
        from runner.modes.replay import replay

        replay(context)


class Diff(Mode):
    """Compare the execution of a run with another one, module by module."""

    name = "diff"
    is_recorded = True

    def key_problems(self, spec: RunSpec) -> Iterator[str]:
        against = spec.value("against")
        if spec.mode != self.name:
            if against is not None:
                yield f"against={against} needs mode=diff. Type it, or leave against= out."
            return
        if against is None and not spec.section(DiffSpec).dump:
            yield (
                "mode=diff needs what to compare with. Type against=32-true, against=train.compile="
                "false, against=<run, checkpoint or dump>, or diff.dump=true to write a dump."
            )
        if spec.train.compile and spec.train.compile != "regional":
            compiles = fmt.typed_value(spec.train.compile)
            yield (
                f"mode=diff sees no modules inside train.compile={compiles}. Type "
                "train.compile=regional, which compiles each repeated block for itself."
            )

    def plan(
        self, plan: "run_context.PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> "run_context.PlannedRun":
        from runner.modes.diff import plan_diff

        return plan_diff(plan)

    def run(
        self, context: "RunContext", saved: "LoadedCheckpoint | None"
    ) -> "run_context.RunOutcome":
        from runner.modes.diff import diff

        return diff(context)


EXPLAIN = Command(
    name=Explain.name,
    summary="what modules store, take, compute in and give",
    description="Prints a table of modules of a run: what each stores, the dtypes that it takes, "
    "computes in\nand gives in a forward and backward of the first training batch, and whether it "
    "is converted\nand why not. Nothing is trained, and nothing is recorded in MLflow.",
    words="<module> <key>=<value> ...",
    words_meaning="a dotted name, with * for any part of one segment, and any keys of a run",
    words_allowed="a module and keys of a run",
)


def _check_numerics(spec: RunSpec, strategy: "Strategy") -> None:
    every = spec.section(NumericsSpec).every
    if every is not None and strategy.shards:
        raise ConfigError(
            f"numerics.every={every} measures whole tensors, and strategy={strategy.name} shards "
            "them. Type strategy=ddp, or leave numerics.every= out."
        )


def _callbacks(run: "RunContext", state: "TrainState") -> "Iterator[RunCallback]":
    every = run.spec.section(NumericsSpec).every
    if every and run.strategy.rank.is_main:
        from runner.diagnostics.numerics.probe import NumericsCallback  # few runs measure them

        note = run.spec.tracking.get("note") or ""
        yield NumericsCallback(state, every, run, run.label, note)


def _watch(run: "RunContext") -> "run_context.RunWatch":
    from runner.diagnostics.memory.out_of_memory import MemoryWatch

    return MemoryWatch(run)


ROOM = Room(
    sections={
        "numerics": NumericsSpec,
        "diff": DiffSpec,
        "explain": "pattern of the modules that mode=explain shows, as in blocks.*.attention; `*` "
        "is the whole model",
        "batch": "saved batch (a .json file in the guard folder of a run) that debug=replay runs",
        "against": "what mode=diff compares this command's precision with: a precision, other "
        "values of keys (train.compile=false), cpu or cuda, weights or a checkpoint (a path), a "
        "run at its own steps (folder or MLflow id), or a dump",
    },
    modes=(Explain(), Replay(), Diff()),
    commands=(EXPLAIN,),
    check=_check_numerics,
    callbacks=_callbacks,
    watch=_watch,
)
