"""An evaluation of a checkpoint in its own precision has the numbers that the training recorded."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import runner
from runner.core.record import checkpoint_file


class Noisy(nn.Module):
    """Draws random numbers in evaluation, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x + torch.randn_like(x))


X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
DATA = (TensorDataset(X, X), TensorDataset(X, X))
LINEAR = {"model": nn.Linear(4, 4), "data": DATA}


def contrast(output, _):
    """A loss over the batch: each example is to be found among the others."""
    return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))


@pytest.mark.parametrize("words", [[], ["train.ema=0.5"], ["precision=bf16-mixed", "seed=3"]])
def test_own_precision_reproduces_the_recorded_loss(words, tmp_path, capsys):
    given = {"model": Noisy, "data": DATA, "loss": contrast}
    length = ["train.max_steps=6", "train.eval_every=3", "train.batch_size=8", "optimizer.lr=0.1"]
    own = ["tracking=none", "task=regression"]
    trained = runner.run([*own, *length, *words], **given, out=tmp_path / "run")
    evaluate = [*own, "mode=evaluate", f"checkpoint={tmp_path / 'run'}"]
    again = runner.run(evaluate, **given, out=tmp_path / "again")
    assert again.metrics == trained.metrics == again.as_trained
    capsys.readouterr()
    other = runner.run([*evaluate, "train.batch_size=4"], **given, out=tmp_path / "other")
    assert other.metrics != trained.metrics
    assert other.as_trained == {}
    assert "train.batch_size=8 in its run, 4 here" in capsys.readouterr().out


def first_half(examples):
    x, y = zip(*examples, strict=True)
    return torch.stack(x)[: len(x) // 2], torch.stack(y)[: len(y) // 2]


def test_what_is_not_typed_again_is_the_checkpoints(tmp_path):
    own = ["tracking=none", "task=regression", "train.max_steps=2", "train.batch_size=8"]
    words = ["precision=bf16-true", "data.collate=test_evaluate.first_half"]
    trained = runner.run([*own, *words], **LINEAR, out=tmp_path / "run")
    evaluate = [*own[:2], "mode=evaluate", f"checkpoint={tmp_path / 'run'}"]
    again = runner.run([*evaluate, "precision.keep_fp32=[]"], **LINEAR, out=tmp_path / "again")
    assert again.precision == "bf16-true"
    assert again.metrics == trained.metrics == again.as_trained


def test_keys_of_an_earlier_version_prevent_no_comparison(tmp_path, monkeypatch):
    own = ["tracking=none", "task=regression", "train.max_steps=1"]
    trained = runner.run(own, **LINEAR, out=tmp_path / "run")
    load = checkpoint_file.load

    def load_older(path):
        content = load(path)
        content["spec"]["train"]["oldkey"] = 1
        return content

    monkeypatch.setattr(checkpoint_file, "load", load_older)
    evaluate = [*own[:2], "mode=evaluate", f"checkpoint={tmp_path / 'run'}"]
    assert runner.run(evaluate, **LINEAR, out=tmp_path / "again").as_trained == trained.metrics
