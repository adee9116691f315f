"""Models that a precision, or PyTorch's kernels for it, cannot run: one message that names what
works, and what it names then trains."""

import json
import re

import pytest

NETS = '''
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.swin_transformer import SwinTransformer


class Op(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, h):
        return getattr(self, self.op)(h)

    def inverse(self, h):
        m = h.view(-1, 8, 8)
        return torch.linalg.inv(m @ m.mT + torch.eye(8, dtype=m.dtype)).flatten(1)

    def cholesky(self, h):
        m = h.view(-1, 8, 8)
        return torch.linalg.cholesky(m @ m.mT + torch.eye(8, dtype=m.dtype)).flatten(1)

    def distances(self, h):
        return torch.cdist(h, h).mean(1, keepdim=True) + h

    def mask(self, h):
        return h * h.masked_fill(h > 5, -1e9).softmax(-1)

    def train_mask(self, h):
        return self.mask(h) if self.training else h

    def train_fft(self, h):
        return torch.fft.irfft(torch.fft.rfft(h), n=64) if self.training else h

    def late_fft(self, h):
        self.calls = getattr(self, "calls", 0) + self.training
        return self.train_fft(h) if self.calls > 1 else h

    def numpy(self, h):
        return h + torch.from_numpy(h.numpy() * 0)

    def detached(self, h):
        return h + torch.from_numpy(h.detach().numpy() * 0)


class Ops(nn.Sequential):
    def __init__(self, op):
        super().__init__()
        self.add_module("flat", nn.Flatten())
        self.add_module("layer", nn.Linear(64, 64))
        self.add_module("op", Op(op))
        self.add_module("head", nn.Linear(64, 10))


class Blocks(nn.Module):
    def __init__(self, op):
        super().__init__()
        parts = ({"layer": nn.Linear(64, 64), "op": Op(op)} for _ in range(2))
        self.blocks = nn.ModuleList(map(nn.ModuleDict, parts))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        h = x.flatten(1)
        for block in self.blocks:
            h = block["op"](block["layer"](h))
        return self.head(h)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 10)


class Inline(Layers):
    """The operation is in the model's own forward."""

    def forward(self, x):
        h = self.layer(x.flatten(1))
        return self.head(torch.fft.irfft(torch.fft.rfft(h), n=64))


class Widened(Layers):
    def forward(self, x):
        return self.head(self.layer(x.flatten(1)).float())


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x ** 3

    @staticmethod
    def backward(ctx, grad):
        return torch.fft.irfft(torch.fft.rfft(grad), n=64)


class Backward(Layers):
    def forward(self, x):
        return self.head(Cube.apply(self.layer(x.flatten(1))))


class Spectral(nn.Module):
    """The layer of a Fourier neural operator: [B, C, T] to the same."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.complex64) / 8)

    def forward(self, x):
        modes = torch.einsum("bcf,cof->bof", torch.fft.rfft(x), self.weight)
        return torch.fft.irfft(modes, n=x.shape[-1])


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.spectral, self.head = nn.Conv1d(8, 4, 1), Spectral(), nn.Linear(32, 10)

    def forward(self, x):
        h = self.lift(x.squeeze(1))
        return self.head((h + self.spectral(h)).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.rnn(x.flatten(1, 2))[0][:, -1])


class Built(nn.Module):
    """A model in the dtype of its constructor."""

    def __init__(self, dtype="float32"):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer, self.head = nn.Linear(256, 64), nn.Linear(64, 10)
        self.to(getattr(torch, dtype))

    def forward(self, x):
        return self.head(self.layer(self.norm(self.conv(x)).flatten(1)).relu())


class Keyword(Layers):
    def forward(self, x):
        return self.head(input=self.layer(input=x.flatten(1)))


class Swin(SwinTransformer):
    """torchvision's, whose attention reads the weights of its linear layers."""

    def __init__(self):
        super().__init__([2, 2], 16, [1, 1], [1, 2], [4, 4], num_classes=10)

    def forward(self, x):
        return super().forward(F.interpolate(x, size=16).expand(-1, 3, -1, -1))


class Pair(Keyword):
    def forward(self, x):
        return super().forward(x), x


class Two(Keyword):
    def forward(self, a, b):
        return super().forward(a) + b


class Cut(Keyword):
    def forward(self, x):
        return super().forward(x).detach()
'''
TASKS = """
import torch
from runner.training.tasks.classification import Classification


class NumpyLoss(Classification):
    def loss(self, output, target):
        return super().loss(output + torch.from_numpy(output.numpy() * 0), target)
"""


