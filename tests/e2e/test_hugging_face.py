"""Models of Hugging Face and timm from yaml alone, on batches of fields as their collators make."""

import json

import pytest
import torch
from run_folders import write_page
from tiny_configs import tiny_config, tiny_settings
from tiny_models import word_tokenizer
from torch.nn import functional as F
from torch.utils.data import DataLoader

MODEL_TYPES = {
    "causal_lm": "gpt2",
    "masked_lm": "bert",
    "seq2seq_lm": "t5",
    "sequence_classification": "bert",
    "token_classification": "bert",
    "image_classification": "vit",
}
GPT2 = tiny_settings("gpt2")
RUN = (
    "--config-dir lab/conf data=fields tracking=none train.batch_size=4 train.max_steps=3 "
    "optimizer=sgd optimizer.lr=0.1 optimizer.momentum=0.0 optimizer.weight_decay=0.0"
).split()


@pytest.fixture
def job(lab, main):
    """Run a Hugging Face model of a kind on the data set of its fields."""

    def run(kind, *args, **config):
        (lab / "config.json").write_text(json.dumps(tiny_settings(MODEL_TYPES[kind], **config)))
        return main(*RUN, "model=hf", f"model.kind={kind}", "model.config=config.json", *args)

    return run


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_kind_of_model_trains_from_yaml_alone(job, lab, result, kind):
    classes = ["model.classes=4"] if kind.endswith("classification") else []
    job(kind, "precision=bf16-mixed", *classes).check_ok(" of a batch go to ")
    names = {"val/loss"}
    if kind == "masked_lm" or classes:
        names.add("val/accuracy")
    else:
        names.add("val/perplexity")
    assert set(result(lab)["metrics"]) == names


def test_the_losses_are_those_of_a_loop_by_hand(job, lab, result, monkeypatch):
    from transformers import AutoModelForCausalLM

    job("causal_lm", "data.shuffle=false", "checkpoint.safetensors=true").check_ok()

    monkeypatch.syspath_prepend(str(lab))
    from lab.fields import Fields

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2"), dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, batch in zip(range(3), DataLoader(Fields(16, "causal_lm"), 4), strict=False):
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    from safetensors.torch import load_file

    folder = lab / result(lab)["folder"]
    saved = load_file(folder / "model.safetensors")
    own = model.state_dict()
    assert all(torch.equal(saved[name], own[name]) for name in saved)
    model.eval()
    with torch.no_grad():
        losses = [_loss(model, b).item() for b in DataLoader(Fields(8, "causal_lm"), 4)]
    expected = pytest.approx(sum(losses) / 2, rel=1e-6)
    assert result(lab)["metrics"]["val/loss"] == expected


def _loss(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels)


def test_the_loss_of_the_model_itself_is_the_same(job, lab, result):
    assert job("causal_lm").rc == 0
    ours = result(lab)["metrics"]["val/loss"]
    assert job("causal_lm", "task=model_loss").rc == 0
    assert result(lab)["metrics"]["val/loss"] == pytest.approx(ours, rel=1e-5)


def test_pretrained_weights_come_from_a_local_folder(job, lab, result):
    from transformers import GPT2LMHeadModel

    pretrained = GPT2LMHeadModel(tiny_config("gpt2"))
    pretrained.save_pretrained(lab / "pretrained")
    settings = ["model.config=null", "model.path=pretrained", "optimizer.lr=0.0"]
    job("causal_lm", *settings, "checkpoint.safetensors=true").check_ok()
    from safetensors.torch import load_file

    saved = load_file(lab / result(lab)["folder"] / "model.safetensors")
    own = pretrained.state_dict()
    assert all(torch.equal(saved[name], own[name]) for name in saved)


def test_a_resumed_run_and_an_evaluation_build_the_model_again(job, lab, main, result):
    assert job("causal_lm", "checkpoint.every_steps=2", "train.max_steps=2").rc == 0
    folder = result(lab)["folder"]
    main(f"checkpoint.resume={folder}", "train.max_steps=3").check_ok()
    resumed = result(lab)["metrics"]
    main("mode=evaluate", f"checkpoint={folder}", "tracking=none").check_ok()
    assert result(lab)["metrics"] == resumed
    assert job("causal_lm").rc == 0
    assert result(lab)["metrics"] == resumed


