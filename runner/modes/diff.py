"""mode=diff: hold a precision, or any other setting, against a reference, module by module.

Both executions have the same weights and batches. Where `diff.steps` names later steps, the
reference is trained up to each of them first. `against` names the reference: a run, an execution,
weights or a dump. Against a run, both executions have that run's settings, but for what is typed;
the reference is the run itself, trained again up to the steps that are compared.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from torch.utils._pytree import tree_map_only

from runner.config.messages import dotted_keys
from runner.config.overrides import DTYPE_PRECISIONS
from runner.config.resolve import resolve_spec
from runner.config.trusted_targets import SavedConfig, folder_config
from runner.core import (
    Batch,
    ConfigError,
    ConversionPlan,
    ConversionReport,
    Invocation,
    LoadedCheckpoint,
    RunContext,
    RunResult,
    RunSpec,
    TrainState,
    Unavailable,
    accelerators,
    files,
    fmt,
    layout,
    module_tree,
    random_streams,
    run_context,
    targets,
)
from runner.diagnostics.divergence.compare import BatchComparison, compare_batch, record_reference
from runner.diagnostics.divergence.divergence_report import (
    DivergenceReport,
    describe_uncompared,
    metrics,
    unexplained,
    write_json_report,
    write_page,
)
from runner.diagnostics.divergence.reference import (
    dump_path,
    dump_precision,
    generator_states,
    is_dump,
    read_dump,
    write_dump,
)
from runner.diagnostics.divergence.substitution import Execution
from runner.diagnostics.numerics.numerics_page import page_head
from runner.diagnostics.room import DiffSpec
from runner.modes.execution import build_execution, build_result, prepare_process, starting_model
from runner.modes.replay import ReachedStep, checkpoint_before_step, states_before
from runner.modes.saved_run import (
    PRESET_GROUPS,
    RUN_KEYS,
    changes,
    check_run,
    merge,
    typed_overrides,
)
from runner.precision import registry
from runner.tracking import locate
from runner.tracking.history import from_folder
from runner.training.compile import check_compile_options, prepare_model
from runner.training.model import ModelBuilder, restore_precision_state, restoring_builder
from runner.training.state_dict import checkpoint_state_dict

PAGE = "diff.html"
NUMBERS = "diff.json"
ACCELERATORS = accelerators.KINDS[1:]
COMPARED_KEYS = (
    *("precision.", "model.", "adapter.", "accelerator.", "init.", "seed"),
    *("train.compile", "train.channels_last", "train.freeze"),
)
"""How the keys begin in which two executions may differ. Both have the same batches and loss."""
LATER_STEPS = (2, 8)
"""Steps that are compared, too, as long as something is not: gradients before a last layer of zeros
are 0 until it has moved, and those in a block that ends in zeros for one more step."""


@dataclass(frozen=True)
class DiffReference:
    """What an execution is compared with.

    Attributes:
        label: for messages and pages.
        spec: of the reference execution.
        run: folder of the run that is the reference; None for a training of this command.
        dump: file of a dump that takes its place; None computes the reference here.
        own: the compared execution's values of the keys that differ, as overrides.
    """

    label: str
    spec: RunSpec
    run: Path | None = None
    dump: Path | None = None
    own: str = ""


def diff(run: RunContext) -> run_context.RunOutcome:
    """Compare two executions, and write and record what was found.

    Raises:
        ConfigError: `against` names nothing, or the executions cannot be compared.
    """
    start = perf_counter()
    if run.spec.train.activation_checkpointing:
        run.say("mode=diff keeps all activations: train.activation_checkpointing changes no number")
    run = replace(run, spec=_comparable(run.spec))
    with run.signals.interruptible():
        prepare_process(run)
        reference = _reference(run)
        comparison = _Comparison(run, reference)
        for step in comparison.compared_steps():
            _warn_of_other_loss(run, reference, step)
            run.tracker.log_metrics([(step.step, fmt.now_ms(), metrics(step))])
    name = f"{run.precision.name} {reference.own}".rstrip()
    report = DivergenceReport(name, reference.label, comparison.steps)
    run.say(report.sentence)
    run.tracker.tags({"diff": report.sentence, "against": report.against})
    head = page_head(run, run.device_name, run.spec.tracking.get("note") or "")
    if run.save_artifact(run.out / PAGE, lambda path: write_page(report, head, path)):
        run.say(f"diff: see {fmt.relative_path(run.out / PAGE)}")
    run.save_artifact(run.out / NUMBERS, lambda path: write_json_report(report, path))
    chosen = report.chosen
    count = len(unexplained(chosen.rows))
    if count > 1:
        run.say(f"{count} modules add more than rounding explains; the page has all of them")
    summary = {
        "metrics": metrics(chosen),
        "steps": chosen.step,
        "peak_memory_mib": run.accelerator.peak_memory_mib(),
    }
    result = build_result(run, summary, perf_counter() - start)
    return run_context.RunOutcome(result, comparison.conversion)


def _warn_of_other_loss(
    run: RunContext, reference: DiffReference, compared: BatchComparison
) -> None:
    """Warn where a run's training has another loss here than the run recorded at that step."""
    # With train.accumulate a run records the mean of a step's micro-batches; one is compared.
    if reference.run is None or reference.spec.train.accumulate > 1:
        return
    curve = from_folder(reference.run).get("train/loss")
    if curve is None:
        return
    steps, _, losses = curve
    recorded = losses[steps == compared.step]
    loss, _ = compared.losses
    if len(recorded) and float(recorded[-1]) != loss:
        run.say(
            f"warning: at step {compared.step} the run recorded a loss of {float(recorded[-1])!r}, "
            f"and its training has {loss!r} here: it had other weights, as after a resume with "
            "other settings, or on another machine or version."
        )


