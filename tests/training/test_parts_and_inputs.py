"""What a model froze or set to evaluation mode, its hooks on gradients, and inputs that keep_fp32
takes."""

import re
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import runner

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
DATA = (TensorDataset(X, X), TensorDataset(X, X))
SHORT = ["tracking=none", "task=regression", "train.batch_size=8", "data.shuffle=false"]


class Student(nn.Module):
    """Learns beside a frozen teacher and a batch norm in evaluation mode."""

    modes: ClassVar[set] = set()

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        self.teacher.requires_grad_(False).eval()
        self.norm = nn.BatchNorm1d(16).eval()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        if self.training:
            self.modes.add((self.teacher[1].training, self.norm.training, self.body.training))
        return self.head(self.norm(self.body(x))) + self.teacher(x)


def run(model, folder, *words, steps=4, data=DATA):
    words = [*SHORT, f"train.max_steps={steps}", "train.eval_every=2", *words]
    return runner.run(words, model=model, data=data, out=folder)


@pytest.mark.parametrize("words", [[], ["precision=bf16-true", "train.accumulate=2"]])
def test_parts_in_evaluation_mode_stay_in_it(tmp_path, capsys, words):
    Student.modes.clear()
    run(Student(), tmp_path / "out", *words)
    assert Student.modes == {(False, False, True)}
    line = "stays in evaluation mode, as the model built it: norm, teacher"
    assert line in capsys.readouterr().out


ADAPTED = {
    "nothing is named": ([], {"body", "head"}),
    "a pattern of any depth": (["adapter.modules=['*h*',body]"], {"body", "head"}),
    "the part is named": (["adapter.modules=[teacher,body]"], {"teacher.0", "body"}),
    "in packed weights": (["precision=bnb-nf4"], {"body", "head"}),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_an_adapter_adds_to_a_frozen_part_only_where_a_pattern_names_it(case, tmp_path, capsys):
    words, names = ADAPTED[case]
    result = run(Student(), tmp_path / "out", "adapter=lora", *words)
    saved = torch.load(next((tmp_path / "out").glob("checkpoints/*.pt")), weights_only=False)
    adapted = {n.removesuffix(".lora_B.default.weight") for n in saved["model"] if "lora_B" in n}
    assert adapted == names
    assert result.steps == 4
    said = "the adapter leaves out what the model froze: teacher" in capsys.readouterr().out
    assert said == ("teacher.0" not in names)


def test_an_adapter_whose_pattern_finds_frozen_parts_alone_is_refused(tmp_path):
    words = ["adapter=lora", "adapter.modules=[*.0,body]"]
    with pytest.raises(runner.ConfigError, match=r"which adapter\.modules=\[teacher\] adapts"):
        run(Student, tmp_path / "out", *words)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.body.weight.register_hook(lambda grad: grad.clamp(-1, 1))

    def forward(self, x):
        h = self.body(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-1, 1))
        return self.head(h)


def test_hooks_on_scaled_gradients_are_named_before_training(tmp_path, capsys):
    run(Hooked, tmp_path / "16", "precision=16-mixed")
    said = capsys.readouterr().out.partition("epoch 1")[0]
    for place in ("body.weight", "test_parts_and_inputs.py, line "):
        assert f"hooks see gradients times the loss scale: {place}" in said
    run(Hooked, tmp_path / "bf16", "precision=bf16-mixed")
    assert "hooks see" not in capsys.readouterr().out


class Timed(nn.Module):
    """Takes a time in float32, which it spreads over frequencies before a module takes it."""

    given = torch.empty(0)

    def __init__(self):
        super().__init__()
        self.time, self.body = nn.Linear(16, 16), nn.Linear(16, 16)
        self.time.register_forward_pre_hook(self.note)

    @staticmethod
    def note(_, args):
        Timed.given = args[0].float().clone()

    @staticmethod
    def spread(time):
        return torch.sin(time.float()[:, None] * torch.arange(1, 17, dtype=torch.float32))

    def forward(self, x, time):
        return self.body(x) + self.time(self.spread(time))


TIMES = 999.3986 - 11.3 * torch.arange(32)


@pytest.mark.parametrize("name", ["bf16-true", "16-true", "transformer-engine"])
def test_an_input_that_a_kept_module_takes_keeps_its_value(name, tmp_path, capsys):
    emulate = ["precision.emulate=true"] if "engine" in name else []
    words = [f"precision={name}", "precision.keep_fp32=[time]", "optimizer=sgd", *emulate]
    split = TensorDataset(X, TIMES, X)
    run(Timed(), tmp_path / "out", *words, data=(split, split), steps=2)
    assert torch.equal(Timed.given, Timed.spread(TIMES[-8:]))
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search("stays wider than .*input 1", printed)


class Late(nn.Module):
    """Makes a parameter in its first forward, and unfreezes another one in a later step."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16)
        self.calls, self.shift = 0, None

    def forward(self, x):
        self.calls += self.training
        if self.calls > 2:
            self.body.requires_grad_(True)
        if self.shift is None:
            self.shift = nn.Parameter(torch.zeros(16, dtype=self.head.weight.dtype))
        return self.head(self.body(x) + self.shift)


# qat-int8 tries its layers in a forward before the optimizers are built.
@pytest.mark.parametrize("precision", ["32-true", "qat-int8"])
def test_parameters_with_gradients_that_no_optimizer_trains_are_named(tmp_path, capsys, precision):
    start = Late()
    moved = run(start, tmp_path / "out", f"precision={precision}").state_dict()
    assert torch.equal(moved["body.weight"], start.body.weight)
    assert not moved["shift"].any()
    said = capsys.readouterr().out
    for names in ("shift", "shift, body.weight, body.bias"):
        assert said.count(f"warning: {names}: no optimizer trains what has gradients here") == 1


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(16, 16)
        self.teacher = AveragedModel(self.student, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def forward(self, x):
        if self.training:
            self.teacher.update_parameters(self.student)
        return self.student(x)


@pytest.mark.parametrize(("words", "is_named"), [([], True), (["precision.update=kahan"], False)])
def test_an_average_by_torch_is_frozen_and_followed_in_16_bits(tmp_path, capsys, words, is_named):
    run(Averaged(), tmp_path / "out", "precision=bf16-true", *words)
    said = capsys.readouterr().out
    assert "272 of 544 parameters train" in said
    assert ("the model itself changes teacher.module.weight" in said) == is_named
