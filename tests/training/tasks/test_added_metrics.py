"""task.metrics and task.quality: metrics of torchmetrics beside a task's own."""

import sys
from types import SimpleNamespace

import pytest
import torch
from run_folders import read_json
from states import CPU
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from runner.core.base.errors import ConfigError, ModelError
from runner.core.loop.task import Task
from runner.data.task_target import build_task, task_problems
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import CausalLM, Language, TokenClassification
from runner.training.tasks.model_loss import ModelLoss
from runner.training.tasks.regression import Regression
from runner.training.tasks.segmentation import Segmentation

pytest.importorskip("torchmetrics")
MULTICLASS = "torchmetrics.classification.Multiclass"
ACCURACY = {"_target_": f"{MULTICLASS}Accuracy", "num_classes": 4, "average": "micro"}
F1 = f"{{_target_: {MULTICLASS}F1Score, num_classes: 10, average: macro}}"
RECALL = f"{{_target_: {MULTICLASS}Recall, num_classes: 10, average: none}}"
QUICK = ("task=classification", "train.max_steps=4", "train.eval_every=2")


def task_of(task, **keys):
    return build_task({"_target_": f"{task.__module__}.{task.__name__}", **keys})


def measured(task, batches):
    """Return the metrics of task.metrics and the task's own over some batches."""
    task.added_metrics.begin(CPU, lambda tensor: [tensor])
    totals = 0
    for output, target in batches:
        task.added_metrics.update(*task.metric_inputs(output, target))
        totals = totals + task.totals(output, target)
    return task.added_metrics.values(), task.summarise(totals.tolist())


def random_batch(shape, seed, classes=4, channels_first=False):
    """Return logits and classes of some positions, of which about a third does not count."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, classes, generator=generator)
    labels = torch.randint(classes, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    return (logits.movedim(-1, 1) if channels_first else logits), labels


@pytest.mark.parametrize(
    ("task", "shapes"),
    [
        (Classification, [(12,), (5,)]),
        (TokenClassification, [(3, 6), (2, 7)]),
        (Segmentation, [(2, 4, 5), (1, 4, 5)]),
    ],
)
def test_the_accuracy_of_torchmetrics_is_the_tasks_own(task, shapes):
    is_image = task is Segmentation
    batches = [random_batch(shape, i, channels_first=is_image) for i, shape in enumerate(shapes)]
    added, own = measured(task_of(task, metrics=[ACCURACY]), batches)
    assert added == {"val/multiclass_accuracy": pytest.approx(own["val/accuracy"], rel=1e-6)}


def test_tokens_are_those_that_the_logits_predict():
    logits, labels = random_batch((3, 6), 0)
    aligned, _ = measured(task_of(Language, metrics=[ACCURACY]), [(logits[:, :-1], labels[:, 1:])])
    shifted, _ = measured(task_of(CausalLM, metrics=[ACCURACY]), [(logits, labels)])
    assert shifted == aligned


def test_numbers_of_a_regression():
    batches = [(torch.randn(4, 3), torch.randn(4, 3)), (torch.randn(2, 3), torch.randn(2, 3))]
    task = task_of(Regression, metrics="torchmetrics.MeanSquaredError")
    added, own = measured(task, batches)
    assert added["val/mean_squared_error"] == pytest.approx(own["val/loss"], rel=1e-6)


def test_a_model_that_returns_its_loss_shows_its_logits():
    logits, labels = random_batch((12,), 0)
    output = CausalLMOutput(loss=torch.tensor(1.0), logits=logits)
    added, _ = measured(task_of(ModelLoss, metrics=[ACCURACY]), [(output, labels)])
    own = Classification().summarise(Classification().totals(logits, labels).tolist())
    assert added["val/multiclass_accuracy"] == pytest.approx(own["val/accuracy"], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_metrics_take_half_precision_in_float32(dtype):
    task = task_of(Regression, metrics="torchmetrics.MeanSquaredError")
    task.added_metrics.begin(CPU, lambda tensor: [tensor])
    # In half precision this sum would end at 2048 or 256.
    for _ in range(40):
        task.added_metrics.update(torch.ones(100, dtype=dtype), torch.zeros(100, dtype=dtype))
    metric = task.added_metrics.metrics["mean_squared_error"]
    assert metric.sum_squared_error == 4000
    assert task.added_metrics.values() == {"val/mean_squared_error": 1.0}


class PlainTask(Task):
    """A task of one's own with no constructor."""

    quality = "val/mine"
    direction = "max"

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)

    def totals(self, output, target):
        return torch.stack([(output - target).abs().sum(), torch.tensor(float(target.numel()))])

    def summarise(self, totals):
        return {"val/mine": totals[0] / totals[1]}


