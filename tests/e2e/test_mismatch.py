"""mode=mismatch from the command line and from Python: printed, written, recorded, refused."""

import re
from pathlib import Path

import pytest
import torch
from planted_sides import LLAMA, net
from run_folders import read_json
from torch import nn
from torch.utils.data import TensorDataset

import runner

GPT = (
    "model=gpt model.layers=2 model.width=32 data=text data.context=32 train.batch_size=2 "
    "mismatch.batches=1 mismatch.new_tokens=8"
).split()
PAIR = ("mode=mismatch", "precision=bf16-mixed", "serving=bf16-true", *GPT)


def test_an_accepted_pair_is_printed_written_and_recorded(
    main, tmp_path, result, store, reader, monkeypatch
):
    printed = main(*PAIR, f"tracking.uri={store}").check_ok().stdout
    answer = re.search(r"bf16-true serves what bf16-mixed trains: .*\.", printed)
    assert answer
    assert len(answer[0].split()) <= 15
    values = result(tmp_path)
    folder = tmp_path / values["folder"]
    report = read_json(folder / "mismatch.json")
    assert report["accepted"] is True
    assert report["sentence"] == answer[0]
    assert {"training: other batch", "serving: other padding"} <= {*report["floor"]}
    assert report["generation"]["tokens"] == 2 * 8
    assert "No cache: the model's forward takes none." in report["notes"]
    page = (folder / "mismatch.html").read_text()
    assert answer[0] in re.sub("<[^>]+>", "", page)
    assert "<script" not in page
    client, run_id = reader(), values["run_id"]
    run = client.get_run(run_id)
    assert run.data.metrics["mismatch/mean_ratio"] == report["data"]["mean_ratio"]
    assert run.data.metrics["mismatch/accepted"] == 1
    assert run.data.tags["serving"] == "bf16-true"
    names = {file.path for file in client.list_artifacts(run_id)}
    assert {"mismatch.html", "mismatch.json"} <= names


def test_a_rejected_pair_exits_with_1_and_names_a_cure(main, tmp_path, result):
    done = main(*PAIR, "tracking=none", "mismatch.max_kl=3e-8")
    assert done.rc == 1
    assert "bf16-true does not serve what bf16-mixed trains" in done.stdout
    assert "    precision=16-mixed serving=precision=16-true\n" in done.stdout
    report = read_json(tmp_path / result(tmp_path)["folder"] / "mismatch.json")
    tried = {cure["what"]: cure["remainder"]["mean_ratio"] for cure in report["cures"]}
    assert [*tried] == [
        "the head in float32",
        "float16 in place of bfloat16",
        "training in what serves",
        "serving in what trains",
    ]
    assert tried["float16 in place of bfloat16"] < tried["the head in float32"]
    assert tried["training in what serves"] == tried["serving in what trains"] == 1


def test_float16_is_eight_times_nearer_than_bfloat16(main, tmp_path, result):
    """arXiv:2510.26788; three more bits."""
    typed = ("mode=mismatch", *GPT, "~model", "+model._target_=planted_sides.net")
    rms = {}
    for precision in ("bf16-true", "16-true"):
        words = [word for word in typed if not word.startswith("model.")]
        words += ["+model.kind=llama", f"serving={precision}", "mismatch.cause=false"]
        main(*words, "task=language", "precision=32-true", "tracking=none").check_ok()
        report = read_json(tmp_path / result(tmp_path)["folder"] / "mismatch.json")
        rms[precision] = report["data"]["rms"]
    assert 7 < rms["bf16-true"] / rms["16-true"] < 9


def test_a_cache_changes_nothing_in_float64(main, tmp_path, result):
    words = [word for word in GPT if not word.startswith("model")]
    words += ["~model", "+model._target_=planted_sides.net", "+model.kind=gpt2", "task=language"]
    main(*words, *"mode=mismatch precision=64-true serving=64-true tracking=none".split())
    report = read_json(tmp_path / result(tmp_path)["folder"] / "mismatch.json")
    assert report["floor"]["serving: with a cache"]["rms"] < 1e-13
    assert report["generation"]["mean_ratio"] == pytest.approx(1, abs=1e-12)
    assert report["sentence"].startswith("64-true serves what 64-true trains, within their floor:")


