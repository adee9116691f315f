"""Weights in and out in the field's formats, by whole commands."""

import re
import shlex
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from peft import PeftModel
from run_folders import DOCS, only_run, read_json, write_page
from safetensors.torch import load_file, save_file
from typed_runs import TypedRuns

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
MLP = ("model=mlp", "model.hidden=[64]", "train.max_steps=3", "debug.overfit=32", "tracking=none")
PAGE = (DOCS / "weights.md").read_text()
SHORT = ("train.max_steps=2", "train.batch_size=8", "debug.overfit=16", "tracking=none")


def test_the_commands_of_the_page_run_one_after_another(main, tmp_path, monkeypatch):
    tiny_models.build("gpt2").save_pretrained(tmp_path / "models" / "tiny")
    for command in re.findall(r"^    python -m runner (.*)$", PAGE, re.MULTILINE):
        main(*shlex.split(command), *SHORT).check_ok()
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(from transformers.*?)```", PAGE, re.DOTALL)
    exec(code, {})


@pytest.fixture(scope="module")
def trained(run_once):
    """Folder of a run that left model.safetensors."""
    return run_once(*MLP, "checkpoint.safetensors=true").folder


@pytest.fixture
def runs(main, tmp_path):
    """Tiny runs of the same model."""
    return TypedRuns(main, tmp_path, " ".join(MLP))


def test_the_yaml_of_the_page_starts_from_a_file_with_other_names(runs, tmp_path, trained):
    write_page("weights.md", tmp_path)
    state = load_file(trained / "model.safetensors")
    named = {f"module.backbone.{name}": value for name, value in state.items()}
    torch.save(named, tmp_path / "net.pth")
    run = runs.train("--config-dir lab/conf experiment=tune")
    assert "weights: 2 of 4 tensors from net.pth (torch.save); fresh: head.weight" in run.stdout


def test_a_run_starts_from_its_own_safetensors(runs, trained):
    run = runs.train(f"init.weights={trained}/model.safetensors optimizer.lr=0")
    assert f"weights: 4 of 4 tensors from {trained}/model.safetensors (safetensors)" in run.stdout
    record = read_json(run.folder / "init_weights.json")
    assert record["fresh"] == []
    assert len(record["loaded"]) == 4
    saved = run.content()["model"]
    for name, value in load_file(trained / "model.safetensors").items():
        assert torch.equal(saved[name], value)


def test_a_skipped_head_is_said_and_the_resumed_run_needs_no_file(runs, tmp_path, trained):
    state = load_file(trained / "model.safetensors")
    state = {f"module.{name}": value for name, value in state.items() if "head" not in name}
    save_file(state, tmp_path / "body.safetensors")
    typed = "init.weights=body.safetensors init.rename={module:null}"
    assert "Type 'init.skip=[head]'" in runs.fail(typed)
    assert "; fresh: head.weight, head.bias" in runs.train(f"{typed} init.skip=[head]").stdout
    (tmp_path / "body.safetensors").unlink()
    runs.resume("train.max_steps=5 tracking=none")


def test_a_runs_own_checkpoint_can_be_tuned_to_other_classes(runs, trained):
    typed = f"init.weights={trained} model.classes=12"
    assert "2 of another shape" in runs.fail(typed)
    runs.train(f"{typed} init.skip=[head]")


def test_a_plan_compares_names_without_training(runs, trained):
    typed = f"mode=plan init.weights={trained}/model.safetensors"
    runs(typed).check_ok("weights: 4 of 4 tensors")
    assert "of another shape" in runs.fail(f"{typed} model.hidden=[32]")


def test_an_adapter_is_added_to_packed_weights_of_a_file_without_a_warning(runs, trained):
    typed = "precision=bnb-nf4 adapter=lora"
    run = runs.train(f"{typed} init.weights={trained}/model.safetensors")
    assert "warning: the frozen weights" not in run.stdout
    assert "warning: the frozen weights" in runs.train(typed).stdout


def test_a_fresh_head_that_an_adapter_freezes_is_warned_of(runs, trained):
    typed = f"adapter=lora init.weights={trained} init.skip=[head]"
    run = runs.train(typed)
    assert "warning: init.skip leaves head at random values" in run.stdout
    assert "adapter.train=[head]" in run.stdout
    assert "warning" not in runs.train(f"{typed} adapter.train=[head]").stdout


def test_the_jobs_of_a_sweep_start_from_one_file(runs, trained):
    start = f"init.weights={trained}/model.safetensors"
    runs(f"-m hydra/launcher=basic {start} precision=32-true,bf16-true").check_ok()
    logs = [path.read_text() for path in Path().glob("outputs/sweeps/*/*/log.txt")]
    assert ["weights: 4 of 4 tensors" in text for text in logs] == [True, True]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("init.skip=[head]", "init.skip applies to init.weights, which is not given"),
        ("init.weights=x init.skip=[[a]]", "init.skip=[['a']] does not fit"),
        ("init.weights=x init.rename={a:[b]}", "does not fit. Allowed: prefixes of names"),
        ("init.weights=x init.rename=a", "error: init.rename=a does not fit"),
        ("mode=evaluate checkpoint=FILE", "holds weights alone"),
        ("mode=evaluate checkpoint=FILE init.weights=x", "Leave init.weights= out"),
        ("checkpoint.resume=FILE", "holds weights alone"),
        ("checkpoint.pretrained=true", "MLP is no model of transformers"),
    ],
)
def test_keys_that_do_not_fit_are_refused(runs, trained, typed, message):
    assert message in runs.fail(typed.replace("FILE", f"{trained}/model.safetensors"))


# Out


@pytest.fixture
def tuned(main, tmp_path):
    """Train a tiny GPT-2 of the local folder base."""
    typed = tiny_models.typed("gpt2", tmp_path)
    model = tiny_models.build("gpt2")
    model.config.use_cache = True
    model.save_pretrained(tmp_path / "base")
    runs = TypedRuns(main, tmp_path, "train.max_steps=3 optimizer.lr=0.1 tracking=none")
    runs.words += from_folder(typed, tmp_path / "base")
    return runs.train


def from_folder(typed, folder):
    """Return the words of a model, which now is that of a folder of transformers'."""
    return [f"model.path={folder}" if w.startswith("model.config=") else w for w in typed]


@torch.no_grad()
def validation_loss(model):
    """The loss of a model of transformers on the validation examples, by hand."""
    total, count = 0.0, 0
    for batch in tiny_models.batches("gpt2", seed=1):
        logits, labels = tiny_models.logits_and_labels("gpt2", model.eval(), batch)
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != tiny_models.IGNORED).sum())
    return total / count


def base_in(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bnb-nf4", 2e-3)])
def test_peft_loads_the_adapter_of_a_run_onto_its_base(tuned, tmp_path, precision, tolerance):
    run = tuned(f"precision={precision} adapter=lora adapter.train=[transformer.ln_f]")
    base = base_in(tmp_path / "base")
    before = validation_loss(base)
    # Of packed weights the base here is the one before it was packed.
    loss = validation_loss(PeftModel.from_pretrained(base, run.folder / "adapter"))
    assert loss == pytest.approx(run.result["metrics"]["val/loss"], rel=tolerance)
    assert abs(loss - before) > 2 * tolerance * loss


@pytest.mark.parametrize(
    "typed",
    [
        "adapter.use_dora=true adapter.init=pissa_niter_16 train.ema=0.5",
        pytest.param("adapter.init=pissa", marks=pytest.mark.extended),
        pytest.param("adapter.init=olora adapter.use_rslora=true", marks=pytest.mark.extended),
    ],
)
def test_the_adapter_of_a_changed_base_fits_the_original_one(tuned, tmp_path, typed):
    run = tuned(f"adapter=lora adapter.rank=4 {typed} checkpoint.pretrained=true")
    base = base_in(tmp_path / "base")
    before = validation_loss(base)
    loss = validation_loss(PeftModel.from_pretrained(base, run.folder / "adapter"))
    wanted = pytest.approx(run.result["metrics"]["val/loss"], rel=1e-5)
    assert loss == wanted
    assert loss != pytest.approx(before, rel=1e-4)
    assert validation_loss(base_in(run.folder / "pretrained")) == wanted


def test_the_python_of_the_page_loads_the_adapter(tuned, tmp_path, monkeypatch):
    tuned("adapter=lora", "outputs/runs/first")
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
    assert not (tuned("adapter=lora checkpoint.adapter=false").folder / "adapter").exists()


@pytest.mark.parametrize(
    ("typed", "tolerance", "dtype"),
    [
        ("precision=32-true", 1e-6, torch.float32),
        ("precision=bf16-true", 2e-2, torch.bfloat16),
        ("precision=bnb-nf4 adapter=lora", 2e-3, torch.float32),
        ("precision=transformer-engine precision.emulate=true", 3e-2, torch.bfloat16),
        pytest.param(
            *("adapter=lora train.ema=0.5", 1e-5, torch.float32), marks=pytest.mark.extended
        ),
        pytest.param(
            *("adapter=lora adapter.use_dora=true", 1e-5, torch.float32), marks=pytest.mark.extended
        ),
    ],
)
def test_from_pretrained_loads_the_folder_of_a_run(tuned, typed, tolerance, dtype):
    run = tuned(f"{typed} checkpoint.pretrained=true")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        run.folder / "pretrained", output_loading_info=True
    )
    assert not any(report.values())
    assert model.dtype is dtype
    assert model.config.use_cache
    wanted = run.result["metrics"]["val/loss"]
    assert validation_loss(model) == pytest.approx(wanted, rel=tolerance)


def test_a_run_starts_from_the_folder_of_another(tuned, main, tmp_path):
    tokenizer = tmp_path / "base" / "tokenizer.json"
    tokenizer.write_text("{}")
    first = tuned("checkpoint.pretrained=true")
    folder = first.folder / "pretrained"
    assert (folder / "tokenizer.json").read_text() == "{}"  # it is copied
    typed = tiny_models.typed("gpt2", tmp_path)
    runs = TypedRuns(main, tmp_path, "tracking=none train.max_steps=1 optimizer.lr=0")
    runs.words += [*typed, f"init.weights={folder}"]
    second = runs.train(name="second")
    assert "(safetensors)" in second.stdout
    assert second.result["metrics"] == pytest.approx(first.result["metrics"], rel=1e-6)
    runs.words = [*runs.words[:3], *from_folder(typed, folder)]
    assert runs.train(name="third").result["metrics"] == second.result["metrics"]


def test_a_model_that_computes_its_loss_is_in_mlflow_without_labels(main, tmp_path, empty_store):
    uri = empty_store(tmp_path / "mlflow.db")
    words = tiny_models.typed("gpt2", tmp_path)
    done = main(*words, "train.max_steps=1", "task=model_loss", f"tracking.uri={uri}").check_ok()
    assert "not in MLflow" not in done.stdout
    program = torch.export.load(only_run(tmp_path) / "model" / "model.pt2").module()
    fields = {name: t for name, t in tiny_models.batches("gpt2")[0].items() if name != "labels"}
    with torch.no_grad():
        assert program(fields)["logits"].shape == (4, 12, 96)
