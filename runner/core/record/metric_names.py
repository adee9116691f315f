"""Name the metrics of a run. Dashboards, reports and users' scripts rely on these names."""

import re
from collections.abc import Iterable

METRICS = {
    "train/loss": "mean over the step's examples, unscaled",
    "train/lr": "learning rate in force in that step, of the first optimizer",
    "train/<name>": "a value that the task returns beside its loss, mean over the same labels",
    "lr/<group>": "learning rate in force in that step, of each named group of parameters "
    "(optimizer.groups, optimizer.layer_decay, several optimizers)",
    "train/grad_norm": "2-norm of all gradients, unscaled, before clipping",
    "loss_scale/value": "loss scale in force during that step",
    "loss_scale/changes": "the same where it changes, the value before and after: a chart of a few "
    "hundred points shows every dip",
    "loss_scale/overflow": "1 where gradients were not finite and the step was skipped, else 0",
    "loss_scale/skipped_steps": "skipped steps so far, this one included",
    "perf/step_ms": "mean host milliseconds per step since the last transfer of records",
    "perf/examples_per_second": "over the same steps, evaluations not counted",
    "perf/mean_examples_per_second": "speed of the whole run without its first interval and its "
    "evaluations, as in reports; once, when the run has finished",
    "perf/mean_step_ms": "mean host milliseconds per step of the same steps, once",
    "memory/peak_mib": "peak so far: allocated device memory, or a CPU process's resident set",
    "memory/compared_mib": "memory that reports compare: the peak of allocated device memory, on a "
    "CPU memory/weights_mib plus memory/optimizer_mib; once, when the run has finished",
    "memory/weights_mib": "parameters and buffers after conversion, once",
    "memory/optimizer_mib": "optimizer state after the first steps, once",
    "fp8/amax/<module>": "largest magnitude in the amax history of the module's input (FP8 with "
    "delayed scaling, at each transfer)",
    "fp8/scale/<module>": "scale in force for the module's input (the same)",
    "experts/load_max/<module>": "tokens of the layer's busiest expert, relative to an even share: "
    "1 to the number of experts (mixtures of experts: last micro-batch, at each transfer)",
    "experts/load_entropy/<module>": "entropy of the experts' shares of the tokens, in nats: its "
    "largest value, ln of the number of experts, is an even load (the same)",
    "experts/idle/<module>": "experts that no token chose (the same)",
    "experts/dropped/<module>": "share of the tokens' choices that count for nothing: their weight "
    "is 0, or no expert has their number (the same)",
    "experts/entropy/<module>": "entropy of the weights of a token's chosen experts, in nats, mean "
    "over the tokens: at most ln k, 0 where one expert has all the weight (the same)",
    "val/loss": "mean over the labels of the validation set that count (-100 does not)",
    "val/plain_loss": "the mean of the task's own loss, where val/loss is that of task.loss",
    "val/accuracy": "share of right classes, of the labels that count (tasks of classes)",
    "val/perplexity": "exp of the task's own loss (task=language, causal_lm, seq2seq)",
    "val/iou": "intersection over union, mean of the classes that occur (task=segmentation)",
    "val/<name>": "a metric of task.metrics, or a number that task.after_evaluation returns; "
    "val/<name>/<index or key> of several numbers",
    "val/<name>/<metric>": "of one of several validation sets; of the first set val/<metric>, too",
    "test/<metric>": "a metric of the test set, with the last weights, once at the end; "
    "test/<name>/<metric> of several",
    "guard/stagnant_share": "share of half-precision elements with a gradient that a step left "
    "where they were (true half precisions, at each evaluation)",
    "numerics/underflow_share": "share of values that become zero in the format that the run "
    "computes in (float16 for a wider one) and are not negligible, of the worst module "
    "(numerics.every)",
    "numerics/overflow_share": "share of values past the largest of that format, of the worst "
    "module (the same)",
    "numerics/swallowed_share": "share of weights with a gradient that a step would leave "
    "where they are in the format that the run stores in (bfloat16 for a wider one), of the worst "
    "module (the same)",
}


VAL_LOSS = "val/loss"


def numbered(names: Iterable[str]) -> list[str]:
    """Return names of which each that is there already gets a number."""
    distinct: dict[str, None] = {}
    for name in names:
        free = name
        number = 2
        while free in distinct:
            # MLflow's limit is 250 characters; the rest is for the number.
            free = f"{name[:240]}_{number}"
            number += 1
        distinct[free] = None
    return [*distinct]


FORBIDDEN_CHARACTERS = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in the name of a metric."""


def legal_names(names: Iterable[str]) -> list[str]:
    """Return names with an underscore for each forbidden character; names that become equal, as
    h.* and h.? do, get a number."""
    return numbered(FORBIDDEN_CHARACTERS.sub("_", name) for name in names)


METRIC_NAME = re.compile(r"[^/\x00-\x1f]+(/[^/\x00-\x1f]+)*")
"""Names that the user's code may give to metrics."""
RESERVED_PREFIXES = sorted({name.partition("/")[0] for name in METRICS} | {"system"})
"""First parts of the names of metrics that the runner and MLflow record."""
