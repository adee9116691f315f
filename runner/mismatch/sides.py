"""The two sides of a mismatch on the same weights, and what each computes of a batch or a text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from runner.core import (
    Batch,
    ConfigError,
    ConversionReport,
    LoadedCheckpoint,
    Precision,
    RunContext,
    RunSpec,
    Task,
    TrainState,
    Unavailable,
    accelerators,
    batch_layout,
    random_streams,
    run_context,
    targets,
    training_loop,
)
from runner.mismatch.record import Mismatch, TokenScores, compare_log_probabilities
from runner.mismatch.room import MismatchSpec
from runner.modes.execution import build_execution, starting_model
from runner.training.model import restore_precision_state, restoring_builder
from runner.training.state_dict import checkpoint_state_dict
from runner.training.tasks.language import CausalLM, Language
from runner.training.tasks.tensor_task import ClassTask

CACHE_NAMES = ("cache", "past_key_values")
"""What Hugging Face's models call the keys and values of earlier tokens, since 5.20 and before."""
PADDING_TOKENS = 8
"""Tokens by which a batch is cut for its other padding: products then have other shapes."""


@dataclass(frozen=True)
class Side:
    """An execution of the model.

    Attributes:
        name: the precision, with the keys that are its own.
        spec: of the execution.
        state: its model, precision, task and device.
        report: what its precision converted.
    """

    name: str
    spec: RunSpec
    state: TrainState
    report: ConversionReport

    @property
    def model(self) -> nn.Module:
        """Return the model."""
        return self.state.plain_model

    @property
    def task(self) -> ClassTask:
        """Return the task, which predicts classes."""
        assert isinstance(self.state.task, ClassTask)
        return self.state.task

    @property
    def cache_name(self) -> str:
        """Return the argument of the model's forward that takes the keys and values of earlier
        tokens; empty without one."""
        names = signature(self.model.forward).parameters
        return next((name for name in CACHE_NAMES if name in names), "")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return the context of forwards in evaluation mode, which leave no trace."""
        state = self.state
        with (
            torch.no_grad(),
            state.precision.session(self.model, state.device),
            random_streams.saved_forward_state(self.model, state.device),
            state.precision.eval_context(self.model),
            training_loop.evaluation_mode(state.model, state.task, state.device),
        ):
            yield

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of all classes, float [B, T, C], and labels int64 [B, T], on the
        CPU; T is 1 for a class per example."""
        inputs, target = on_device(batch, self.state.device)
        with self.computing():
            output = self.state.call(inputs)
        logits, labels = self.task.aligned(output, target)
        logits = logits.movedim(self.task.class_dim, -1)
        rows = len(labels)
        return (
            log_probabilities(logits).reshape(rows, -1, logits.shape[-1]),
            labels.reshape(rows, -1).cpu(),
        )

    def score_text(self, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """Return log-probabilities of the token after each one, float [B, T, V], on the CPU.

        Args:
            tokens: int64 [B, T].
            temperature: divides the logits.
        """
        with self.computing():
            return log_probabilities(self._logits(tokens) / temperature)

    def _logits(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.state.device)
        inputs: Any = tokens
        if self.cache_name:
            inputs = batch_layout.KeywordInputs(input_ids=tokens)
        return self.task.select(self.state.call(inputs))

    def generate(self, prompts: Tensor, count: int, settings: MismatchSpec) -> "Generation":
        """Draw tokens one after the other, with a cache where the model has one.

        Args:
            prompts: int64 [B, P].
            count: tokens that are drawn for each prompt.
            settings: its temperature, top_k and top_p say what is drawn.
        """
        name = self.cache_name
        tokens, cache = prompts, None
        drawn, masses = [], []
        with self.computing():
            for _ in range(count):
                if name:
                    # Past the precision's cast of inputs, which would cast the cache.
                    new = tokens if cache is None else tokens[:, -1:]
                    with self.state.forward_context():
                        inputs = {"input_ids": new.to(self.state.device), name: cache}
                        output = self.state.model(**inputs, use_cache=True)
                    cache = getattr(output, name)
                    logits = self.task.select(output)[:, -1]
                else:
                    logits = self._logits(tokens)[:, -1]
                scores = log_probabilities(logits / settings.temperature)
                truncated, kept = truncate(scores, settings.top_k, settings.top_p)
                chosen = torch.multinomial(truncated.exp(), 1)
                tokens = torch.cat([tokens, chosen], 1)
                drawn.append(scores.gather(-1, chosen))
                masses.append(kept)
        return Generation(tokens, torch.cat(drawn, 1), torch.stack(masses, 1))


class Generation(NamedTuple):
    """A generated text.

    Attributes:
        tokens: int64 [B, P + N], the prompts with what was drawn.
        scores: log-probabilities of the drawn tokens before truncation, float [B, N].
        kept: probability of the tokens that were drawn from, [B, N].
    """

    tokens: Tensor
    scores: Tensor
    kept: Tensor


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def first_rows(batch: Batch, count: int) -> Batch:
    """Return the first examples of a batch."""
    return tree_map_only(Tensor, lambda t: t[:count] if t.dim() else t, batch)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log-probabilities on the CPU, in float32, or in float64 of such logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.detach().to(wide).log_softmax(-1).cpu()


def truncate(
    log_probabilities: Tensor, top_k: int | None = None, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities that truncated sampling draws by, and the kept mass.

    A drawn token is more probable than before by the kept mass: the log-probability that a server
    reports after truncation is larger by -log(kept mass) than the one of the whole distribution.

    Args:
        log_probabilities: float [..., C].
        top_k: most probable classes that are kept; None for all.
        top_p: classes are kept, the most probable first, until their probability reaches it
            (nucleus sampling, arXiv:1904.09751).

    Returns:
        [..., C], -inf for a class that is left out; and [...].
    """
    ordered, order = log_probabilities.sort(-1, descending=True)
    mass = ordered.exp()
    is_kept = torch.ones_like(mass, dtype=torch.bool)
    if top_p < 1:
        is_kept = mass.cumsum(-1) - mass < top_p
    if top_k is not None:
        is_kept[..., top_k:] = False
    kept = mass.where(is_kept, 0.0).sum(-1)
    truncated = ordered.where(is_kept, float("-inf")) - kept.log().unsqueeze(-1)
    return truncated.gather(-1, order.argsort(-1)), kept


def build_sides(
    run: RunContext,
    specs: Sequence[RunSpec],
    names: Sequence[str],
    saved: LoadedCheckpoint | None,
    batch: Batch,
) -> tuple[Side, Side]:
    """Return the side that trains, and the one that serves the weights that it then has.

    Args:
        run: of the mode.
        specs: of the side that trains, and of the one that serves.
        names: of both.
        saved: a run's checkpoint; None for init.weights or fresh weights.
        batch: for the trial forward that proves a conversion.

    Raises:
        ConfigError, Unavailable: a side cannot compute here, or cannot take the weights.
    """
    training = _build(run, specs[0], names[0], saved, batch)
    content = checkpoint_state_dict(training.state, specs[0])
    served = LoadedCheckpoint(Path("weights"), content)
    try:
        return training, _build(run, specs[1], names[1], served, batch)
    except Unavailable as error:
        name = specs[1].precision["name"]
        remedy = f"Type serving=precision={name},precision.emulate=true, or another precision."
        raise Unavailable(error.what, remedy) from error


def _build(
    run: RunContext, spec: RunSpec, name: str, saved: LoadedCheckpoint | None, batch: Batch
) -> Side:
    precision: Precision = targets.build_group("precision", spec.precision)
    device = accelerators.choose_accelerator(spec.accelerator.name, spec.accelerator.index).device
    precision.require(device)
    setup = run_context.TrainingSetup(spec, precision, run.task, device)
    random_streams.seed_all(spec.seed)
    make = restoring_builder(spec, precision, saved) if saved else starting_model(setup)
    built, state = build_execution(setup, make, lambda: batch[0])
    if saved:
        restore_precision_state(built.model, precision, saved)
    return Side(name, spec, state, built.report)


def compare_scores(training: Side, serving: Side, batches: Sequence[Batch]) -> Mismatch:
    """Return the record of two sides over batches."""
    scores = []
    for batch in batches:
        ours, labels = training.score(batch)
        scores.append(TokenScores.of(ours, serving.score(batch)[0], labels))
    return TokenScores.record(scores)


def check_task(run: RunContext) -> None:
    """Raise ConfigError where the task predicts neither classes nor tokens."""
    if not isinstance(run.task, ClassTask):
        raise ConfigError(
            "mode=mismatch compares log-probabilities of classes or tokens, and "
            f"{type(run.task).__name__} predicts none. Allowed: classification, language and what "
            "derives from them; mode=diff compares any task."
        )


def text_of(task: Task, batch: Batch) -> Tensor | None:
    """Return the tokens of a batch, int64 [B, T], of which the first half is a text; None where the
    task is no next-token prediction, or that half is padded."""
    inputs = batch[0]
    if type(task) not in (Language, CausalLM):
        return None
    mask = None
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        inputs = inputs.get("input_ids")
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.shape[1] < 2:
        return None
    is_padded = mask is not None and not mask[:, : inputs.shape[1] // 2].bool().all()
    return None if is_padded else inputs.cpu()


def measure_floor(side: Side, batch: Batch, kinds: Sequence[str]) -> dict[str, Mismatch]:
    """Return how far a side is from itself in other executions, by what was changed.

    Args:
        side: is executed.
        batch: is scored.
        kinds: of runner.mismatch.room.FLOORS; what a side does not have is left out.
    """
    found = {}
    scores, labels = side.score(batch)
    for kind, execute in _EXECUTIONS.items():
        if kind in kinds and (kind != "padding" or labels.shape[1] > 2 * PADDING_TOKENS):
            other, counted = execute(side, batch)
            same = scores[:, : other.shape[1]]
            found[kind] = TokenScores.record([TokenScores.of(same, other, counted)])
    return found


def _one_by_one(side: Side, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the scores of a batch whose examples are each a batch of their own."""
    target = batch[1]
    parts = []
    for i in range(len(target)):
        row = tree_map_only(Tensor, lambda t, i=i: t[i : i + 1] if t.dim() else t, batch)
        parts.append(side.score(row))
    scores, labels = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(labels)


def _cut(side: Side, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the scores of a batch without its last tokens."""
    size = batch[1].shape[:2]
    return side.score(
        tree_map_only(Tensor, lambda t: t[:, :-PADDING_TOKENS] if t.shape[:2] == size else t, batch)
    )


def _compiled(side: Side, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the scores of the compiled model."""
    side.model.compile()
    try:
        return side.score(batch)
    finally:
        side.model._compiled_call_impl = None


_EXECUTIONS: Mapping[str, Callable[[Side, Batch], tuple[Tensor, Tensor]]] = {
    "batch": _one_by_one,
    "padding": _cut,
    "compile": _compiled,
}


def compare_generation(
    training: Side, serving: Side, text: Tensor, settings: MismatchSpec
) -> tuple[Mismatch, Mismatch, Generation]:
    """Have one side generate and the other one score it.

    Args:
        training: scores.
        serving: generates.
        text: int64 [B, T], whose first tokens are the prompts.
        settings: how many tokens are drawn, and how.

    Returns:
        The record of the drawn tokens, that of the serving side against itself without its cache,
        and what was drawn.
    """
    count = min(settings.new_tokens, text.shape[1] // 2)
    prompts = text[:, :-count]
    drawn = serving.generate(prompts, count, settings)
    start = prompts.shape[1]
    chosen = drawn.tokens[:, start:].unsqueeze(-1)
    own, other = (
        side.score_text(drawn.tokens, settings.temperature)[:, start - 1 : -1]
        .gather(-1, chosen)
        .squeeze(-1)
        for side in (training, serving)
    )
    return (
        compare_log_probabilities(own, drawn.scores),
        compare_log_probabilities(other, drawn.scores),
        drawn,
    )