def test_a_task_of_ones_own_takes_the_keys():
    task = task_of(PlainTask, metrics={"error": "torchmetrics.MeanAbsoluteError"})
    added, own = measured(task, [(torch.randn(4, 1), torch.randn(4, 1))])
    assert added["val/error"] == pytest.approx(own["val/mine"], rel=1e-6)
    assert (task.quality, task.direction) == ("val/mine", "max")
    compared = task_of(PlainTask, metrics=["torchmetrics.R2Score"], quality="r2_score")
    assert compared.quality == "val/r2_score"


@pytest.mark.parametrize(
    ("keys", "quality", "direction"),
    [
        ({"quality": "val/loss"}, "val/loss", "min"),
        ({"quality": "val/seen/accuracy"}, "val/seen/accuracy", "max"),
        ({"direction": "minimize"}, "val/accuracy", "min"),
        ({"quality": "bleu", "direction": "maximize"}, "val/bleu", "max"),
        ({"quality": "acc/0", "metrics": {"acc": ACCURACY}}, "val/acc/0", "max"),
        ({"quality": "seen/acc", "metrics": {"acc": ACCURACY}}, "val/seen/acc", "max"),
        ({"quality": "r", "metrics": {"r": "torchmetrics.MeanAbsoluteError"}}, "val/r", "min"),
    ],
)
def test_the_direction_follows_from_the_metric(keys, quality, direction):
    task = task_of(Classification, **keys)
    assert (task.quality, task.direction) == (quality, direction)


def test_a_metric_of_unknown_direction_needs_one():
    with pytest.raises(ConfigError, match=r"task\.quality=val/bleu: .* task\.direction=maximize"):
        task_of(Classification, quality="bleu")


def test_what_a_metric_cannot_take_is_said():
    task = task_of(Classification, metrics=[{**ACCURACY, "num_classes": 3}])
    with pytest.raises(ModelError, match=r"multiclass_accuracy fails: .*float32 \[12, 4\] and int"):
        measured(task, [(torch.randn(12, 4), torch.arange(12) % 4)])


def test_a_batch_without_a_label_that_counts():
    task = task_of(Classification, metrics=[ACCURACY])
    nothing = (torch.randn(2, 4), torch.full((2,), -100))
    some = random_batch((12,), 0)
    assert measured(task, [nothing, some])[0] == measured(task, [some])[0]


def test_a_run_records_the_metrics_and_is_compared_by_one(quick, main, tmp_path):
    keys = (f"task.metrics=[{F1},{RECALL}]", "task.quality=multiclass_f1_score")
    quick(*QUICK, *keys, "checkpoint.best=true", "hydra.run.dir=run").check_ok(
        "runs are compared by val/multiclass_f1_score: more is better"
    )
    found = read_json(tmp_path / "run" / "result.json")
    assert (found["quality"], found["direction"]) == ("val/multiclass_f1_score", "max")
    assert found["best"] >= found["metrics"]["val/multiclass_f1_score"] > 0
    recalls = {f"val/multiclass_recall/{i}" for i in range(10)}
    assert recalls | {"val/loss", "val/accuracy", found["quality"]} == set(found["metrics"])
    # One evaluation alone: the metrics of the second one of the run began anew.
    main("mode=evaluate", "checkpoint=run", "tracking=none", "hydra.run.dir=again").check_ok()
    again = read_json(tmp_path / "again" / "result.json")
    assert again["metrics"] == found["metrics"]


