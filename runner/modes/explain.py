"""mode=explain: show what chosen modules store, compute in and lose, on the first training batch.

Nothing is trained, and nothing is recorded in the store.
"""

from collections.abc import Mapping
from contextlib import closing

from torch import nn

from runner.data.batch_layout import Batch
from runner.data.build import build_loaders, build_splits
from runner.diagnostics.module_trace import ModuleTrace
from runner.modes.context import RunContext, prepare_process
from runner.modes.explain_tables import ExplainedStep, print_module, print_modules
from runner.modes.result import RunResult
from runner.modes.startup_checks import try_batch
from runner.modes.trial_forward import build_proven_model
from runner.training.compile import prepare_model
from runner.training.setup import TrainingSetup, build_state, model_builder
from runner.training.state import TrainState
from runner.training.step import backpropagate, examples_in, loss_of
from runner.utils.modules import outermost_names, select_modules
from runner.utils.reproducibility import seed_all


def explain(run: RunContext) -> RunResult:
    """Print what the modules that spec.explain names do in one forward and backward.

    Raises:
        ConfigError: the pattern matches no module, or data, model and task do not fit together.
    """
    spec = run.spec
    precision = run.precision
    device = run.device
    assert spec.explain is not None
    prepare_process(run)
    train_loader, _ = build_loaders(spec, build_splits(spec), device)
    with closing(train_loader):
        batch = next(train_loader.epoch(0))
        # After the data, as in training: the weights follow from the seed alone.
        seed_all(spec.seed)
        make = model_builder(spec, precision, device)
        built = build_proven_model(make, precision, device, spec.seed, lambda: batch[0])
        modules = matching_modules(built.model, spec.explain)
        state = build_state(TrainingSetup(spec, precision, run.task, device), built.model)
        with precision.session(built.model, device):
            try_batch(run, state, train_loader, says_layout=False)
            prepare_model(spec, precision, device, built.model)
            trace = ModuleTrace(modules)
            loss = _forward_and_backward(state, batch, trace)
            scale = precision.scale(device).value
            step = ExplainedStep(
                run.label,
                run.accelerator.name,
                examples_in(batch),
                spec.init.weights or f"seed {spec.seed}",
                loss,
                None if scale is None else scale.item(),
                precision,
                frozenset(spec.precision),
                built,
            )
            if len(trace.traced) == 1:
                print_module(run.console, step, trace.traced[0])
            else:
                print_modules(run.console, step, spec.explain, trace.traced)
    return RunResult(precision.name, run.label, str(run.out), device=run.accelerator.name)


def matching_modules(model: nn.Module, pattern: str) -> Mapping[str, nn.Module]:
    """Return the outermost modules that a pattern matches, by dotted name, in the model's order.

    Raises:
        ConfigError: it matches none.
    """
    modules = dict(model.named_modules())
    chosen = outermost_names(select_modules("explain", [pattern], modules))
    return {name: module for name, module in modules.items() if name in chosen}


def _forward_and_backward(state: TrainState, batch: Batch, trace: ModuleTrace) -> float:
    """Compute a training step without its update, traced; return the loss."""
    inputs, target = batch
    state.model.train()
    with trace:
        loss = loss_of(state, inputs, target)
        # Where weights are frozen, nothing may have a gradient.
        if loss.requires_grad:
            backpropagate(state, state.scale.multiply(loss))
    return loss.item()
