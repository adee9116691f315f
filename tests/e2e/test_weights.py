"""Weights in and out in the field's formats, by whole commands."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
MLP = ("model=mlp", "model.hidden=[64]", "train.max_steps=3", "debug.overfit=32", "tracking=none")
PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
SHORT = ("train.max_steps=2", "train.batch_size=8", "debug.overfit=16", "tracking=none")


def test_the_commands_of_the_page_run_one_after_another(main, tmp_path, monkeypatch):
    tiny_models.build("gpt2").save_pretrained(tmp_path / "models" / "tiny")
    for command in re.findall(r"^    python -m runner (.*)$", PAGE, re.MULTILINE):
        done = main(*shlex.split(command), *SHORT)
        assert done.rc == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(from transformers.*?)```", PAGE, re.DOTALL)
    exec(code, {})


def test_the_yaml_of_the_page_starts_from_a_file_with_other_names(main, tmp_path, trained):
    (text,) = re.findall(r"```yaml\n# lab/conf/experiment/tune.yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "lab" / "conf" / "experiment" / "tune.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    state = load_file(trained / "model.safetensors")
    named = {f"module.backbone.{name}": value for name, value in state.items()}
    torch.save(named, tmp_path / "net.pth")
    done = main("--config-dir", "lab/conf", "experiment=tune", *MLP)
    assert done.rc == 0, done.stderr
    assert "weights: 2 of 4 tensors from net.pth (torch.save); fresh: head.weight" in done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory, inside):
    """Folder of a run that left model.safetensors."""
    folder = tmp_path_factory.mktemp("trained")
    with inside(folder) as main:
        done = main(*MLP, "checkpoint.safetensors=true")
    assert done.rc == 0, done.stderr
    (run,) = folder.glob("outputs/runs/*")
    return run


def newest(folder):
    return max(folder.glob("outputs/runs/*"))


def test_a_run_starts_from_its_own_safetensors(main, tmp_path, trained):
    done = main(*MLP, f"init.weights={trained}/model.safetensors", "optimizer.lr=0")
    assert done.rc == 0, done.stderr
    assert f"weights: 4 of 4 tensors from {trained}/model.safetensors (safetensors)" in done.stdout
    record = json.loads((newest(tmp_path) / "init_weights.json").read_text())
    assert record["fresh"] == []
    assert len(record["loaded"]) == 4
    saved = torch.load(next(newest(tmp_path).glob("checkpoints/*.pt")), weights_only=True)
    for name, value in load_file(trained / "model.safetensors").items():
        assert torch.equal(saved["model"][name], value)


def test_a_skipped_head_is_said_and_the_resumed_run_needs_no_file(main, tmp_path, trained):
    state = load_file(trained / "model.safetensors")
    state = {f"module.{name}": value for name, value in state.items() if "head" not in name}
    save_file(state, tmp_path / "body.safetensors")
    words = ("init.weights=body.safetensors", "init.rename={module:null}")
    refused = main(*MLP, *words)
    assert refused.rc == 2
    assert "Type 'init.skip=[head]'" in refused.stderr
    done = main(*MLP, *words, "init.skip=[head]")
    assert done.rc == 0, done.stderr
    assert "; fresh: head.weight, head.bias" in done.stdout
    (tmp_path / "body.safetensors").unlink()
    resumed = main(f"checkpoint.resume={newest(tmp_path)}", "train.max_steps=5", "tracking=none")
    assert resumed.rc == 0, resumed.stderr


def test_a_runs_own_checkpoint_can_be_tuned_to_other_classes(main, trained):
    words = (*MLP, f"init.weights={trained}", "model.classes=12")
    assert "2 of another shape" in main(*words).stderr
    assert main(*words, "init.skip=[head]").rc == 0


def test_a_plan_compares_names_without_training(main, trained):
    words = (*MLP, "mode=plan", f"init.weights={trained}/model.safetensors")
    done = main(*words)
    assert done.rc == 0, done.stderr
    assert "weights: 4 of 4 tensors" in done.stdout
    assert "of another shape" in main(*words, "model.hidden=[32]").stderr


def test_an_adapter_is_added_to_packed_weights_of_a_file_without_a_warning(main, trained):
    words = (*MLP, "precision=bnb-nf4", "adapter=lora")
    done = main(*words, f"init.weights={trained}/model.safetensors")
    assert done.rc == 0, done.stderr
    assert "warning: the frozen weights" not in done.stdout
    assert "warning: the frozen weights" in main(*words).stdout


def test_a_fresh_head_that_an_adapter_freezes_is_warned_of(main, trained):
    words = (*MLP, "adapter=lora", f"init.weights={trained}", "init.skip=[head]")
    done = main(*words)
    assert "warning: init.skip leaves head at random values" in done.stdout
    assert "adapter.train=[head]" in done.stdout
    assert "warning" not in main(*words, "adapter.train=[head]").stdout


def test_the_jobs_of_a_sweep_start_from_one_file(main, trained):
    words = (*MLP, "hydra/launcher=basic", f"init.weights={trained}/model.safetensors")
    done = main("-m", *words, "precision=32-true,bf16-true")
    assert done.rc == 0, done.stderr
    assert done.stdout.count("weights: 4 of 4 tensors") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("init.skip=[head]", "init.skip applies to init.weights, which is not given"),
        ("init.weights=x init.skip=[[a]]", "init.skip=[['a']] does not fit"),
        ("init.weights=x init.rename={a:[b]}", "does not fit. Allowed: prefixes of names"),
        ("init.weights=x init.rename=a", "error: init.rename=a does not fit"),
        ("mode=evaluate checkpoint={file}", "holds weights alone"),
        ("mode=evaluate checkpoint={file} init.weights=x", "Leave init.weights= out"),
        ("checkpoint.resume={file}", "holds weights alone"),
    ],
)
def test_keys_that_do_not_fit_are_refused(main, trained, words, message):
    done = main(*MLP, *words.replace("{file}", f"{trained}/model.safetensors").split())
    assert done.rc == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# Out


@pytest.fixture
def tuned(main, tmp_path, result):
    """Train a tiny GPT-2 of a local folder, and return its result."""
    words = tiny_models.typed("gpt2", tmp_path)
    base = tmp_path / "base"
    model = tiny_models.build("gpt2")
    model.config.use_cache = True
    model.save_pretrained(base)
    words = [f"model.path={base}" if w.startswith("model.config=") else w for w in words]

    def train(*more):
        done = main(*words, "train.max_steps=3", "optimizer.lr=0.1", "tracking=none", *more)
        assert done.rc == 0, done.stderr
        return result(tmp_path)

    return train


@torch.no_grad()
def validation_loss(model):
    """The loss of a model of transformers on the validation examples, by hand."""
    total, count = 0.0, 0
    for batch in tiny_models.batches("gpt2", seed=1):
        logits, labels = tiny_models.logits_and_labels("gpt2", model.eval(), batch)
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != tiny_models.IGNORED).sum())
    return total / count


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bnb-nf4", 2e-3)])
def test_peft_loads_the_adapter_of_a_run_onto_its_base(tuned, tmp_path, precision, tolerance):
    found = tuned(f"precision={precision}", "adapter=lora", "adapter.train=[transformer.ln_f]")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = validation_loss(base)
    model = PeftModel.from_pretrained(base, Path(found["folder"]) / "adapter")
    # Of packed weights the base here is the one before it was packed.
    loss = validation_loss(model)
    assert loss == pytest.approx(found["metrics"]["val/loss"], rel=tolerance)
    assert abs(loss - before) > 2 * tolerance * loss


@pytest.mark.parametrize(
    "words",
    [
        ["adapter.init=pissa"],
        ["adapter.init=olora", "adapter.use_rslora=true"],
        ["adapter.use_dora=true", "adapter.init=pissa_niter_16", "train.ema=0.5"],
    ],
    ids=str,
)
def test_the_adapter_of_a_changed_base_fits_the_original_one(tuned, tmp_path, words):
    found = tuned("adapter=lora", "adapter.rank=4", *words, "checkpoint.pretrained=true")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = validation_loss(base)
    model = PeftModel.from_pretrained(base, Path(found["folder"]) / "adapter")
    wanted = pytest.approx(found["metrics"]["val/loss"], rel=1e-5)
    assert validation_loss(model) == wanted
    assert validation_loss(model) != pytest.approx(before, rel=1e-4)
    merged = transformers.AutoModelForCausalLM.from_pretrained(Path(found["folder"]) / "pretrained")
    assert validation_loss(merged) == wanted


def test_the_python_of_the_page_loads_the_adapter(tuned, tmp_path, monkeypatch):
    tuned("adapter=lora", "hydra.run.dir=outputs/runs/first")
    (tmp_path / "models").mkdir()
    (tmp_path / "base").rename(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(from peft.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(code, names)
    tuned_loss = validation_loss(names["model"])
    with names["model"].disable_adapter():
        assert validation_loss(names["model"]) != tuned_loss


def test_no_adapter_folder_is_written_where_it_is_not_asked_for(tuned):
    folder = Path(tuned("adapter=lora", "checkpoint.adapter=false")["folder"])
    assert not (folder / "adapter").exists()


FORMATS = pytest.mark.parametrize(
    ("words", "tolerance", "dtype"),
    [
        (["precision=32-true"], 1e-6, torch.float32),
        (["precision=bf16-true"], 2e-2, torch.bfloat16),
        (["precision=32-true", "adapter=lora", "train.ema=0.5"], 1e-5, torch.float32),
        (["precision=bnb-nf4", "adapter=lora"], 2e-3, torch.float32),
        (["precision=32-true", "adapter=lora", "adapter.use_dora=true"], 1e-5, torch.float32),
        (["precision=transformer-engine", "precision.emulate=true"], 3e-2, torch.bfloat16),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)


@FORMATS
def test_from_pretrained_loads_the_folder_of_a_run(tuned, words, tolerance, dtype):
    found = tuned(*words, "checkpoint.pretrained=true")
    folder = Path(found["folder"]) / "pretrained"
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values())
    assert model.dtype is dtype
    assert model.config.use_cache
    assert validation_loss(model) == pytest.approx(found["metrics"]["val/loss"], rel=tolerance)


def test_a_run_starts_from_the_folder_of_another(tuned, main, tmp_path, result):
    found = tuned("checkpoint.pretrained=true")
    folder = f"{found['folder']}/pretrained"
    words = tiny_models.typed("gpt2", tmp_path)
    short = ("tracking=none", "train.max_steps=1", "optimizer.lr=0")
    done = main(*words, *short, f"init.weights={folder}")
    assert done.rc == 0, done.stderr
    assert "(safetensors)" in done.stdout
    from_weights = result(tmp_path)["metrics"]
    assert from_weights == pytest.approx(found["metrics"], rel=1e-6)
    words = [f"model.path={folder}" if w.startswith("model.config=") else w for w in words]
    done = main(*words, *short)
    assert done.rc == 0, done.stderr
    assert result(tmp_path)["metrics"] == from_weights


def test_the_files_of_a_tokenizer_are_copied(tuned, tmp_path):
    (tmp_path / "base").mkdir(exist_ok=True)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    folder = Path(tuned("checkpoint.pretrained=true")["folder"]) / "pretrained"
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_model_of_no_library_has_no_such_folder(main):
    done = main(*MLP, "checkpoint.pretrained=true")
    assert done.rc == 2
    assert "made a MLP, which is no model of transformers" in done.stderr


def test_a_model_that_computes_its_loss_is_in_mlflow_without_labels(main, tmp_path, empty_store):
    uri = empty_store(tmp_path / "mlflow.db")
    words = tiny_models.typed("gpt2", tmp_path)
    done = main(*words, "train.max_steps=1", "task=model_loss", f"tracking.uri={uri}")
    assert done.rc == 0, done.stderr
    assert "not in MLflow" not in done.stdout
    program = torch.export.load(newest(tmp_path) / "model" / "model.pt2").module()
    fields = {name: t for name, t in tiny_models.batches("gpt2")[0].items() if name != "labels"}
    with torch.no_grad():
        assert program(fields)["logits"].shape == (4, 12, 96)
