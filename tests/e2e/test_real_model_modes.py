"""Models of Hugging Face and timm from yaml alone: what a run offers besides training."""

import shutil
from pathlib import Path

import pytest
import torch
from run_folders import losses_in
from tiny_models import arrays, batches, build, typed
from torch import nn

from runner.core.record.checkpoint_file import load
from runner.core.record.tracker import NoTracker

JOURNAL = "tracking._target_=runner.core.record.tracker.ProcessJournal"
SHORT = ("tracking=none", JOURNAL, "train.max_steps=3")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture
def job(main, files, tmp_path, result):
    """Run a command on a model from yaml; return what it printed, its folder and its metrics."""

    def run(name, *overrides):
        done = main(*(typed(name, files) if name else ()), *SHORT, *overrides).check_ok()
        outcome = result(tmp_path)
        return done, tmp_path / outcome["folder"], outcome["metrics"]

    return run


def first_of(name, *others):
    """Return the values of a test's parameter: the others are further examples."""
    return [name, *(pytest.param(other, marks=pytest.mark.extended) for other in others)]


def newest_checkpoint(folder):
    return load(max(folder.glob("checkpoints/step-*.pt")))


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("t5", "bf16-mixed"),
        pytest.param("t5", "16-mixed", marks=pytest.mark.extended),
        pytest.param("timm-resnet", "bf16-true", marks=pytest.mark.extended),
        pytest.param("gpt2", "bnb-nf4", marks=pytest.mark.extended),
    ],
)
def test_a_stopped_and_resumed_run_is_the_same_bit_by_bit(job, name, precision):
    options = [f"precision={precision}"]
    if precision == "bnb-nf4":
        options.append("adapter=lora")
    _, folder, whole = job(name, *options)
    expected = newest_checkpoint(folder)["model"]
    _, folder, _ = job(name, *options, "train.max_steps=2", "checkpoint.every_steps=2")
    _, folder, resumed = job("", f"checkpoint.resume={folder}")
    assert are_equal(newest_checkpoint(folder)["model"], expected)
    assert resumed == whole
    _, _, evaluated = job("", "mode=evaluate", f"checkpoint={folder}", "train.batch_size=4")
    assert evaluated == whole


@pytest.mark.parametrize("name", first_of("gpt2", "t5", "timm-vit"))
def test_activation_checkpointing_changes_no_bit(job, name):
    _, plain, _ = job(name)
    _, folder, _ = job(name, "train.activation_checkpointing=true")
    assert losses_in(folder) == losses_in(plain)
    assert are_equal(newest_checkpoint(folder)["model"], newest_checkpoint(plain)["model"])


@pytest.mark.parametrize("name", first_of("t5", "gpt2", "bert-masked"))
def test_micro_batches_with_unequal_labels_train_as_one_batch(job, name):
    labels = arrays(name)["labels"].reshape(-1, 2, arrays(name)["labels"].shape[1])
    counts = (labels[:, :, 1:] != -100).sum((1, 2)).tolist()
    assert counts[0] != counts[1]
    _, plain, _ = job(name, "precision=64-true")
    _, folder, _ = job(name, "precision=64-true", "train.batch_size=2", "train.accumulate=2")
    assert losses_in(folder) == pytest.approx(losses_in(plain), rel=1e-12)


def test_a_model_can_be_compiled(job, monkeypatch):
    compile_ = nn.Module.compile
    called = []

    def traced(self, mode=None, **options):
        called.append(type(self).__name__)
        # Without inductor, whose C++ takes half a minute to compile.
        compile_(self, backend="eager", **options)

    monkeypatch.setattr(nn.Module, "compile", traced)
    _, plain, _ = job("gpt2")
    _, folder, _ = job("gpt2", "train.compile=true")
    torch.compiler.reset()
    assert len(called) == 1
    assert losses_in(folder) == pytest.approx(losses_in(plain), rel=1e-6)


class Memory(NoTracker):
    """Keeps the folder and the facts of an exported model."""

    made = None

    @property
    def takes_models(self):
        return True

    def model(self, folder, facts):
        Memory.made = Path(folder), facts


@pytest.mark.parametrize("name", first_of("bert-sequence", "t5", "timm-vit"))
def test_an_exported_model_takes_the_fields_of_a_batch(job, tmp_path, name):
    done, run, _ = job(name, f"tracking._target_={__name__}.Memory")
    assert "not in MLflow" not in done.stdout
    folder, facts = Memory.made
    program = torch.export.load(tmp_path / folder / "model.pt2").module()
    batch = batches(name, seed=1)[0]
    found = program({spec["name"]: batch[spec["name"]] for spec in facts["inputs"]})
    model = build(name)
    model.load_state_dict(newest_checkpoint(run)["model"])
    model.eval()
    taken = [spec["name"] for spec in facts["inputs"]]
    with torch.no_grad():
        output = model(**{key: batch[key] for key in taken})
    torch.testing.assert_close(found, getattr(output, "logits", output), rtol=1e-5, atol=1e-6)


def test_a_plan_predicts_the_peak_of_memory(main, files):
    keys = ("data.meta.input=[12]", "data.meta.classes=96")
    done = main(*typed("t5", files), "mode=plan", *keys).check_ok()
    assert "not predicted" not in done.stdout
    assert "largest batch" in done.stdout


def test_a_replay_names_the_module_of_a_saved_batch(main, files, tmp_path):
    huge = ("tracking=none", "optimizer=sgd", "optimizer.lr=1e30", "train.max_steps=3")
    done = main(*typed("t5", files), *huge)
    assert done.rc == 1
    (saved,) = tmp_path.glob("outputs/runs/*/guard/*.json")
    main("debug=replay", f"batch={saved}").check_ok("replay of step 2: 4 samples", "T5Block")


def test_a_run_says_where_a_model_of_fields_loses_its_gradient(lab, main):
    file = lab / "rows.npz"
    typed("bert-sequence", lab)
    shutil.move(lab / "bert-sequence.npz", file)
    words = (
        "--config-dir lab/conf model=cut data=npz data.target=labels task=classification "
        "tracking=none train.max_steps=1"
    )
    main(*words.split(), f"data.path={file}").check_refused(
        "Cut.forward runs layer with gradients switched off"
    )


@pytest.mark.parametrize(
    ("size", "status", "said"),
    [
        (11, 1, "12 examples, a batch 11, the last one 1. Type train.batch_size=12"),
        (1, 2, "12 examples, a batch 1. Type train.batch_size=2"),
    ],
)
def test_a_batch_norm_with_one_example_is_one_message(main, files, size, status, said):
    short = ("tracking=none", "train.max_steps=2", f"train.batch_size={size}")
    main(*typed("timm-resnet", files), *short).check_refused(said, status=status)


@pytest.mark.slow
def test_a_run_of_a_transformers_model_writes_no_warnings_of_its_imports(fresh_cli, files):
    done = fresh_cli(*typed("vit", files), "tracking=none", "train.max_steps=1").check_ok()
    assert done.stderr == ""
