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
    batch_layout,
    random_streams,
    run_context,
    targets,
    training_loop,
)
from runner.mismatch.record import Mismatch, TokenScores, log_probabilities, widened
from runner.mismatch.room import MismatchSpec
from runner.modes.diff import on_device
from runner.modes.execution import build_execution, starting_model
from runner.training.model import restore_precision_state, restoring_builder
from runner.training.state_dict import checkpoint_state_dict
from runner.training.tasks.language import CausalLM, Language
from runner.training.tasks.tensor_task import ClassTask, part_of

CACHE_NAMES = ("cache", "past_key_values")
"""What Hugging Face's models call the keys and values of earlier tokens, since 5.20 and before."""
PADDING_TOKENS = 8
"""Tokens by which a batch is cut for its other padding: products then have other shapes."""


@dataclass(frozen=True)
class Side:
    """An execution of the model.

    Attributes:
        spec: of the execution.
        state: its model, precision, task and device.
        report: what its precision converted.
    """

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
    def precision_name(self) -> str:
        """Return the name of the precision."""
        return str(self.spec.precision["name"])

    @property
    def cache_name(self) -> str:
        """Return the argument of the model's forward that takes the keys and values of earlier
        tokens, as Hugging Face's models take them; empty without one."""
        if not self.arguments >= {"input_ids", "use_cache"}:
            return ""
        return next((name for name in CACHE_NAMES if name in self.arguments), "")

    @property
    def arguments(self) -> set[str]:
        """Return the names of the arguments of the model's forward."""
        return {*signature(self.model.forward).parameters}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return the context of forwards in evaluation mode, which leave no trace."""
        state = self.state
        with (
            torch.no_grad(),
            state.precision.session(self.model, state.device),
            random_streams.saved_forward_state(self.model, state.device),
            state.precision.eval_context(self.model),
            training_loop.evaluation_mode(state),
        ):
            yield

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, C] and labels int64 [B, T], on the CPU; T is 1 for a class per
        example."""
        inputs, target = on_device(batch, self.state.device)
        with self.computing():
            output = self.state.call(inputs)
        logits, labels = self.task.aligned(output, target)
        logits = logits.detach().movedim(self.task.class_dim, -1).cpu()
        rows = len(labels)
        return logits.reshape(rows, -1, logits.shape[-1]), labels.reshape(rows, -1).cpu()

    def score_text(self, text: "Generation", temperature: float) -> Tensor:
        """Return the logits of drawn tokens, [B, N, V], by one forward without a cache.

        Args:
            text: a generation.
            temperature: divides the logits.
        """
        with self.computing():
            output = self._call(text.tokens)
        logits = self.task.select(output)[:, -text.logits.shape[1] - 1 : -1]
        return widened(logits).cpu() / temperature

    def _call(self, tokens: Tensor, **cache: Any) -> Any:
        """Return the model's output for int64 tokens [B, T], and the keywords of a cache."""
        tokens = tokens.to(self.state.device)
        if "input_ids" not in self.arguments:
            return self.state.call(tokens)
        # Past the precision's cast of inputs, which would cast the cache; tokens are integers.
        with self.state.forward_context():
            return self.state.model(input_ids=tokens, **cache)

    def generate(self, prompts: Tensor, settings: MismatchSpec) -> "Generation":
        """Draw tokens one after the other, with a cache where the model has one.

        Args:
            prompts: int64 [B, P]; as many tokens are drawn at most.
            settings: says how many are drawn, and how.
        """
        name = self.cache_name
        tokens, cache = prompts, None
        outputs, masses = [], []
        with self.computing():
            for _ in range(min(settings.new_tokens, prompts.shape[1])):
                new = tokens if cache is None else tokens[:, -1:]
                output = self._call(new, **({name: cache, "use_cache": True} if name else {}))
                cache = part_of(output, name)
                logits = self.task.select(output)[:, -1:]
                logits = widened(logits).cpu() / settings.temperature
                outputs.append(logits)
                truncated, kept = truncate(
                    log_probabilities(logits[:, 0]), settings.top_k, settings.top_p
                )
                masses.append(kept)
                # What is not finite is drawn from evenly; the record is then not finite either.
                weights = truncated.exp()
                is_finite = weights.isfinite().all(-1, keepdim=True)
                weights = weights.where(is_finite, torch.ones_like(weights))
                tokens = torch.cat([tokens, torch.multinomial(weights, 1)], 1)
        return Generation(tokens, torch.cat(outputs, 1), torch.stack(masses, 1))