def _reference(run: RunContext) -> DiffReference:
    """Return what the run is compared with; itself, where it only writes a dump.

    Raises:
        ConfigError: `against` names nothing that can be compared with.
    """
    spec = run.spec
    if spec.value("against") is None:
        return DiffReference(run.precision.name, spec)
    found = compared_run(spec, run.invocation)
    if found is None:
        reference = resolve_reference(spec)
    else:
        folder, run_spec = found
        label = f"{run_spec.precision['name']} of {fmt.relative_path(folder)}"
        # Without the values of the precision and the accelerator, which the executions' names say.
        hidden = ("precision.", "accelerator.")
        keys = [
            key
            for key, (_, value) in changes(run_spec, spec).items()
            if value is not None and key.startswith(COMPARED_KEYS) and not key.startswith(hidden)
        ]
        reference = DiffReference(label, run_spec, run=folder, own=_own_values(spec, keys))
    return replace(reference, spec=_comparable(reference.spec))


def _comparable(spec: RunSpec) -> RunSpec:
    # A block whose forward is computed again in the backward would be seen twice.
    return replace(spec, train=replace(spec.train, activation_checkpointing=False))


class _Comparison:
    """The comparison of one run.

    Attributes:
        conversion: what the run's precision converted.
        steps: what was found so far.
    """

    def __init__(self, run: RunContext, reference: DiffReference) -> None:
        self.conversion = ConversionReport()
        self.steps: list[BatchComparison] = []
        self._run = run
        self._reference = reference

    def compared_steps(self) -> Iterator[BatchComparison]:
        """Train the reference up to each of the steps, and yield what is found there."""
        run = self._run
        spec = self._reference.spec
        device = accelerators.choose_accelerator(
            spec.accelerator.name, spec.accelerator.index
        ).device
        steps = sorted({*run.spec.section(DiffSpec).steps})
        start = None
        if self._reference.run is not None:
            start = checkpoint_before_step(self._reference.run, steps[0], self._has_settings)
        if steps[0] > 1:
            # The run's own model is built once, before the reference is trained, which may take
            # long: its precision may convert no layer of it.
            random_streams.seed_all(run.spec.seed)
            # No forward follows that would refuse what experts there may be.
            finding = ConversionPlan(finds_experts=True)
            ModelBuilder(run.spec, run.precision).build(run.device, finding)
        reach = partial(states_before, spec, device=device, say=run.say, compiles=True)
        for reached in reach(steps, start):
            yield self._compare(reached)
        # A dump is of its own step, and in later steps both executions have the same weights.
        writes_dump = run.spec.section(DiffSpec).dump
        is_fixed = writes_dump or self._reference.dump or spec.init != run.spec.init
        if is_fixed or "diff.steps" in typed_overrides(run.invocation):
            return
        # A reference that cannot train, or whose run ends before, has no such step.
        with suppress(ConfigError):
            for step in LATER_STEPS:
                missing = describe_uncompared(self.steps)
                if not missing:
                    return
                reached = next(reach([step], None))
                run.say(f"step {step} is compared, too; not compared before: {missing}")
                yield self._compare(reached)

    def _has_settings(self, checkpoint: LoadedCheckpoint) -> bool:
        """Return whether a checkpoint was trained with the reference's settings."""
        # One from before a resume with other settings leads to other weights.
        changed = changes(checkpoint.content["spec"], self._reference.spec)
        # A checkpoint names the classes of the same data.
        return not any(is_of_training(key) for key in changed if key != "data.class_names")

    def _compare(self, reached: ReachedStep) -> BatchComparison:
        """Compare the executions on a batch, with the reference's weights of this moment."""
        run = self._run
        state = reached.state
        batch = reached.micros[0]
        generators = generator_states(state.device)
        ours = _execution(self._reference.label, state)
        batches = (on_device(batch, state.device), on_device(batch, run.device))
        if run.spec.section(DiffSpec).dump:
            path = dump_path(run.out, reached.step)
            content = record_reference(ours, batches[0], generators)
            precision = self._reference.spec.precision
            dumped = (content, state.plain_model, batches[0], ours.label, precision)
            if run.write_file(path, lambda path: write_dump(path, *dumped)):
                run.say(f"dump: {path}")
        recorded = None
        if self._reference.dump is not None:
            model = state.plain_model
            recorded = read_dump(self._reference.dump, state.device, model, batches[0])
        other_state = self._candidate(state, batches[1])
        other = _execution(run.precision.name, other_state)
        self.steps.append(compare_batch(ours, other, batches, generators, recorded))
        return self.steps[-1]

    def _candidate(self, state: TrainState, batch: Batch) -> TrainState:
        """Return the run's own execution, with the reference's weights of this moment; before its
        first step with those of its own seed or init.weights."""
        run = self._run
        spec = run.spec
        precision = run.precision
        # It runs in one process, whatever the strategy.
        setup = run_context.TrainingSetup(spec, precision, run.task, run.device)
        random_streams.seed_all(spec.seed)
        start = None
        if state.step:
            content = checkpoint_state_dict(state, self._reference.spec)
            start = LoadedCheckpoint(Path(f"step {state.step}"), content)
            make = restoring_builder(spec, precision, start)
        else:
            make = starting_model(setup)
        built, candidate = build_execution(setup, make, lambda: batch[0])
        if start is not None:
            restore_precision_state(built.model, precision, start)
        check_compile_options(spec, precision, run.device, built.model)
        prepare_model(spec, precision, run.device, built.model)
        self.conversion = built.report
        return candidate


