"""mode=explain: show what chosen modules store, take, compute in and give on the first batch.

Nothing is trained, and nothing is recorded in the store.
"""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext

from torch import nn

from runner.core import (
    ModuleConversion,
    RunContext,
    backpropagate,
    batch_layout,
    fmt,
    loss_of,
    module_tree,
    random_streams,
    run_context,
    tensor_facts,
)
from runner.data.build import build_data, build_run_loaders
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.diagnostics.numerics.probe import Probe
from runner.diagnostics.numerics.results import NumericsSnapshot
from runner.modes.execution import build_execution, prepare_process, starting_model
from runner.modes.startup import try_batch
from runner.output.markup import Cell, Table, terminal_table
from runner.precision.casting import KEEP_FP32_REASON, KeptInFloat32
from runner.precision.conversion import ROOT_NAME
from runner.precision.emulation.formats import FORMATS
from runner.precision.layers.experts import Experts, expert_parts, stack_names
from runner.precision.layers.quantized_linear import WeightFormat
from runner.training.compile import prepare_model
from runner.training.model import BuiltModel

_FLOW_COLUMNS = {
    "inputs": "takes",
    "computes": "computes in",
    "outputs": "gives",
    "gradients": "gradients",
}
"""Columns of a DtypeProbe's table, with their heads here."""
_EDGES = 4
"""Characters of a table's edges, which are not printed."""


def explain(run: RunContext) -> None:
    """Print what the modules that explain= names do in one forward and backward.

    Raises:
        ConfigError: the pattern matches no module, or data, model and task do not fit together.
    """
    spec = run.spec
    pattern = spec.value("explain")
    precision = run.precision
    device = run.device
    prepare_process(run)
    data = build_data(spec).train_and_val()
    loaders = build_run_loaders(spec, data, device)
    with closing(loaders):
        batch = next(loaders.train.epoch(0))
        # After the data, as in training: the weights follow from the seed alone.
        random_streams.seed_all(spec.seed)
        # It runs in one process, whatever the strategy.
        setup = run_context.TrainingSetup(spec, run.precision, run.task, device)
        built, state = build_execution(
            setup, starting_model(setup, None, loaders), lambda: batch[0]
        )
        run.begin_steps(state)
        modules = dict(built.model.named_modules())
        snapshots: list[NumericsSnapshot] = []
        # A pattern selects the modules inside those that it names, too.
        names = module_tree.select_modules("explain", [pattern], modules)
        with precision.session(built.model, device):
            try_batch(run, state, loaders.train, says_layout=False)
            prepare_model(spec, precision, device, built.model)
            # A training step without its update.
            has_experts = bool(stack_names(built.model))
            numbers = Probe(state, snapshots.append) if has_experts else nullcontext()
            with DtypeProbe(built.model) as probe, numbers:
                module_tree.set_training(state.model)
                loss = loss_of(state, *batch)
                # Where weights are frozen, nothing may have a gradient.
                if loss.requires_grad:
                    backpropagate(state, state.scale.multiply(loss))
    weights = spec.init.weights or f"seed {spec.seed}"
    run.console.print(f"{pattern}: {run.label}, {run.accelerator.name}", markup=False)
    number = fmt.format_number(loss.item())
    run.say(
        f"first batch of {batch_layout.examples_in(batch)}, weights of {weights}: loss {number}"
    )
    if not built.report.modules:
        run.console.print(
            f"precision={precision.name} converts no modules: it stores "
            f"{precision.storage_format} and computes products in {precision.compute_format}"
        )
    if precision.emulated:
        run.say(f"emulated ({precision.compute_format}): kernels compute on rounded numbers")
    # The layers of experts' matrices would fill the table with equal rows.
    holders = {part: module for module in modules.values() for part in expert_parts(module)}
    shown = {holders.get(modules[name], modules[name]) for name in names}
    chosen = {name: module for name, module in modules.items() if module in shown}
    _print_table(run, list(_module_rows(chosen, probe, built)))
    for snapshot in snapshots:
        for line in _expert_lines(snapshot, chosen):
            run.say(line)