@pytest.fixture
def strange(main, tmp_path):
    """A tiny run of one of the models above, in tmp_path / "out"."""
    folder = tmp_path / "strange"
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "nets.py").write_text(NETS)
    (folder / "tasks.py").write_text(TASKS)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: strange.nets.Ops\n")

    def run(typed):
        name, *words = typed.split()
        own = f"--config-dir strange/conf model=net model._target_=strange.nets.{name}".split()
        short = "train.max_steps=2 train.batch_size=4 tracking=none hydra.run.dir=out".split()
        return main(*own, *short, *words)

    return run


TRUE16 = "precision=16-true optimizer.eps=1e-3"
FP8 = "precision=transformer-engine precision.emulate=true"
NO_KERNEL = "no such operation in half precision on cpu"
KEEP_OP = "precision.keep_fp32=[op]"
KEEP_SPECTRAL = "precision.keep_fp32=[spectral]"

FAILING = [
    (
        "Ops +model.op=inverse precision=bf16-true",
        ["It fails in op (Op), nets.py, line 1", NO_KERNEL, KEEP_OP, "precision=bf16-mixed"],
    ),
    (f"Ops +model.op=cholesky {TRUE16}", [NO_KERNEL, KEEP_OP, "precision=16-mixed"]),
    (f"Ops +model.op=distances {FP8}", [NO_KERNEL, KEEP_OP]),
    ("Blocks +model.op=inverse precision=bf16-true", ["precision.keep_fp32=[blocks.*.op]"]),
    (
        "Blocks +model.op=inverse precision=bf16-true precision.keep_fp32=[head]",
        ["precision.keep_fp32=[head,blocks.*.op]"],
    ),
    ("Operator precision=bf16-true", [KEEP_SPECTRAL, "precision=bf16-mixed"]),
    (
        "Inline precision=bf16-true",
        [
            "It fails in the model itself (Inline), nets.py",
            "Type precision=bf16-mixed",
            "in Inline.forward, give the operation x.float()",
        ],
    ),
    (
        "Widened precision=bf16-true",
        ["Tensors of two dtypes meet there", "precision.keep_fp32=[head]"],
    ),
    ("Widened precision=64-true", ["Leave out .float(), .double() and dtype= in the forward"]),
    (
        f"Ops +model.op=mask {TRUE16}",
        [
            "beyond the range of float16, which ends at 65504",
            KEEP_OP,
            "torch.finfo(x.dtype).min",
            "precision=bf16-true",
        ],
    ),
    ("Ops +model.op=mask precision=16-mixed", [KEEP_OP, "precision=bf16-mixed"]),
    ("Ops +model.op=detached precision=bf16-mixed", ["NumPy has no bfloat16", KEEP_OP]),
    (
        "Recurrent precision=16-mixed precision.cpu_float16=native",
        ["It fails in rnn (LSTM)", "Type precision.cpu_float16="],
    ),
    (
        "Built +model.dtype=float64 precision=bnb-nf4",
        [
            "leaves what it does not convert as the model was built, here float64 (conv.weight",
            "computes in bfloat16",
            "end its constructor with self.float()",
        ],
    ),
    (
        "Built +model.dtype=float16 precision=bnb-int8",
        ["here float16", "or type precision.compute_dtype=float16"],
    ),
    (
        "Built +model.dtype=bfloat16 precision=bnb-int8-training precision.compute_dtype=float32",
        ["here bfloat16", "or type precision.compute_dtype=bfloat16"],
    ),
    ("Built +model.dtype=float16 precision=bf16-mixed", ["Build the model in float32"]),
    ("Ops +model.op=train_mask precision=16-mixed", ["fails in step 1 with", KEEP_OP]),
    ("Ops +model.op=train_fft precision=bf16-true", ["fails in step 1 with", KEEP_OP]),
    (
        "Ops +model.op=numpy precision=32-true",
        ["fails in step 1 with", "have no gradient", "x.detach().float().cpu().numpy()"],
    ),
    (
        "Keyword task._target_=strange.tasks.NumpyLoss",
        ["It fails outside the model's forward, tasks.py, line 8", "have no gradient"],
    ),
    ("Backward precision=bf16-true", ["fails in step 1 with", "nets.py, line", NO_KERNEL]),
    ("Pair precision=bnb-nf4", ["The model returns a tuple of 2", "`return <tensor>`"]),
    ("Two precision=bnb-int8", ["Two.forward takes (a, b)"]),
    (f"Cut {FP8}", ["has no gradient, so nothing can train"]),
]


