"""What the record of a training holds, whichever trainer runs it."""

import pytest
import torch
from foreign_models import FailingNet

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from foreign_trainings import TRAININGS

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and devices


@pytest.fixture(params=TRAININGS)
def trainer(request):
    return request.param


@pytest.fixture
def train(trainer):
    return TRAININGS[trainer]


def test_every_step_is_in_the_store(lab, trainer, train):
    norms = train()
    result = lab.result()
    model = "Module" if trainer == "lightning" else "TinyNet"
    assert (result.precision, result.model, result.status) == ("32-true", model, "finished")
    assert list(lab.points(result, "train/loss")) == [1, 2, 3, 4]
    assert lab.points(result, "train/grad_norm") == pytest.approx(dict(enumerate(norms, 1)))
    rates = lab.points(result, "train/lr")
    assert rates[1] == 0.1
    # transformers lowers its rate by itself.
    assert trainer == "transformers" or set(rates.values()) == {0.1}
    assert lab.points(result, "perf/step_ms")[4] > 0
    assert lab.points(result, "loss_scale/value") == {}
    assert "substituted" not in lab.tags(result)
    assert lab.tags(result)["trainer"].startswith(f"{trainer} ")
    assert {"config.yaml", "environment.json", "history.npz"} <= {p.name for p in lab.run.iterdir()}
    assert lab.table()["net.first" if trainer == "lightning" else "first"]["computes"] == "float32"


def test_skipped_steps_and_the_loss_scale_are_recorded(lab, trainer, train):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    precision = "fp16" if trainer in ("transformers", "accelerate") else None
    norms = train(steps=14, precision=precision, scaler=scaler, log_every=3)
    result = lab.result()
    assert (result.precision, result.steps) == ("16-mixed", 14)
    scales = lab.points(result, "loss_scale/value")
    overflows = lab.points(result, "loss_scale/overflow")
    assert list(scales) == list(overflows) == list(range(1, 15))
    skipped = [step for step, is_skipped in overflows.items() if is_skipped]
    good = [step for step in scales if step not in skipped]
    # Each skipped step halves the scale of the next one; two good steps double it.
    assert skipped[0] == 1
    assert scales[1] == 2.0**24
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step < 14)
    assert max(scales[step + 1] / scales[step] for step in range(1, 14)) == 2
    assert lab.points(result, "loss_scale/skipped_steps")[14] == len(skipped)
    assert (result.skipped_steps, result.loss_scale) == (len(skipped), scales[14])
    changes = lab.points(result, "loss_scale/changes")
    assert changes == {step: scales[step] for step in changes}
    recorded = lab.points(result, "train/grad_norm")
    by_hand = {step: norms[step - 1] / scales[step] for step in good}
    assert {step: recorded[step] for step in good} == pytest.approx(by_hand, rel=1e-4)
    losses = lab.points(result, "train/loss")
    assert all(0 < losses[step] < 10 for step in good)
    assert (lab.run / "loss_scale.png").is_file()
    first = lab.table()["net.first" if trainer == "lightning" else "first"]
    assert first["computes"] == "float16"


@pytest.mark.parametrize("trainer", ["transformers", "lightning", "accelerate"])
def test_micro_batches_make_one_step(lab, trainer):
    train = TRAININGS[trainer]
    train(steps=3, size=2, accumulation=4, folder="four")
    train(steps=3, size=8, folder="one")
    four, one = (lab.result(lab.folder / name) for name in ("four", "one"))
    for name in ("train/loss", "train/grad_norm"):
        assert lab.points(four, name) == pytest.approx(lab.points(one, name), rel=1e-4)
    assert list(lab.points(four, "train/loss")) == [1, 2, 3]


@pytest.mark.parametrize("trainer", ["transformers", "lightning", "accelerate"])
def test_the_loss_of_a_step_with_fewer_micro_batches_is_the_mean(lab, trainer):
    """The last step of an epoch has the micro-batches that are left: here 4 of 5, or 3 of 4."""
    train = TRAININGS[trainer]
    train(steps=1, size=64, folder="one")
    # Lightning says how many examples a micro-batch has: 28, 28 and 8.
    size, accumulation = (28, 4) if trainer == "lightning" else (16, 5)
    train(steps=1, size=size, accumulation=accumulation, folder="partial")
    one, partial = (lab.result(lab.folder / name) for name in ("one", "partial"))
    losses = lab.points(partial, "train/loss")
    assert losses == pytest.approx(lab.points(one, "train/loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("error", "ending", "text"),
    [
        (ValueError("a bad row"), ("failed", "FAILED"), "ValueError: a bad row"),
        (KeyboardInterrupt(), ("stopped", "KILLED"), "Interrupted."),
    ],
    ids=["error", "interrupt"],
)
def test_a_training_that_does_not_finish_ends_its_run(lab, train, error, ending, text, capsys):
    # Lightning leaves the process after Ctrl-C.
    with pytest.raises((type(error), SystemExit)):
        train(net=FailingNet(error))
    result = lab.result()
    (stored,) = lab.stored()
    assert (result.status, stored.status) == ending
    assert lab.tags(result)["error"] == text
    assert f"error: {text}" in capsys.readouterr().out
    assert list(lab.points(result, "train/loss")) == [1, 2]


ON_A_CPU = "Accelerate runs fp16 on GPUs only, and on a CPU says nothing."
REPLACED = "Lightning replaces 16-mixed by bf16-mixed on a CPU."


@pytest.mark.parametrize(
    ("trainer", "precision", "setting", "ran", "reason"),
    [
        ("transformers", "fp16", "TrainingArguments(fp16=True)", "32-true", ON_A_CPU),
        ("accelerate", "fp16", "Accelerator(mixed_precision='fp16')", "32-true", ON_A_CPU),
        ("lightning", "16-mixed", "expected='16-mixed'", "bf16-mixed", REPLACED),
        ("fabric", "16-mixed", "expected='16-mixed'", "bf16-mixed", REPLACED),
    ],
    ids=["transformers", "accelerate", "lightning", "fabric"],
)
def test_what_the_trainer_replaced_is_named(lab, capsys, trainer, precision, setting, ran, reason):
    options = {"expected": "16-mixed"} if setting.startswith("expected") else {}
    TRAININGS[trainer](precision=precision, **options)
    result = lab.result()
    dtypes = "float32" if ran == "32-true" else "bfloat16"
    text = (
        f"{setting} asks for 16-mixed, and the first step computed in {dtypes} with weights in "
        f"float32 and no loss scale: the run is recorded as {ran}. {reason}"
    )
    assert f"warning: {text}" in capsys.readouterr().out
    assert lab.tags(result)["substituted"] == text
    assert text in lab.tags(result)["mlflow.note.content"]
    assert (result.precision, result.label) == (ran, f"{ran} {trainer} (asked: 16-mixed)")