def _execution(label: str, state: TrainState) -> Execution:
    value = state.precision.scale(state.device).value
    return Execution(label, state, 1.0 if value is None else value.item())


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def resolve_reference(spec: RunSpec, key: str = "against") -> DiffReference:
    """Return what against=, or another key, names; no run.

    Raises:
        ConfigError: it names nothing that can be compared with.
    """
    text = str(spec.value(key))
    name = RunSpec.PRECISION_ALIASES.get(text, text)
    if name in registry.precision_names():
        # No precision.<key> of the command counts, which is the other execution's.
        precision = {**registry.precision_config(name), "name": name}
        return DiffReference(name, replace(spec, precision=precision))
    if text in ACCELERATORS:
        return DiffReference(text, replace(spec, accelerator=replace(spec.accelerator, name=text)))
    if files.path_exists(text):
        path = Path(text)
        if is_dump(path):
            return _dump_reference(spec, path)
        if max(spec.section(DiffSpec).steps) > 1:
            steps = str(spec.section(DiffSpec).steps).replace(" ", "")
            raise ConfigError(
                f"against={text} compares other weights, and in later steps of diff.steps={steps} "
                f"both have the same. Type diff.steps=[1], or init.weights={text} against=<...>."
            )
        return DiffReference(text, replace(spec, init=replace(spec.init, weights=text)))
    if "=" in text:
        words = split_overrides(text)
        reference = spec
        for word in words:
            name, _, value = word.partition("=")
            if name == "precision":
                reference = resolve_reference(reference.with_value(key, value), key).spec
            else:
                reference = _with_value(reference, word, key)
        return DiffReference(text, reference, own=_own_values(spec, words))
    if "/" in text:
        raise ConfigError(f"{key}={text}: there is no such file or folder. Type a run's.")
    names = [*registry.precision_names(), *ACCELERATORS]
    near = DTYPE_PRECISIONS.get(text) or get_close_matches(text, names, n=3, cutoff=0.4)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    raise ConfigError(
        f"{key}={text} is no precision, accelerator, override or file.{hint} Allowed: a "
        f"precision ({key}=32-true), other values of keys ({key}=train.compile=false), "
        f"{', '.join(ACCELERATORS)}, weights or a checkpoint (a path), a dump (diff-*.safetensors)."
    )