@pytest.mark.parametrize(("typed", "parts"), FAILING)
def test_a_model_that_a_precision_cannot_run_gets_one_message(strange, typed, parts):
    done = strange(typed)
    assert done.rc == 2, done
    assert "Traceback" not in done.stderr + done.stdout
    assert "that fit" not in done.stderr
    for part in parts:
        assert part in done.stderr


TRAINING = [
    (f"Ops +model.op=cholesky {TRUE16} {KEEP_OP}", "layer", "float16", "float16"),
    (f"Ops +model.op=distances {FP8} {KEEP_OP}", "layer", "bfloat16", "float32"),
    (
        "Blocks +model.op=inverse precision=bf16-true precision.keep_fp32=[blocks.*.op]",
        "blocks.0.layer",
        "bfloat16",
        "bfloat16",
    ),
    (f"Operator precision=bf16-true {KEEP_SPECTRAL}", "lift", "bfloat16", "bfloat16"),
    ("Inline precision=bf16-mixed", "layer", "float32", "bfloat16"),
    ("Widened precision=bf16-true precision.keep_fp32=[head]", "head", "float32", "float32"),
    (f"Ops +model.op=mask precision=16-mixed {KEEP_OP}", "layer", "float32", "float16"),
    (
        "Recurrent precision=16-mixed precision.cpu_float16=float32_accumulate",
        "rnn",
        "float32",
        "float16",
    ),
    (
        "Built +model.dtype=float16 precision=bnb-nf4 precision.compute_dtype=float16",
        "layer",
        "float16 uint8",
        "float16",
    ),
]
"""What messages name: model and words, then a module, its dtypes in store and in products."""


@pytest.mark.parametrize(("typed", "module", "stores", "computes"), TRAINING)
def test_what_a_message_names_trains_in_the_precision(
    strange, tmp_path, typed, module, stores, computes
):
    done = strange(typed)
    assert done.rc == 0, done
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert 0 < result["train_loss"] < 10
    table = json.loads((tmp_path / "out" / "dtypes.json").read_text())
    (row,) = [row for row in table["data"] if row[0] == module]
    found = dict(zip(table["columns"], row, strict=True))
    assert (found["stores"], found["computes"]) == (stores, computes)


@pytest.mark.parametrize(
    "precision",
    [
        "bnb-fp4-dq",
        "bnb-int8",
        "bnb-int8-training",
        FP8.removeprefix("precision="),
        "float8-rowwise precision.emulate=true",
    ],
)
def test_a_converted_layer_takes_its_input_by_keyword(strange, tmp_path, precision):
    assert strange(f"Keyword precision={precision}").rc == 0
    rows = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert "layer" in {row["module"] for row in rows if row["done"]}


@pytest.mark.parametrize("precision", ["bnb-nf4", "bnb-int8"])
def test_a_model_that_reads_its_converted_weights_trains_with_those_as_they_were(
    strange, precision
):
    done = strange(f"Swin precision={precision}")
    assert done.rc == 0, done
    assert re.search(
        r"attn\.qkv.*the model reads its weight and passes its forward by", done.stdout
    )


def test_what_fails_after_steps_were_trained_is_a_failed_run(strange):
    done = strange("Ops +model.op=late_fft precision=bf16-true")
    assert done.rc == 1, done
    assert "Traceback" not in done.stderr + done.stdout
    assert "fails in step 2 with precision=bf16-true" in done.stderr
    assert KEEP_OP in done.stderr