def test_metrics_change_no_step(main, tmp_path):
    vit = ("model=vit", "model.layers=1", "model.hidden_dim=16", "model.mlp_dim=16")
    for name, keys in (("plain", ()), ("added", (f"task.metrics={{f1: {F1}}}",))):
        place = f"hydra.run.dir={name}"
        main(*QUICK, *vit, *keys, "model.dropout=0.2", "tracking=none", place).check_ok()
    paths = [tmp_path / name / "result.json" for name in ("plain", "added")]
    plain, added = (read_json(path) for path in paths)
    assert plain["train_loss"] == added["train_loss"]
    assert plain["metrics"].items() < added["metrics"].items()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("[torchmetrics.F1Skore]", "task.metrics[0]=torchmetrics.F1Skore does not import"),
        ("[{_target_: torchmetrics.F1Skore}]", "[0]._target_=torchmetrics.F1Skore does not import"),
        (f"[{{_target_: {MULTICLASS}F1Score, clases: 1}}]", "[0].num_classes is needed by torchm"),
        ("3", "task.metrics=3 does not fit. Allowed: a dotted path"),
        ("[{num_classes: 3}]", "task.metrics[0]={'num_classes': 3} does not fit"),
        ("torch.nn.ReLU", "task.metrics=torch.nn.ReLU is a ReLU, no torchmetrics"),
        ("torchmetrics.functional.accuracy", "is a function, no torchmetrics.Metric"),
        ("{_target_: torchmetrics.MetricCollection, metrics: []}", "List its metrics one by one"),
        (f"[{F1},{F1}]", "task.metrics has 2 metrics of the name multiclass_f1_score"),
        (f"{{a/b: {F1}}}", "a/b is no metric's name"),
    ],
)
def test_wrong_metrics_are_refused(refusal, metrics, message):
    assert message in refusal(f"task.metrics={metrics}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["task.metrics=torch.nn.ReLU"], "task.metrics=torch.nn.ReLU is a ReLU, no torchmetrics"),
        ([f"task.metrics={{accuracy: {F1}}}"], "accuracy has the name of a metric that the task"),
        ([f"task.metrics=[{F1.replace('10', '3')}]"], "task.metrics: multiclass_f1_score fails"),
        (["task.metrics={_target_: torchmetrics.ROC, task: binary}"], "task.metrics: roc "),
        (["task.quality=f2", "task.direction=maximize"], "task.quality=val/f2 is not recorded"),
        (["task.quality=f2", "task.direction=maximize"], "one of: val/loss, val/accuracy."),
        (["task.quality=3"], "task.quality=3 does not fit. Allowed: a metric's name"),
        (["task.direction=up"], "task.direction=up is not known. Allowed: maximize, minimize"),
    ],
)
def test_wrong_keys_are_refused(quick, keys, message):
    done = quick("task=classification", *keys).check_refused(message)
    assert "epoch 1" not in done.stdout


def test_the_extra_is_named_where_torchmetrics_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    node = {"_target_": f"{Classification.__module__}.Classification"}
    (problem,) = task_problems({**node, "metrics": "torchmetrics.R2Score"})
    assert problem.endswith("Type pip install 'precision-runner[metrics]'.")


def test_a_task_that_takes_a_key_itself_is_given_it():
    node = {"_target_": "test_added_metrics.takes_metrics", "metrics": 3}
    assert list(task_problems(node)) == []
    assert build_task(node).metrics == 3


def takes_metrics(metrics):
    return SimpleNamespace(metrics=metrics, quality="val/loss", direction="min")
