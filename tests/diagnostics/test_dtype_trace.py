import pytest
import torch
from one_off_nets import net
from states import count_hooks
from torch import nn

from runner.diagnostics.dtype_trace import DtypeProbe


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, tokens):
        hidden = self.norm(self.lstm(self.words(tokens))[0])
        return self.frozen(self.body(hidden)) @ torch.ones(4, 2, dtype=hidden.dtype)


def step(model):
    loss = model(torch.tensor([[1, 2]])).square().mean()
    loss.backward()
    return loss


def rows(probe):
    return {row["module"]: row for row in probe.table()}


def test_a_row_for_each_module_that_ran():
    model = Net()
    with DtypeProbe(model) as probe:
        step(model)
    table = rows(probe)
    assert list(table) == ["(model)", "words", "lstm", "norm", "body", "body.0", "body.1", "frozen"]
    full = dict.fromkeys(("stores", "computes", "outputs", "gradients"), "float32")
    assert table["words"] == {"module": "words", "kind": "Embedding", "inputs": "int64", **full}
    for name in ("lstm", "norm", "body.0"):
        expected = {"module": name, "kind": table[name]["kind"], "inputs": "float32", **full}
        assert table[name] == expected
    assert table["frozen"]["gradients"] == ""
    assert table["body.1"]["stores"] == table["body.1"]["computes"] == ""
    assert (table["(model)"]["inputs"], table["(model)"]["computes"]) == ("int64", "float32")
    assert table["(model)"]["kind"] == "Net"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_are_those_that_flowed(dtype):
    model = Net().to(dtype)
    with DtypeProbe(model) as probe:
        step(model)
    name = str(dtype)[6:]
    for row in probe.table():
        assert {row[k] for k in ("stores", "computes", "outputs", "gradients")} <= {name, ""}


def test_autocast_is_seen_through():
    model = nn.Sequential(nn.Linear(2, 2))
    with DtypeProbe(model) as probe, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 2)).sum().backward()
    row = rows(probe)["0"]
    assert (row["inputs"], row["computes"], row["outputs"]) == ("float32", "bfloat16", "bfloat16")
    assert (row["stores"], row["gradients"]) == ("float32", "float32")


def test_complex_products_are_seen():
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    model = nn.Sequential(net(lambda net, x: (net.wave @ x).real, wave=weight))
    with DtypeProbe(model) as probe:
        model(torch.ones(2, 1, dtype=torch.complex64)).sum().backward()
    row = rows(probe)["0"]
    assert {row[k] for k in ("stores", "computes", "gradients")} == {"complex64"}
    assert row["outputs"] == "float32"


def test_hooks_and_mode_are_removed_after_an_exception_too():
    model = nn.Sequential(nn.Linear(2, 2))
    probe = DtypeProbe(model)
    with pytest.raises(RuntimeError), probe:  # noqa: PT012
        assert count_hooks(model) == 5 + 1
        model(torch.ones(1, 3))
    assert count_hooks(model) == 0
    before = probe.table()
    model(torch.ones(1, 2))
    assert probe.table() == before


def test_a_compiled_model_shows_what_it_can():
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    with DtypeProbe(model) as probe:
        model(torch.ones(1, 2)).sum().backward()
    first = probe.table()[0]
    assert (first["module"], first["inputs"], first["outputs"]) == ("(model)", "float32", "float32")