def test_the_four_lines_of_the_docs_train_on_a_parquet_file(lab, main, result):
    import pyarrow as pa
    from pyarrow import parquet as pq
    from transformers import AutoModelForCausalLM

    write_page("own-code.md", lab, "lab/conf/experiment/tune.yaml")
    fast = word_tokenizer(("[UNK]", "a", "b", "c"), unk_token="[UNK]")
    fast.save_pretrained(lab / "models" / "tiny")
    tiny = AutoModelForCausalLM.from_config(tiny_config("gpt2", n_positions=1024))
    tiny.save_pretrained(lab / "models" / "tiny")
    pq.write_table(pa.table({"body": ["a b c a b", "c c b"] * 20}), lab / "rows.parquet")
    words = "--config-dir lab/conf experiment=tune precision=bf16-mixed tracking=none"
    main(*words.split(), "train.max_steps=3", "train.batch_size=8").check_ok(
        "input_ids, attention_mask of a batch go to GPT2LMHeadModel.forward"
    )
    assert 1 < result(lab)["metrics"]["val/perplexity"] < 100


@pytest.fixture
def texts(lab, main, caplog):
    """Evaluate a model, and return it with the texts of a table, each of four words."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    fast = word_tokenizer(("</s>", "a", "b", "c", "d", "e", "f"), eos_token="</s>")
    fast.save_pretrained(lab / "tokenizer")
    ids = [[(i * j + i) % 6 + 1 for j in range(4)] for i in range(12)]
    lines = [fast.decode(row) for row in ids]
    pq.write_table(pa.table({"body": lines, "turned": lines[::-1]}), lab / "rows.parquet")
    (lab / "pretrained").mkdir()

    def run(kind, settings, *typed):
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**settings)
        maker = {"causal_lm": "CausalLM", "seq2seq_lm": "Seq2SeqLM"}[kind]
        model = getattr(transformers, f"AutoModelFor{maker}").from_config(config).eval()
        model.save_pretrained(lab / "pretrained")
        words = "model=hf model.path=pretrained data=parquet data.path=rows.parquet data.text=body"
        keys = "data.val_path=rows.parquet data.tokenizer=tokenizer tracking=none train.max_steps=1"
        done = main(*words.split(), *keys.split(), f"model.kind={kind}", "optimizer.lr=0.0", *typed)
        done.check_ok()
        assert "each text ends with </s> (data.end_token=auto)" in caplog.text
        return model, torch.tensor([[*row, 0] for row in ids]), done.stdout

    return run


def test_packed_texts_have_the_losses_of_each_text_alone(texts, lab, result):
    packed = ("data.packing=true", "data.length=10")
    model, ids, out = texts("causal_lm", GPT2, *packed)
    assert "packed texts do not see each other" in out
    alone = torch.stack([model(input_ids=row[None], labels=row[None]).loss for row in ids])
    assert result(lab)["metrics"]["val/loss"] == pytest.approx(alone.mean().item(), rel=1e-5)
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    out = texts("causal_lm", bloom, *packed)[2]
    assert "warning: packed texts see each other: BloomForCausalLM does not" in out


def test_pairs_of_texts_have_the_loss_of_the_encoder_decoder(texts, lab, result, main):
    settings = tiny_settings("t5", pad_token_id=0)
    model, ids, _ = texts("seq2seq_lm", settings, "data.target=turned", "data.length=6")
    wanted = model(input_ids=ids, labels=ids.flip(0)).loss.item()
    assert result(lab)["metrics"]["val/loss"] == pytest.approx(wanted, rel=1e-5)
    words = "model=hf model.path=pretrained model.kind=causal_lm data=parquet data.text=body"
    keys = "data.path=rows.parquet data.tokenizer=tokenizer data.target=turned"
    done = main(*words.split(), *keys.split())
    done.check_refused("data.target=turned holds texts", "Type model.kind=seq2seq_lm")


SAME_STEPS = [
    "train.batch_size=2 train.accumulate=2 numerics.every=3",
    "precision=16-mixed",
    "precision=bf16-true",
    "precision=transformer-engine precision.emulate=true",
    "train.activation_checkpointing=true",
]


@pytest.mark.parametrize(
    "options",
    [SAME_STEPS[0], *(pytest.param(o, marks=pytest.mark.extended) for o in SAME_STEPS[1:])],
)
def test_what_a_run_offers_trains_on_batches_of_fields_alike(job, lab, result, options):
    assert job("causal_lm").rc == 0
    loss = result(lab)["metrics"]["val/loss"]
    job("causal_lm", *options.split()).check_ok()
    assert result(lab)["metrics"]["val/loss"] == pytest.approx(loss, rel=1e-3)


def test_a_packed_model_is_tuned_on_batches_of_fields(job, lab, result):
    done = job("causal_lm", "precision=bnb-nf4", "adapter=lora").check_ok()
    assert result(lab)["converted"] == "8/10"
    assert "not taken by it: id" in done.stdout
    assert "8,192 of 37,760 parameters train" in done.stdout


def test_a_plan_knows_batches_of_fields(job):
    job("causal_lm", "mode=plan").check_ok(
        "29,568 (29,568 trainable)", "4 x 1 micro-batches per step", "peak of a step"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("task.target=answer", "task.target=answer is not among them. Type task.target="),
        ("task.inputs=[tokens]", "Type task.inputs=[input_ids,attention_mask,id]"),
        ("task.output=scores", "that part of it is no tensor. Type task.output=<logits"),
        ("model.kind=causal", "kind=causal is not known. Allowed: causal_lm"),
        ("model.config={n_layer: 2}", "says which model to build"),
        ("model.config={model_type: gpt22}", "model_type=gpt22 is not known to transformers"),
        ("model.config=absent.yaml", "config=absent.yaml is no file"),
        ("model.path=absent", "path=absent has no config.json"),
        ("model.path=remote", "needs code of its own (auto_map in config.json)"),
        ("model.path=unsafe", "path=unsafe has no *.safetensors"),
        ("model.path=package://absent/net", "Type pip install --no-deps absent"),
        ("model.config={model_type: vit}", "Unrecognized configuration class"),
        ("data.kind=sequence_classification", "needs logits [B, T, V] and tokens [B, T], got"),
    ],
)
def test_what_does_not_fit_is_one_message(job, lab, options, said):
    for name, settings in (("remote", {"auto_map": {"AutoModel": "x.Y"}}), ("unsafe", {})):
        (lab / name).mkdir()
        (lab / name / "config.json").write_text(json.dumps({**GPT2, **settings}))
    job("causal_lm", options).check_refused(said)


TIMM = "model=timm data=digits tracking=none train.max_steps=2 precision=bf16-mixed".split()


def test_a_timm_model_trains_by_its_name(main):
    main(*TIMM, "model.name=test_vit", "model.options={patch_size: 2}").check_ok()


def test_a_timm_model_takes_weights_of_other_classes(tmp_path):
    from runner.models.timm_any import timm_any

    other = timm_any("test_resnet", 7, [3, 32, 32])
    torch.save(other.state_dict(), tmp_path / "seven.pth")
    model = timm_any("test_resnet", 3, [3, 32, 32], weights=str(tmp_path / "seven.pth"))
    own, saved = model.state_dict(), other.state_dict()
    assert own["fc.weight"].shape == (3, saved["fc.weight"].shape[1])
    assert all(torch.equal(own[name], saved[name]) for name in own if not name.startswith("fc."))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swinv2_cr_tiny_224", "test_resnet"])
def test_a_timm_model_is_built_for_the_size_of_the_images(name):
    from runner.models.timm_any import timm_any

    with torch.device("meta"):
        model = timm_any(name, 4, [3, 64, 64], options={"depth": 1} if "deit" in name else None)
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["model.name=test_resnt"], "timm has no model 'test_resnt'; close matches: test_resnet"),
        (["model.checkpoint_path=absent.pth"], "checkpoint_path=absent.pth is no file"),
        (["model.name=test_vit", "model.options={widh: 3}"], "widh"),
    ],
)
def test_a_timm_model_that_cannot_be_built_is_one_message(main, options, said):
    main(*TIMM, "model.name=test_resnet", *options).check_refused(said)