def split_overrides(text: str) -> list[str]:
    """Return overrides that commas separate; a comma in brackets is one of a list."""
    return re.split(r",(?![^\[]*\])", text)


def _dump_reference(spec: RunSpec, path: Path) -> DiffReference:
    """Return a dump as the reference, and the execution here that shows what rounding explains: in
    the precision that the dump was written in, emulated where this device lacks it."""
    saved = dump_precision(path)
    problem = files.interpolation_problem(saved)
    if problem:
        raise ConfigError(f"against={path} {problem}.")
    name = saved.get("name")
    if name not in registry.precision_names():
        return DiffReference(str(path), spec, dump=path)
    node: dict[str, Any] = {**registry.precision_config(name), "name": name}
    # A file from elsewhere gives plain values only: a `_target_` would name code to run.
    plain = {
        key: value for key, value in saved.items() if "_target_" not in json.dumps({key: value})
    }
    node |= {key: value for key, value in plain.items() if key in node}
    device = accelerators.choose_accelerator(spec.accelerator.name, spec.accelerator.index).device
    try:
        targets.build_group("precision", node).require(device)
    except Unavailable as error:
        if "emulate" not in node:
            raise ConfigError(
                f"against={path} was written in precision={name}, in which the reference runs here "
                f"to show what rounding explains. {error.what} Compare on a machine that has it."
            ) from error
        node["emulate"] = True
    return DiffReference(f"{name} of {path}", replace(spec, precision=node), dump=path)


def _own_values(spec: RunSpec, words: list[str]) -> str:
    """Return the spec's own values of the keys that other words set, as overrides."""
    config = OmegaConf.create(spec.to_dict())
    missing = object()  # as an option that another precision has
    found = []
    for key in (word.partition("=")[0] for word in words):
        value = OmegaConf.select(config, key, default=missing)
        if key != "precision" and value is not missing:
            found.append(f"{key}={fmt.typed_value(value)}")
    return " ".join(found)


