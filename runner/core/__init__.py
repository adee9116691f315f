"""The core: config, policy, data, loop, record, run. It knows none of the rooms.

This list is all that a room takes of it. docs/design.md draws the rooms, and says what each name is
for; its own docstring says what it takes, gives and raises. Sixteen of the names are modules of
plain functions: files, fmt, terminal and others. Each name is imported when it is first asked for:
the command line answers --help without torch.
"""

from typing import TYPE_CHECKING

from runner.core.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from runner.core.base import accelerators as accelerators
    from runner.core.base import errors as errors
    from runner.core.base import files as files
    from runner.core.base import fmt as fmt
    from runner.core.base import layout as layout
    from runner.core.base import module_tape as module_tape
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
    from runner.core.base.lazy_names import lazy_names as lazy_names
    from runner.core.config import signature as signature
    from runner.core.config import targets as targets
    from runner.core.config.command import Command as Command
    from runner.core.config.invocation import Invocation as Invocation
    from runner.core.config.room import Mode as Mode
    from runner.core.config.room import Room as Room
    from runner.core.config.schema import RunSpec as RunSpec
    from runner.core.loop import batch_layout as batch_layout
    from runner.core.loop import model_call as model_call
    from runner.core.loop import step_records as step_records
    from runner.core.loop import train_state as train_state
    from runner.core.loop import training_loop as training_loop
    from runner.core.loop.batch_layout import Batch as Batch
    from runner.core.loop.callback import RunCallback as RunCallback
    from runner.core.loop.callback import RunHandle as RunHandle
    from runner.core.loop.step import backpropagate as backpropagate
    from runner.core.loop.step import loss_of as loss_of
    from runner.core.loop.step import train_step as train_step
    from runner.core.loop.strategy import Strategy as Strategy
    from runner.core.loop.task import Task as Task
    from runner.core.loop.train_state import TrainState as TrainState
    from runner.core.policy import gradients as gradients
    from runner.core.policy import sessions as sessions
    from runner.core.policy.conversion_report import ConversionReport as ConversionReport
    from runner.core.policy.conversion_report import Fate as Fate
    from runner.core.policy.conversion_report import ModuleConversion as ModuleConversion
    from runner.core.policy.loss_scale import LossScale as LossScale
    from runner.core.policy.precision import ConversionPlan as ConversionPlan
    from runner.core.policy.precision import Precision as Precision
    from runner.core.record import checkpoint_file as checkpoint_file
    from runner.core.record import journals as journals
    from runner.core.record import metric_names as metric_names
    from runner.core.record.checkpoint_file import LoadedCheckpoint as LoadedCheckpoint
    from runner.core.record.tracker import Console as Console
    from runner.core.record.tracker import RunInfo as RunInfo
    from runner.core.record.tracker import RunOutput as RunOutput
    from runner.core.record.tracker import Tracker as Tracker
    from runner.core.run import run_context as run_context
    from runner.core.run import run_result as run_result
    from runner.core.run.run import run_spec as run_spec
    from runner.core.run.run_context import RunContext as RunContext
    from runner.core.run.run_result import RunResult as RunResult

__all__ = [
    "Batch",
    "Command",
    "ConfigError",
    "Console",
    "ConversionPlan",
    "ConversionReport",
    "Fate",
    "Invocation",
    "LoadedCheckpoint",
    "LossScale",
    "Mode",
    "ModuleConversion",
    "Precision",
    "Room",
    "RunCallback",
    "RunContext",
    "RunHandle",
    "RunInfo",
    "RunOutput",
    "RunResult",
    "RunSpec",
    "RunnerError",
    "Strategy",
    "Task",
    "Tracker",
    "TrainState",
    "Unavailable",
    "accelerators",
    "backpropagate",
    "batch_layout",
    "checkpoint_file",
    "errors",
    "files",
    "fmt",
    "gradients",
    "journals",
    "layout",
    "lazy_names",
    "loss_of",
    "metric_names",
    "model_call",
    "module_tape",
    "module_tree",
    "random_streams",
    "refuse",
    "run_context",
    "run_result",
    "run_spec",
    "secrets",
    "sessions",
    "signature",
    "step_records",
    "stop_signals",
    "targets",
    "tensor_facts",
    "terminal",
    "torchrun",
    "train_state",
    "train_step",
    "training_loop",
]

_HOMES = {
    "base.accelerators": "accelerators",
    "base.errors": "ConfigError RunnerError Unavailable refuse errors",
    "base.files": "files",
    "base.fmt": "fmt",
    "base.layout": "layout",
    "base.module_tape": "module_tape",
    "base.module_tree": "module_tree",
    "base.random_streams": "random_streams",
    "base.secrets": "secrets",
    "base.stop_signals": "stop_signals",
    "base.tensor_facts": "tensor_facts",
    "base.terminal": "terminal",
    "base.torchrun": "torchrun",
    "config.command": "Command",
    "config.invocation": "Invocation",
    "config.room": "Mode Room",
    "config.schema": "RunSpec",
    "config.signature": "signature",
    "config.targets": "targets",
    "loop.batch_layout": "Batch batch_layout",
    "loop.callback": "RunCallback RunHandle",
    "loop.model_call": "model_call",
    "loop.step": "backpropagate loss_of train_step",
    "loop.step_records": "step_records",
    "loop.strategy": "Strategy",
    "loop.task": "Task",
    "loop.train_state": "TrainState train_state",
    "loop.training_loop": "training_loop",
    "policy.conversion_report": "ConversionReport Fate ModuleConversion",
    "policy.gradients": "gradients",
    "policy.loss_scale": "LossScale",
    "policy.precision": "ConversionPlan Precision",
    "policy.sessions": "sessions",
    "record.checkpoint_file": "LoadedCheckpoint checkpoint_file",
    "record.journals": "journals",
    "record.metric_names": "metric_names",
    "record.tracker": "Console RunInfo RunOutput Tracker",
    "run.run": "run_spec",
    "run.run_context": "RunContext run_context",
    "run.run_result": "RunResult run_result",
}
"""The names of each module; a module is one itself where its users take most of it."""

__getattr__ = lazy_names(__name__, _HOMES)