def test_a_trained_run_brings_its_settings(main, tmp_path, result):
    main("precision=bf16-mixed", *GPT[:-2], "train.max_steps=3", "tracking=none").check_ok()
    run = result(tmp_path)["folder"]
    words = ("mode=mismatch", f"checkpoint={run}", "serving=bnb-nf4", "tracking=none")
    done = main(*words, "mismatch.batches=1", "mismatch.max_kl=1", "mismatch.max_ratio=3")
    assert "bnb-nf4 serves what bf16-mixed trains" in done.check_ok().stdout


def test_each_class_of_an_image_counts(main, tmp_path, result):
    typed = "mode=mismatch model=mlp data=digits serving=bnb-int8 tracking=none".split()
    printed = main(*typed, "mismatch.batches=1").check_ok().stdout
    assert "Nothing was generated: no unpadded text to continue." in printed
    report = read_json(tmp_path / result(tmp_path)["folder"] / "mismatch.json")
    assert report["data"]["tokens"] == 64
    assert report["data"]["kl_serving"] > 0


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("serving=bf17", "serving=bf17 is no precision"),
        ("", "mode=mismatch needs serving=<precision>"),
        ("serving=int8 mismatch.top_p=2", "mismatch.top_p=2.0 is not allowed. Allowed: above 0"),
        ("serving=int8 mismatch.floor=[bach]", "mismatch.floor=[bach] is not allowed"),
        ("serving=int8 mismatch.batches=0", "mismatch.batches=0 is too small"),
        ("serving=int8 data=signals task=regression", "Regression predicts none"),
        ("serving=model.width=64,model.layers=9", "there is no key model.width"),
        ("serving=int8 precision=bnb-nf4", "precision=bnb-nf4 packs the weights, and int8"),
        ("serving=train.batch_size=9", "both executions have the same train.batch_size"),
    ],
)
def test_what_cannot_be_compared_is_refused(main, typed, message):
    words = ("mode=mismatch", "model=mlp", "tracking=none", *typed.split())
    main(*words).check_refused(message)


def test_other_modes_refuse_a_side_that_serves(main):
    main("serving=int8", "tracking=none").check_refused("serving= needs mode=mismatch")


def test_every_number_by_hand(main, tmp_path):
    """The same numbers from torch and transformers alone."""
    torch.manual_seed(0)
    model = net("llama").eval()
    tokens = torch.randint(LLAMA["vocab_size"], (4, 33))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    words = "mode=mismatch precision=bf16-mixed serving=bf16-true task=language tracking=none"
    more = ["train.batch_size=4", "mismatch.new_tokens=0", "mismatch.cause=false"]
    result = runner.run([*words.split(), *more], model=model, data=(data, data), quiet=True)
    record = read_json(tmp_path / result.folder / "mismatch.json")["data"]

    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            training = model(tokens[:, :-1]).logits.float().log_softmax(-1)
        frequencies = model.model.rotary_emb.inv_freq
        model.to(torch.bfloat16)
        model.model.rotary_emb.inv_freq = frequencies  # as from_pretrained(dtype=...) leaves it
        serving = model(tokens[:, :-1]).logits.float().log_softmax(-1)
    index = tokens[:, 1:, None]
    d = (training.gather(-1, index) - serving.gather(-1, index)).squeeze(-1).double()
    ratio = d.exp()
    by_hand = {
        "tokens": d.numel(),
        "mean": d.mean(),
        "rms": d.square().mean().sqrt(),
        "worst": d.flatten()[d.abs().argmax()],
        "outside_narrow": ((ratio < 0.9) | (ratio > 1.1)).double().mean(),
        "outside_wide": ((ratio < 0.8) | (ratio > 1.25)).double().mean(),
        "mean_ratio": d.abs().exp().mean(),
        "k1": -d.mean(),
        "k3": (ratio - 1 - d).mean(),
        "argmax_flips": (training.argmax(-1) != serving.argmax(-1)).double().mean(),
    }
    for name, value in by_hand.items():
        assert record[name] == pytest.approx(float(value), rel=1e-5), name
    p, q = training.double(), serving.double()
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    by_hand = {
        "kl_serving": (q.exp() * (q - p)).sum(-1).mean(),
        "kl_training": (p.exp() * (p - q)).sum(-1).mean(),
    }
    for name, value in by_hand.items():
        assert record[name] == pytest.approx(float(value), rel=1e-3), name
    assert record["quantiles"]["0.9"] == pytest.approx(float(d.abs().quantile(0.9)), rel=0.05)
    assert record["sequence_spread"]["32"] == pytest.approx(float(d.sum(1).std()), rel=1e-6)
    place = int(d.abs().argmax())
    assert record["worst_place"] == [*divmod(place, 32), int(index.flatten()[place])]
    assert result.metrics["mismatch/accepted"] == 1