class Generation(NamedTuple):
    """A generated text.

    Attributes:
        tokens: int64 [B, P + N], the prompts with what was drawn.
        logits: of the drawn tokens, before truncation, [B, N, V].
        kept_mass: probability of the tokens that were drawn from, [B, N].
    """

    tokens: Tensor
    logits: Tensor
    kept_mass: Tensor

    def record(self, logits: Tensor) -> Mismatch:
        """Return the record of the drawn tokens against other logits of theirs, [B, N, V]."""
        labels = self.tokens[:, -logits.shape[1] :]
        return TokenScores.record([TokenScores.of(logits, self.logits, labels)])


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Return some examples of a batch."""
    return tree_map_only(Tensor, lambda t: t[rows] if t.dim() else t, batch)


def truncate(scores: Tensor, top_k: int | None = None, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities that truncated sampling draws by, and the kept mass.

    A drawn token is more probable than before by the kept mass: the log-probability that a server
    reports after truncation is larger by -log(kept mass) than the one of the whole distribution.

    Args:
        scores: log-probabilities, float [..., C].
        top_k: most probable classes that are kept; None for all.
        top_p: classes are kept, the most probable first, until their probability reaches it
            (nucleus sampling, arXiv:1904.09751).

    Returns:
        [..., C], -inf for a class that is left out; and [...].
    """
    if top_k is None and top_p == 1:
        return scores, torch.ones_like(scores[..., 0])
    ordered, order = scores.sort(-1, descending=True)
    mass = ordered.exp()
    is_kept = mass.cumsum(-1) - mass < top_p
    if top_k is not None:
        is_kept[..., top_k:] = False
    kept = mass.where(is_kept, 0.0).sum(-1)
    truncated = ordered.where(is_kept, float("-inf")) - kept.log().unsqueeze(-1)
    return truncated.gather(-1, order.argsort(-1)), kept


def build_sides(
    run: RunContext, specs: tuple[RunSpec, RunSpec], saved: LoadedCheckpoint | None, batch: Batch
) -> tuple[Side, Side]:
    """Return the side that trains, and the one that serves the weights that it then has.

    Args:
        run: of the mode.
        specs: of the side that trains, and of the one that serves.
        saved: a run's checkpoint; None for init.weights or fresh weights.
        batch: for the trial forward that proves a conversion.

    Raises:
        ConfigError, Unavailable: a side cannot compute here, or cannot take the weights.
    """
    layouts = [targets.build_group("precision", spec.precision).layout for spec in specs]
    if all(layouts) and layouts[0] != layouts[1]:
        ours, theirs = (spec.precision["name"] for spec in specs)
        raise ConfigError(
            f"serving={theirs}: precision={ours} packs the weights, and {theirs} would pack them a "
            "second time. Type serving=<a precision that packs nothing>, for example bf16-true."
        )
    training = _build(run, specs[0], saved, batch)
    served = LoadedCheckpoint(Path("weights"), checkpoint_state_dict(training.state, specs[0]))
    try:
        return training, _build(run, specs[1], served, batch)
    except Unavailable as error:
        name = specs[1].precision["name"]
        remedy = f"Type serving=precision={name},precision.emulate=true, or another precision."
        raise Unavailable(error.what, remedy) from error


