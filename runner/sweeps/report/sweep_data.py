"""Hold the jobs of a sweep, and state once what they say, for everything that shows it."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import yaml

from runner.config.python_objects import given_keys
from runner.core import (
    ConfigError,
    Room,
    RunResult,
    files,
    fmt,
    layout,
    run_result,
    secrets,
    terminal,
)
from runner.sweeps.other_programs import busy_sentence
from runner.sweeps.report.advice_page import advice_answer
from runner.sweeps.report.conclusion import (
    Conclusion,
    failure_sentence,
    frozen_sentence,
    sweep_conclusion,
    two_sweeps_conclusion,
)
from runner.sweeps.report.wording import (
    join_names,
    rating_words,
    stagnation_sentence,
    unasked_sentences,
    verdict_words,
)
from runner.sweeps.sweep_resume import RUNNER_COMMAND, Command, fixing_word, resume_command
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.answer import Answer, AnswerRecord
from runner.sweeps.verdict.compare import (
    BASELINE,
    Comparison,
    compare_with_baselines,
    group_name,
    job_name,
)
from runner.sweeps.verdict.equal_loss import JobCurves, with_equal_loss
from runner.sweeps.verdict.gate import GateVerdict, gate_verdict
from runner.sweeps.verdict.ranking import Advice, jobs_of, rank_precisions
from runner.sweeps.verdict.statistics import Difference, Tolerance, Verdict
from runner.tracking.history import Curve
from runner.tracking.result_table import shared_settings

MIN_LEARNING_STEPS = 20
"""Recorded losses of a job from which on they say whether it has learned."""
_MACHINE_FACTS = ("python", "platform", "cuda", "threads", *layout.GIT_KEYS)


@dataclass(frozen=True)
class JobSettings:
    """What a job ran with; what is not known of it is missing.

    Attributes:
        config: values of the resolved config by dotted key, as YAML writes them.
        environment: python, platform, cuda, threads, commit and the version of each package.
    """

    config: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_texts(cls, config: str, environment: str) -> "JobSettings":
        """Return the settings that the texts of a run's two files hold; damaged ones hold none."""
        facts = json_mapping(environment)
        known = {name: facts.get(name) for name in _MACHINE_FACTS}
        packages = facts.get("packages")
        if isinstance(packages, dict):
            known |= packages
        texts = {str(name): str(value) for name, value in known.items() if value is not None}
        return cls(flat_config(config), texts)