def in_python(model, inputs, targets, *words):
    """Run a comparison of a model of one's own, and return its report."""
    data = TensorDataset(inputs, targets)
    words = ("mode=mismatch", "tracking=none", "train.batch_size=8", *words)
    result = runner.run(list(words), model=model, data=(data, data), quiet=True)
    return read_json(Path(result.folder) / "mismatch.json")


class Pixels(nn.Module):
    """A class for each pixel, by a convolution."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images):
        return self.head(images)


class Bidirectional(nn.Module):
    """A class for each token, of all tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


class Overflowing(nn.Module):
    """Logits that float16 does not hold, and a cache that is none."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32)

    def forward(self, tokens, cache=None):
        return self.head(1e6 * self.embedding(tokens))


TOKENS = torch.randint(32, (8, 24), generator=torch.Generator().manual_seed(0))


def test_each_pixel_counts(main):
    images = torch.randn(8, 3, 16, 16)
    labels = torch.randint(4, (8, 16, 16))
    report = in_python(Pixels(), images, labels, "serving=bf16-true", "task=segmentation")
    assert report["data"]["tokens"] == 8 * 16 * 16
    assert "serving: other padding" not in report["floor"]


def test_a_model_that_sees_all_tokens_has_no_other_padding(main):
    report = in_python(Bidirectional(), TOKENS, TOKENS, "serving=bf16-true", "task=masked_lm")
    assert [*report["floor"]] == ["training: other batch", "serving: other batch"]
    assert report["generation"] is None


def test_numbers_that_are_not_finite_are_rejected(main):
    words = ("serving=16-true", "task=language", "mismatch.cause=false", "mismatch.cures=false")
    report = in_python(Overflowing(), TOKENS, TOKENS.roll(-1, 1), *words)
    assert report["accepted"] is False
    assert "mean ratio nan" in report["sentence"]


def test_an_island_is_no_cause(main):
    words = ("precision=bf16-true", "precision.keep_fp32=[encoder]", "serving=bf16-true")
    report = in_python(Bidirectional(), TOKENS, TOKENS, *words, "task=masked_lm")
    assert report["cause"] == ""
    assert report["training"] == "bf16-true precision.keep_fp32=[encoder]"


@pytest.mark.parametrize("place", [0, 1])
def test_the_words_of_a_cure_do_what_was_tried(main, tmp_path, result, place):
    pair = ["precision=bf16-true", "precision.keep_fp32=[norm]", "serving=bf16-mixed"]
    rest = [word for word in PAIR if not word.startswith(("precision", "serving"))]
    rest += ["tracking=none", "mismatch.max_kl=3e-8", "mismatch.cause=false"]
    assert main(*pair, *rest).rc == 1
    report = read_json(tmp_path / result(tmp_path)["folder"] / "mismatch.json")
    cure = report["cures"][place]
    typed = {word.partition("=")[0]: word for word in cure["words"]}
    kept = [word for word in pair if word.partition("=")[0] not in typed]
    main(*kept, *typed.values(), *rest, "mismatch.cures=false")
    again = read_json(tmp_path / result(tmp_path)["folder"] / "mismatch.json")
    judged = [again["data"]["mean_ratio"], again["generation"]["mean_ratio"]]
    assert pytest.approx(cure["remainder"]["mean_ratio"], rel=1e-7) in judged


def test_a_cold_temperature_does_not_accuse_the_cache(main, tmp_path, result):
    words = [word for word in PAIR if not word.startswith("model")]
    words += ["~model", "+model._target_=planted_sides.net", "+model.kind=llama", "task=language"]
    main(*words, "mismatch.temperature=0.1", "tracking=none", "mismatch.cures=false")
    report = read_json(tmp_path / result(tmp_path)["folder"] / "mismatch.json")
    assert report["cause"] == ""
    assert "serving: with a cache" in report["floor"]


def test_an_error_of_another_kind_is_no_rejection(main):
    words = "mode=mismatch ~model data=digits serving=bf16-true tracking=none".split()
    done = main(*words, "+model._target_=planted_sides.Batches")
    assert done.rc == 2
    assert "RuntimeError: this model takes no batch of one" in done.stderr