def _build(run: RunContext, spec: RunSpec, saved: LoadedCheckpoint | None, batch: Batch) -> Side:
    precision: Precision = targets.build_group("precision", spec.precision)
    precision.require(run.device)
    setup = run_context.TrainingSetup(spec, precision, run.task, run.device)
    random_streams.seed_all(spec.seed)
    make = restoring_builder(spec, precision, saved) if saved else starting_model(setup)
    built, state = build_execution(setup, make, lambda: batch[0])
    if saved:
        restore_precision_state(built.model, precision, saved)
    return Side(spec, state, built.report)


def compare_scores(training: Side, serving: Side, batches: Sequence[Batch]) -> Mismatch:
    """Return the record of two sides over batches.

    Raises:
        ConfigError: no label of the batches counts.
    """
    scores = []
    for batch in batches:
        ours, labels = training.score(batch)
        scores.append(TokenScores.of(ours, serving.score(batch)[0], labels))
    if not any((each.labels != batch_layout.IGNORED_LABEL).any() for each in scores):
        raise ConfigError(
            "mode=mismatch: no label of the validation batches counts. Type a larger "
            "mismatch.batches, or data with labels."
        )
    return TokenScores.record(scores)


def compare_generation(
    training: Side, serving: Side, prompts: Tensor, settings: MismatchSpec
) -> tuple[Mismatch, Generation]:
    """Have one side continue prompts, int64 [B, P], and the other one score what it draws; return
    the record of the drawn tokens, and these."""
    text = serving.generate(prompts, settings)
    return text.record(training.score_text(text, settings.temperature)), text


def check_task(run: RunContext) -> None:
    """Raise ConfigError where the task predicts neither classes nor tokens."""
    if not isinstance(run.task, ClassTask):
        raise ConfigError(
            "mode=mismatch compares log-probabilities of classes or tokens, and "
            f"{type(run.task).__name__} predicts none. Allowed: classification, language and what "
            "derives from them; mode=diff compares any task."
        )


def predicts_next_token(task: Task) -> bool:
    """Return whether a task's logits see the tokens before alone."""
    return type(task) in (Language, CausalLM)


def prompts_of(side: Side, batch: Batch) -> Tensor | None:
    """Return the first half of a batch's texts, int64 [B, T // 2], to continue; None where the task
    is no next-token prediction, or that half is padded."""
    tokens = batch[0]
    mask = None
    if isinstance(tokens, Mapping):
        mask = tokens.get("attention_mask")
        tokens = tokens.get("input_ids") if "input_ids" in side.arguments else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not predicts_next_token(side.task):
        return None
    half = tokens.shape[1] // 2
    is_padded = mask is not None and not mask[:, :half].bool().all()
    return None if is_padded or not half else tokens[:, :half].cpu()


def measure_floor(side: Side, batch: Batch, kinds: Sequence[str]) -> dict[str, Mismatch]:
    """Return how far a side is from itself in other executions, by what was changed.

    Args:
        side: is executed.
        batch: is scored.
        kinds: of runner.mismatch.room.FLOORS; what a side does not have is left out.
    """
    found = {}
    logits, _ = side.score(batch)
    for kind, execute in _EXECUTIONS.items():
        # What is cut off would be seen by the other tokens of another task.
        if kind in kinds and (kind != "padding" or predicts_next_token(side.task)):
            other, labels = execute(side, batch)
            if (labels != batch_layout.IGNORED_LABEL).any():
                scores = TokenScores.of(logits[:, : labels.shape[1]], other, labels)
                found[kind] = TokenScores.record([scores])
    return found


def _one_by_one(side: Side, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the scores of a batch whose examples are each a batch of their own."""
    rows = range(len(batch[1]))
    parts = [side.score(rows_of(batch, slice(row, row + 1))) for row in rows]
    logits, labels = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(labels)


def _cut(side: Side, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the scores of a batch without its last tokens."""
    size = batch[1].shape[:2]
    kept = max(size[1] - PADDING_TOKENS, 1)
    return side.score(
        tree_map_only(Tensor, lambda t: t[:, :kept] if t.shape[:2] == size else t, batch)
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
