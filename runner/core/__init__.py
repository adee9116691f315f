"""The core: config, policy, data, loop, record, run. It knows none of the rooms.

This list is all that a room takes of it. docs/design.md draws the rooms, and says what each name is
for; its own docstring says what it takes, gives and raises. Sixteen of the names are modules of
plain functions: files, fmt, terminal and others. Each name is imported when it is first asked for:
the command line answers --help without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.core.base import accelerators as accelerators
    from runner.core.base import errors as errors
    from runner.core.base import files as files
    from runner.core.base import fmt as fmt
    from runner.core.base import layout as layout
    from runner.core.base import module_tree as module_tree
    from runner.core.base import random_streams as random_streams
    from runner.core.base import secrets as secrets
    from runner.core.base import stop_signals as stop_signals
    from runner.core.base import tensor_facts as tensor_facts
    from runner.core.base import terminal as terminal
    from runner.core.base import torchrun as torchrun
    from runner.core.base.errors import ConfigError as ConfigError
    from runner.core.base.errors import RunnerError as RunnerError
    from runner.core.base.errors import Unavailable as Unavailable
    from runner.core.base.errors import refuse as refuse
    from runner.core.base.library_warnings import suppress_warnings as suppress_warnings
    from runner.core.base.module_tape import ModuleTape as ModuleTape
    from runner.core.config import signature as signature
    from runner.core.config import targets as targets
    from runner.core.config.invocation import Invocation as Invocation
    from runner.core.config.room import Mode as Mode
    from runner.core.config.room import Room as Room
    from runner.core.config.room import mode_named as mode_named
    from runner.core.config.schema import RunSpec as RunSpec
    from runner.core.loop.batches import Batch as Batch
    from runner.core.loop.batches import KeywordInputs as KeywordInputs
    from runner.core.loop.batches import PositionalInputs as PositionalInputs
    from runner.core.loop.callback import RunCallback as RunCallback
    from runner.core.loop.callback import RunHandle as RunHandle
    from runner.core.loop.callback import TrainingEnd as TrainingEnd
    from runner.core.loop.model_call import call_model as call_model
    from runner.core.loop.records import EvalRecord as EvalRecord
    from runner.core.loop.records import StepRecord as StepRecord
    from runner.core.loop.state import ScheduledOptimizer as ScheduledOptimizer
    from runner.core.loop.state import TrainState as TrainState
    from runner.core.loop.step import backpropagate as backpropagate
    from runner.core.loop.step import loss_of as loss_of
    from runner.core.loop.step import train_step as train_step
    from runner.core.loop.strategy import Strategy as Strategy
    from runner.core.loop.task import Task as Task
    from runner.core.policy.conversion_report import ConversionReport as ConversionReport
    from runner.core.policy.conversion_report import Fate as Fate
    from runner.core.policy.loss_scale import LossScale as LossScale
    from runner.core.policy.loss_scale import NoLossScale as NoLossScale
    from runner.core.policy.precision import ConversionPlan as ConversionPlan
    from runner.core.policy.precision import Precision as Precision
    from runner.core.record import checkpoint_file as checkpoint_file
    from runner.core.record import journals as journals
    from runner.core.record.checkpoint_file import LoadedCheckpoint as LoadedCheckpoint
    from runner.core.record.metric_names import VAL_LOSS as VAL_LOSS
    from runner.core.record.tracker import RunInfo as RunInfo
    from runner.core.record.tracker import RunOutput as RunOutput
    from runner.core.record.tracker import Tracker as Tracker
    from runner.core.run.context import PlannedRun as PlannedRun
    from runner.core.run.context import RunContext as RunContext
    from runner.core.run.context import RunOutcome as RunOutcome
    from runner.core.run.context import TrainingSetup as TrainingSetup
    from runner.core.run.result import RunResult as RunResult
    from runner.core.run.run import run_spec as run_spec

__all__ = [
    "VAL_LOSS",
    "Batch",
    "ConfigError",
    "ConversionPlan",
    "ConversionReport",
    "EvalRecord",
    "Fate",
    "Invocation",
    "KeywordInputs",
    "LoadedCheckpoint",
    "LossScale",
    "Mode",
    "ModuleTape",
    "NoLossScale",
    "PlannedRun",
    "PositionalInputs",
    "Precision",
    "Room",
    "RunCallback",
    "RunContext",
    "RunHandle",
    "RunInfo",
    "RunOutcome",
    "RunOutput",
    "RunResult",
    "RunSpec",
    "RunnerError",
    "ScheduledOptimizer",
    "StepRecord",
    "Strategy",
    "Task",
    "Tracker",
    "TrainState",
    "TrainingEnd",
    "TrainingSetup",
    "Unavailable",
    "accelerators",
    "backpropagate",
    "call_model",
    "checkpoint_file",
    "errors",
    "files",
    "fmt",
    "journals",
    "layout",
    "loss_of",
    "mode_named",
    "module_tree",
    "random_streams",
    "refuse",
    "run_spec",
    "secrets",
    "signature",
    "stop_signals",
    "suppress_warnings",
    "targets",
    "tensor_facts",
    "terminal",
    "torchrun",
    "train_step",
]

_HOMES = {
    "base.accelerators": "",
    "base.errors": "ConfigError RunnerError Unavailable refuse",
    "base.files": "",
    "base.fmt": "",
    "base.layout": "",
    "base.library_warnings": "suppress_warnings",
    "base.module_tape": "ModuleTape",
    "base.module_tree": "",
    "base.random_streams": "",
    "base.secrets": "",
    "base.stop_signals": "",
    "base.tensor_facts": "",
    "base.terminal": "",
    "base.torchrun": "",
    "config.invocation": "Invocation",
    "config.room": "Mode Room mode_named",
    "config.schema": "RunSpec",
    "config.signature": "",
    "config.targets": "",
    "loop.batches": "Batch KeywordInputs PositionalInputs",
    "loop.callback": "RunCallback RunHandle TrainingEnd",
    "loop.model_call": "call_model",
    "loop.records": "EvalRecord StepRecord",
    "loop.state": "ScheduledOptimizer TrainState",
    "loop.step": "backpropagate loss_of train_step",
    "loop.strategy": "Strategy",
    "loop.task": "Task",
    "policy.conversion_report": "ConversionReport Fate",
    "policy.loss_scale": "LossScale NoLossScale",
    "policy.precision": "ConversionPlan Precision",
    "record.checkpoint_file": "LoadedCheckpoint",
    "record.journals": "",
    "record.metric_names": "VAL_LOSS",
    "record.tracker": "RunInfo RunOutput Tracker",
    "run.context": "PlannedRun RunContext RunOutcome TrainingSetup",
    "run.result": "RunResult",
    "run.run": "run_spec",
}
"""The names of each module below this one; a module is a name itself where it is in the list."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            value = getattr(import_module(f"{__name__}.{module}"), name)
            break
        if name == module.rpartition(".")[2] and name in __all__:
            value = import_module(f"{__name__}.{module}")
            break
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Python asks for a name once.
    globals()[name] = value
    return value