@dataclass(frozen=True)
class Job:
    """One job: its result, and its metrics over the steps exactly as they were recorded.

    Attributes:
        curves: by metric name, see load_from_store; empty for a job that never trained.
        read_settings: reads what the job ran with, which not every report needs.
        router_choices: of a mixture of experts, the experts of each token in the first step, by
            layer.
    """

    result: RunResult
    curves: Mapping[str, Curve] = field(default_factory=dict)
    read_settings: Callable[[], JobSettings] = JobSettings
    router_choices: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepData:
    """A sweep, complete or in part.

    Attributes:
        jobs: in the order in which the command asked for them.
        commands: the commands typed, one per machine or process that took part.
        is_stopped: whether a signal ended it before its last job.
        job_count: how many jobs it has, those that never began included; 0 if unknown.
        request: of mode=advise; None for a sweep that the user laid out.
        fetch_failures: artifacts of the store that could not be fetched, and why.
        notes: sentences on the jobs of two sweeps, see join_sweeps.
        busy: share of the processors that other programs kept busy, where jobs trained on a CPU.
        swept_precisions: precisions that the command lists.
        folder: of the sweep, if it can be resumed here; else empty.
        tolerance: accepted loss above the baseline's.
        accepts_untried: jobs that were not tried are no failure as long as another one finishes.
    """

    jobs: Sequence[Job]
    commands: Sequence[str] = ()
    sweep_id: str = ""
    is_stopped: bool = False
    job_count: int = 0
    request: AdviseRequest | None = None
    fetch_failures: Sequence[str] = ()
    notes: Sequence[str] = ()
    busy: float = 0.0
    swept_precisions: Sequence[str] = ()
    folder: str = ""
    tolerance: Tolerance = field(default_factory=Tolerance)
    accepts_untried: bool = False

    @cached_property
    def results(self) -> list[RunResult]:
        """Return the result of each job."""
        return [job.result for job in self.jobs]

    @cached_property
    def _statuses(self) -> Counter[str]:
        return Counter(result.status for result in self.results)

    @cached_property
    def compared(self) -> list[Comparison]:
        """Return each group of jobs that differ in their seeds alone, against its baseline."""
        found = compare_with_baselines(self.results, self.busy, self.tolerance, self.untrained)
        return [with_equal_loss(each, self._curves, self.tolerance) for each in found]

    @property
    def _curves(self) -> JobCurves:
        return {id(job.result): job.curves for job in self.jobs}

    @cached_property
    def advice(self) -> Advice | None:
        """Return what mode=advise and mode=gate say of each precision, None for any other sweep."""
        if not self.request:
            return None
        return rank_precisions(self.results, self.request, self.untrained, self._curves)

    @cached_property
    def gate(self) -> GateVerdict | None:
        """Return the verdict of mode=gate, None for any other sweep."""
        return gate_verdict(self.advice) if self.advice else None

    @cached_property
    def answer(self) -> Answer:
        """Return what the jobs say: whatever shows or records it is made from this value."""
        found = advice_answer(self.advice, self.gate) if self.advice else self._compared_answer()
        statuses = self._statuses
        failed = statuses["failed"] + statuses["stopped"]
        is_accepted = self.accepts_untried and "finished" in statuses
        if self.advice and not self.is_stopped:
            # A precision that fails or is not available is an answer: nothing failed once one is
            # recommended.
            is_accepted = True
            failed = 0 if self.advice.recommendation else failed
        status = 0 if is_accepted or set(run_result.UNTRIED).isdisjoint(statuses) else 2
        if self.gate:
            # The exit status 1 of a gate means rejected, and nothing else.
            status = 2 if failed else self.gate.exit_status
        elif failed:
            status = 1
        record = found.record if found.table else self._record(found)
        return replace(found, failed=failed, exit_status=status, record=record)

    def _compared_answer(self) -> Answer:
        """Return the answer of a sweep that the user laid out."""
        compared = self.compared
        groups = [comparison.group for comparison in compared]
        is_on_cpu = any(group.is_on_cpu for group in groups)
        failures = failure_sentence(compared, self._missing_jobs_clause())
        first = [*filter(None, [failures, self._untrained_sentence()])]
        others = [
            frozen_sentence(compared),
            *unasked_sentences(jobs_of(compared)),
            stagnation_sentence(groups),
            self._flips_sentence(),
        ]
        last = [*filter(None, [busy_sentence(self.busy if is_on_cpu else 0.0)])]
        caveats = [*first, *filter(None, others), *last]
        noted = [*first, *last]
        if self.lacks_jobs or (self.is_stopped and "stopped" in self._statuses):
            of_all = f" of {self.job_count}" if self.job_count else ""
            finished = self._statuses["finished"]
            text = f"No answer yet: {finished}{of_all} jobs finished. Resume the sweep."
            command = resume_command(self.folder) if self.folder else None
            return Answer(text, caveats, noted, command=command, is_unfinished=True)
        own = next(filter(None, (room.sweep_answer(self.results) for room in Room.installed)), None)
        if own:
            return replace(own, remarks=[*own.remarks, *first], noted=first)
        if any(result.sweep for result in self.results):
            found = two_sweeps_conclusion(compared)
        else:
            found = sweep_conclusion(compared)
        command = self._next_command(found)
        # Without an aim the command says as much.
        typed = self._typed_sentence(found) if found.aim or not command else ""
        remarks = [*found.details, *filter(None, [typed]), *caveats]
        return Answer(found.text, remarks, noted, found.pick, command)

    def _typed_sentence(self, found: Conclusion) -> str:
        """Return what to type next; empty for trainings by another trainer."""
        words = found.words
        if not words or not any(result.overrides for result in self.results):
            return ""
        if self._can_resume_with(words):
            words = resume_command(self.folder, *words).words
        return f"Type {' '.join(filter(None, [terminal.quote_command(words), found.aim]))}."

    def _next_command(self, answer: Conclusion) -> Command | None:
        """Return the sweep's own command with the words that an answer asks for."""
        typed = answer.words
        if self._can_resume_with(typed):
            return resume_command(self.folder, *typed)
        words = self._command_words()
        if words[:3] != RUNNER_COMMAND or given_keys() or not typed:
            return None
        # A sweep is a new one, and gets a folder of its own.
        dropped = [f"{fmt.override_key(word)}=" for word in typed] + ["hydra.sweep.dir="]
        if answer.pick:
            chosen = (result.left_out for result in self.results if typed[0] in result.overrides)
            left_out = next(chosen, ())
            presets = ("sweep", "hydra.", "hydra/", "launcher=", "-m", "--multirun")
            dropped += ["seed=", *presets, *left_out]
        kept = [word for word in words[3:] if not word.lstrip("+").startswith(tuple(dropped))]
        return Command("run", [*kept, *typed])

    def _command_words(self) -> list[str]:
        """Return the words of the sweep's command; empty for several commands."""
        # A store may hold what nobody could type.
        with suppress(ValueError):
            return shlex.split(self.commands[0]) if len(self.commands) == 1 else []
        return []

    def _can_resume_with(self, words: Sequence[str]) -> bool:
        """Return whether the sweep itself can get what an answer lacks: more seeds in its list, or
        another tolerance."""
        command = self._command_words()
        if not self.folder or command[:3] not in ([], RUNNER_COMMAND):
            return False
        keys = [*map(fmt.override_key, words)]
        return keys == ["advise.max_gap"] or (keys == ["seed"] and not fixing_word(command))

    def _record(self, answer: Answer) -> AnswerRecord:
        """Return what MLflow's parent run holds of an answer."""
        sign = self.advice.request.sign if self.advice else 1
        judged = self._judged()
        metrics = {}
        pick = answer.pick
        # The dashboard of an experiment has a column of each.
        tags = {"answer": answer.sentence, "recommended": pick.group.name if pick else ""}
        if pick and pick.speed_ratio:
            metrics["answer/recommended_speed_ratio"] = pick.speed_ratio.value
        for comparison, verdict in judged:
            group = comparison.group
            difference = comparison.difference
            numbers = {
                "gap": sign * difference.value
                if difference
                else group.change and group.change.mean,
                "gap_half_width": difference and difference.ci_half_width,
                "speed_ratio": comparison.speed_ratio and comparison.speed_ratio.value,
                "equal_loss_speed_ratio": comparison.equal_loss and comparison.equal_loss.value,
                "memory_ratio": comparison.memory_ratio,
            }
            # The first device's names stay when jobs of another device join the sweep.
            is_first = group.device == judged[0][0].group.device
            name = _metric_name(group.name if is_first else f"{group.name} {group.device}")
            tags[f"verdict/{name}"] = verdict
            for key, number in numbers.items():
                # With too few seeds the interval is infinite.
                if number is not None and math.isfinite(number):
                    metrics[f"answer/{key}/{name}"] = number
        for name, layers in self.router_flips.items():
            metrics[f"answer/router_flips/{_metric_name(name)}"] = fmean(layers.values())
        # The steps grow when a sweep is resumed: of two points at one step the first one stays.
        return AnswerRecord(metrics, tags, sum(result.steps for result in self.results))

    def _judged(self) -> list[tuple[Comparison, str]]:
        """Return each comparison as the answer takes it, with its verdict in words."""
        if self.gate:
            look = self.gate.looks[-1] if self.gate.looks else None
            tested = look and Difference(Verdict.UNCLEAR, look.gap, look.seeds, look.half_width)
            comparison = replace(self.gate.precision.comparison, difference=tested)
            return [(comparison, self.gate.decision)]
        if not self.advice:
            return [(comparison, verdict_words(comparison)) for comparison in self.compared]
        return [(verdict.comparison, rating_words(verdict)) for verdict in self.advice.verdicts]

    @property
    def lacks_jobs(self) -> bool:
        """Return whether jobs of the sweep did not begin."""
        return self.job_count > len(self.jobs) or (self.is_stopped and not self.job_count)

    @property
    def is_unfinished(self) -> bool:
        """Return whether resuming the sweep would run a job.

        That is one that did not begin, was stopped, or failed for another reason than its numbers.
        """
        # A trial of mode=advise that fails is an answer about its precision.
        if self.request:
            return self.is_stopped
        # A job that diverged would diverge again.
        repeatable = {result.status for result in self.results if not result.diverged}
        return self.is_stopped or self.lacks_jobs or bool(repeatable & {"failed", "stopped"})

    def _missing_jobs_clause(self) -> str:
        """Return a clause on the jobs that did not begin; empty if every job began."""
        if not self.lacks_jobs:
            return ""
        if not self.job_count:
            return "the sweep was stopped before its last job"
        missing = self.job_count - len(self.jobs)
        begun = [result.precision for result in self.results]
        names = [name for name in self.swept_precisions if name not in begun]
        among = f", among them all of {join_names(names)}" if names else ""
        return f"{missing} of the sweep's {self.job_count} jobs had not begun{among}"

    @cached_property
    def router_flips(self) -> dict[str, dict[str, float]]:
        """Return by group and layer the share of tokens whose experts are others than in 32-true.

        It is of the first step, on equal weights and batches, and the mean over seeds. Empty for
        models without routers.
        """

        def key(job: Job) -> tuple[object, ...]:
            return job.result.seed, job.result.device, shared_settings(job.result.settings)

        baselines = {key(job): job for job in self.jobs if job.result.precision == BASELINE}
        shares = []
        for job in self.jobs:
            own = baselines.get(key(job), job)
            for layer, chosen in job.router_choices.items():
                base = own.router_choices.get(layer, ())
                if own is not job and len(chosen) == len(base) > 0:
                    share = fmean(a != b for a, b in zip(chosen, base, strict=True))
                    shares.append((group_name(job.result), (layer, share)))
        flips = {}
        for group, of_group in fmt.grouped(shares).items():
            by_layer = fmt.grouped(of_group).items()
            flips[group] = {layer: fmean(values) for layer, values in by_layer}
        return flips

    def _flips_sentence(self) -> str:
        """Return how many tokens routers sent to other experts; empty without routers."""
        flips = {name: fmean(layers.values()) for name, layers in self.router_flips.items()}
        texts = join_names(f"{name} {fmt.format_percent(share)}" for name, share in flips.items())
        start = f"Tokens with other experts than in {BASELINE}, in the first step"
        return f"{start}: {texts}." if flips else ""

    @cached_property
    def untrained(self) -> list[RunResult]:
        """Return the results of the jobs that ended with no lower training loss than that of the
        weights that they began with."""
        found = []
        for job in self.jobs:
            curve = job.curves.get("train/loss")
            if job.result.outcome == "finished" and curve is not None:
                steps, _, losses = curve
                # The first step's loss is of the weights before any update.
                is_known = len(losses) >= MIN_LEARNING_STEPS and steps[0] == 1
                if is_known and losses[-len(losses) // 10 :].mean() >= losses[0]:
                    found.append(job.result)
        return found

    def _untrained_sentence(self) -> str:
        """Return which jobs have learned nothing; empty without any."""
        names = [job_name(result) for result in self.untrained]
        start = f"The training loss of {join_names(names)} ended no lower than in the first step"
        return f"{start}: where nothing is learned, precisions do not differ." if names else ""


def _metric_name(name: str) -> str:
    """Return a group's name as MLflow takes it, which allows no equals sign."""
    return secrets.redact(name).replace("=", ":")


def json_mapping(text: str | bytes) -> dict[str, Any]:
    """Return the mapping that a file of a run holds; empty for a missing or damaged one."""
    content = None
    with suppress(ValueError):
        content = json.loads(text)
    return content if isinstance(content, dict) else {}


def flat_config(text: str) -> dict[str, str]:
    """Return the values of a config by dotted key."""
    content = None
    with suppress(yaml.YAMLError, RecursionError, ConfigError):
        # Every value as it is written: "1e-3" is no number for YAML, and None has no name there.
        content = files.check_values(yaml.load(text[: files.MAX_CONFIG_BYTES], yaml.BaseLoader))
    if not isinstance(content, dict):
        return {}
    return {key: _value_text(value) for key, value in fmt.leaves(content)}


def _value_text(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value)