def _with_value(spec: RunSpec, word: str, typed: str) -> RunSpec:
    key = word.partition("=")[0]
    config = OmegaConf.create(spec.to_dict())
    missing = object()
    if OmegaConf.select(config, key, default=missing) is missing:
        near = module_tree.nearest_names(key, [*dotted_keys("", config)])
        raise ConfigError(f"{typed}={word}: there is no key {key}. Nearest: {near}.")
    if not key.startswith(COMPARED_KEYS):
        raise ConfigError(
            f"{typed}={word}: both executions have the same {key}. Allowed: precision=<name>, and "
            f"keys that begin with {', '.join(COMPARED_KEYS)}."
        )
    try:
        config.merge_with(OmegaConf.from_dotlist([word]))
        return resolve_spec(config)
    except (OmegaConfBaseException, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{typed}={word} does not fit: {reason}") from error


def is_of_training(key: str) -> bool:
    """Return whether a training's numbers depend on a key."""
    return key.partition(".")[0] in RUN_KEYS


def compared_run(spec: RunSpec, invocation: Invocation) -> tuple[Path, RunSpec] | None:
    """Return the folder and the spec of the run that against= names, by its folder or its MLflow
    id; None where it names something else.

    Args:
        spec: of mode=diff.
        invocation: what was typed.

    Raises:
        ConfigError: the run cannot be trained again here, or its config names code that is not
            trusted.
    """
    text = spec.value("against") or ""
    folder = Path(text)
    if not files.path_exists(text):
        if len(text) != 32 or not text.isalnum():
            return None
        folder = locate.resolve_path(text, spec.tracking.get("uri"), "against")
    elif not (folder / layout.CONFIG).is_file():
        return None
    config = folder_config(folder, "against")
    assert config is not None
    run_spec = check_run(config, spec, invocation)
    problem = ""
    if run_spec.mode != "train":
        problem = f"has mode={run_spec.mode} and trains nothing. Name the folder of a training"
    elif not str(run_spec.strategy["_target_"]).endswith(".Single"):
        problem = (
            "was trained in several processes, and mode=diff computes in one. Name one of its "
            "checkpoints with init.weights=, and a precision with against="
        )
    elif run_spec.train.compile and run_spec.train.compile != "regional":
        problem = "was compiled as one program, in which there are no modules to see"
    if problem:
        raise ConfigError(f"against={text}: the run {problem}.")
    return folder, replace(run_spec, accelerator=spec.accelerator)


def plan_diff(plan: run_context.PlannedRun) -> run_context.PlannedRun:
    """Return a comparison with a run with that run's values where none was typed.

    Args:
        plan: its spec's against may name a run; it is returned as it is where that names none.

    Raises:
        ConfigError: the run cannot be trained again, or something was typed that both have.
    """
    spec = plan.spec
    invocation = plan.invocation
    found = compared_run(spec, invocation)
    if found is None:
        return plan
    folder, run_spec = found
    typed = typed_overrides(invocation)
    for preset in PRESET_GROUPS:
        if preset in typed:
            raise ConfigError(
                f"against={spec.value('against')} is a run, whose settings are taken. Leave "
                f"{preset}= out."
            )
    # Its code was judged with the whole of the run's config.
    config = SavedConfig(run_spec.to_dict(), folder, "against", is_signed=True)
    result = None
    with suppress(OSError, ValueError):  # a run that was killed has no result
        result = RunResult.read(folder)
    choices = {key: getattr(result, key, "") for key in RUN_KEYS if key not in typed}
    merged, invocation = merge(config, spec, invocation, RUN_KEYS, choices)
    merged = merged.with_value("against", str(folder))
    for key, (value, _) in changes(run_spec, merged).items():
        if is_of_training(key) and not key.startswith(COMPARED_KEYS):
            # The word that was typed and set the key, as `data` sets `data.context`.
            parent = key
            for word in module_tree.name_prefixes(key):
                if word in typed:
                    parent = f"{word}="
            raise ConfigError(
                f"against={folder}: the run has {key}={value}, and both executions take its "
                f"batches and training. Leave {parent} out. Allowed to "
                f"differ: precision, and keys that begin with {', '.join(COMPARED_KEYS)}."
            )
    return plan._replace(spec=merged, invocation=invocation)