def _expert_lines(snapshot: NumericsSnapshot, chosen: Collection[str]) -> Iterator[str]:
    """Yield for each format the expert of the chosen modules whose weight it changes most, and what
    to type to spare it."""
    layers: dict[str, None] = {}
    for narrow in FORMATS:
        ranked = []
        for stats in snapshot.measured:
            stack, bracket, _ = stats.module.rpartition("[")
            layer = stack.rpartition(".")[0]
            # Where rounding changes nothing there is no ratio.
            sqnr_db = stats.formats[narrow].sqnr_db
            if bracket and stats.kind == "weights" and layer in chosen and sqnr_db is not None:
                ranked.append((sqnr_db, stats.module, layer))
        if not ranked:
            continue
        ranked.sort()
        worst, name, layer = ranked[0]
        middle, _, _ = ranked[len(ranked) // 2]
        layers[layer] = None
        yield (
            f"{narrow} hurts the weight of expert {name} most: SQNR {worst:.1f} dB, of the "
            f"middle one of {len(ranked)} {middle:.1f} dB"
        )
    if layers:
        yield (
            "One expert of a stack cannot be left out alone. To leave out its layer, type "
            f"precision.ignore_modules=[{','.join(layers)}]. numerics.every=<steps> shows by "
            "expert which updates a format would swallow."
        )


def _print_table(run: RunContext, rows: Sequence[Sequence[str]]) -> None:
    """Print rows of modules without the columns that say nothing."""
    heads = ("module", "class", "stores", *_FLOW_COLUMNS.values(), "converted")
    kept = [i for i in range(len(heads)) if any(row[i] not in ("", "-") for row in rows)]
    width = run.console.width
    # Of a name, so that five columns fit 80 characters, and all of them a file's 160.
    limit = max(20, width // 2 - 16)
    cells = []
    for name, *others in rows:
        # A name breaks after dots only.
        words = name.replace(".", ". ")
        lines = textwrap.wrap(words, limit, break_long_words=False, break_on_hyphens=False)
        texts = ["\n".join(lines).replace(". ", "."), *others]
        cells.append([Cell(texts[i]) for i in kept])
    head = [heads[i] for i in kept]
    shown = terminal_table(Table(head, cells, frozenset(kept)), width + _EDGES)
    # Without edges: the table must fit on a screen.
    shown.show_edge, shown.pad_edge, shown.title = False, False, None
    run.console.print(shown)
    left_out = ", ".join(head[len(shown.columns) :])
    if left_out:
        run.say(f"Columns left out: {left_out}. A wider terminal, a file or a pipe shows them.")


def _module_rows(
    modules: Mapping[str, nn.Module], probe: DtypeProbe, built: BuiltModel
) -> Iterator[Sequence[str]]:
    """Yield a row for each module that stores a weight or ran."""
    traced = {row["module"]: row for row in probe.table()}
    conversions = {row.module: row for row in built.report.modules}
    paths = {module: name or ROOT_NAME for name, module in built.model.named_modules()}
    for name, module in modules.items():
        path = name or ROOT_NAME
        # The row of the module that holds experts tells what their layers do.
        parts = [module, *expert_parts(module)]
        stores = _union(map(_stored_formats, parts))
        row = traced.get(path)
        if row is None and not stores:
            continue
        flow = ["not called", "", "", ""]
        if row is not None:
            rows = [traced[paths[part]] for part in parts if paths[part] in traced]
            for key in ("computes", "gradients"):
                row[key] = _union(each[key] for each in rows)
            flow = [row[key] for key in _FLOW_COLUMNS]
        # The layer that an adapter wraps has the wrapper's name in the report.
        reported = None
        if not hasattr(module, "base_layer"):
            reported = conversions.get(path.removesuffix(".base_layer"))
        converted = _conversion_text(reported, module, built.model, name)
        yield path, type(module).__name__, stores, *flow, converted


def _union(formats: Iterable[str]) -> str:
    """Return the formats in any of several texts, as `bfloat16 nf4`."""
    return " ".join(sorted(set(" ".join(formats).split())))


def _stored_formats(module: nn.Module) -> str:
    """Return the formats of a module's own parameters, of packed ones that of the numbers."""
    formats = set()
    for key, parameter in module.named_parameters(recurse=False):
        packed = getattr(parameter, "quant_state", None)
        own_format = getattr(module, "format", None)
        if packed is not None:
            formats.add(packed.quant_type)
        elif key == "weight" and isinstance(own_format, WeightFormat):
            formats.add(own_format.label)
        else:
            formats.add(tensor_facts.dtype_name(parameter.dtype))
    return " ".join(sorted(formats))


def _conversion_text(
    reported: ModuleConversion | None, module: nn.Module, model: nn.Module, name: str
) -> str:
    """Return whether a module was converted, from which class, and why not.

    Args:
        reported: its row of the conversion report; None where the conversion did not look at it.
        module: the module.
        model: that holds it.
        name: its dotted name in the model.
    """
    if reported is None:
        # precision.keep_fp32 selects the module or one that holds it.
        holders = ["", *module_tree.name_prefixes(name)]
        is_kept = any(isinstance(model.get_submodule(each), KeptInFloat32) for each in holders)
        return f"no: {KEEP_FP32_REASON}" if is_kept else "-"
    if not reported.is_converted:
        return f"no: {reported.why}"
    remark = f" ({reported.why})" if reported.why else ""
    if isinstance(module, Experts):
        return f"yes: {', '.join(module.transposed)}{remark}"
    # A conversion may leave the class as it is, and replace the weight.
    is_same_class = reported.kind == type(module).__name__
    return f"{'yes' if is_same_class else f'from {reported.kind}'}{remark}"
