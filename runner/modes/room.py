"""mode=train and mode=evaluate."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from runner.core import Mode, Room, RunSpec

if TYPE_CHECKING:
    from runner.core import LoadedCheckpoint, RunContext, Strategy, run_context


class Train(Mode):
    """Train a model, from its start or from a checkpoint."""

    name = "train"
    trains = True
    adapts = True
    is_recorded = True
    takes_processes = True

    def key_problems(self, spec: RunSpec) -> Iterator[str]:
        if spec.mode != self.name and spec.checkpoint.resume is not None:
            yield f"mode={spec.mode} resumes nothing. Leave checkpoint.resume= out."

    def plan(
        self, plan: "run_context.PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> "run_context.PlannedRun":
        if plan.spec.checkpoint.resume is None:
            return plan
        from runner.modes.saved_run import plan_resume_in_processes

        return plan_resume_in_processes(plan, say, strategy)

    def run(
        self, context: "RunContext", saved: "LoadedCheckpoint | None"
    ) -> "run_context.RunOutcome":
        from runner.modes.train import train

        return train(context, saved)


class Evaluate(Mode):
    """Evaluate a checkpoint in the precision of the run."""

    name = "evaluate"
    takes_checkpoint = True
    reads_training_data = False
    is_recorded = True
    takes_processes = True

    def key_problems(self, spec: RunSpec) -> Iterator[str]:
        path = spec.checkpoint.path
        if spec.mode != self.name:
            if path is not None and not Mode.named(spec.mode).takes_checkpoint:
                yield (
                    f"mode={spec.mode} does not load checkpoint={path}. Type mode=evaluate, "
                    "init.weights=<it> for its weights, or checkpoint.resume=<it>."
                )
            return
        if path is None:
            yield "mode=evaluate needs a checkpoint: checkpoint=<file, folder or run id>."
        if spec.init.weights is not None:
            yield "mode=evaluate loads checkpoint=, not init.weights=. Leave init.weights= out."

    def plan(
        self, plan: "run_context.PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> "run_context.PlannedRun":
        from runner.modes.evaluate import plan_evaluation

        return plan_evaluation(plan)

    def run(
        self, context: "RunContext", saved: "LoadedCheckpoint | None"
    ) -> "run_context.RunOutcome":
        from runner.modes.evaluate import evaluate_checkpoint

        assert saved is not None  # of the plan
        # An evaluation leaves nothing to save, so a signal ends it at once.
        with context.signals.interruptible():
            return evaluate_checkpoint(context, saved)


ROOM = Room(modes=(Train(), Evaluate()))
