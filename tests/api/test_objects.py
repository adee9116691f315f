"""Models given as objects: a copy is one, or the object is refused."""

import weakref
from functools import lru_cache, partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import runner
from runner.api.objects import given_model
from runner.config.python_objects import given_objects
from runner.core.base.errors import ConfigError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


def given(model, **others):
    with given_objects({"model": model, **others}):
        return given_model("Net")


def function_over_self(net):
    net.block = lambda x: net.inner(x)


def replaced_forward(net):
    old = net.inner.forward
    net.inner.forward = MethodType(lambda self, x: old(x), net.inner)


def default_of_a_function(net):
    net.block = lambda x, parts=(net.inner,): parts[0](x)


def function_over_a_table_of_modules(net):
    net.table = table = {"inner": [net.inner]}
    net.block = lambda x: table["inner"][0](x)


def weak_reference(net):
    net.part = weakref.ref(net.inner)


def cached_method(net):
    net.table = lru_cache(net.inner.forward)


def hook_on_a_gradient(net):
    net.inner.weight.register_hook(lambda grad: grad * 0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (function_over_self, r"<lambda> refers to the Net that was"),
        (replaced_forward, r"refers to the Linear that was given"),
        (default_of_a_function, r"refers to the Linear that was given"),
        (function_over_a_table_of_modules, r"refers to the dict that was given"),
        (weak_reference, "ReferenceType refers to the Linear that was given"),
        (cached_method, "Linear.forward refers to the Linear that was given"),
        (hook_on_a_gradient, "a hook on the gradient of inner.weight belongs to the parameter"),
    ],
)
def test_a_module_whose_copy_would_refer_to_the_original_is_refused(change, word):
    net = Net()
    change(net)
    with pytest.raises(ConfigError, match=f"{word}.*function that builds it"):
        given(net)


@pytest.mark.parametrize("role", ["loss", "optimizer", "callbacks"])
def test_what_is_given_beside_a_module_does_not_refer_to_it(role):
    net = Net()
    other = {
        "loss": lambda output, target: net.inner.weight.sum(),
        "optimizer": lambda params: torch.optim.SGD(net.parameters()),
        "callbacks": [type("Reads", (), {})()],
    }[role]
    if role == "callbacks":
        other[0].net = net
    with pytest.raises(ConfigError, match="refers to the Net that was given"):
        given(net, **{role: other})


@pytest.mark.parametrize("role", ["loss", "callbacks"])
@pytest.mark.parametrize("config", [{"smoothing": 0.1}, SimpleNamespace(smoothing=0.1)])
def test_a_config_that_a_module_shares_with_others_stays_one(role, config):
    net = Net()
    net.config = config
    reads = SimpleNamespace(config=config)
    other = {"loss": lambda output, target: config, "callbacks": [reads]}[role]
    copied = given(net, **{role: other})
    assert copied.config is config
    assert copied.inner.weight is not net.inner.weight


def test_the_features_that_a_hook_keeps_are_those_of_the_copy():
    net = Net()
    net.features = features = {}
    net.inner.register_forward_hook(lambda module, x, y: features.update(y=y))
    copied = given(net, loss=lambda output, target: features["y"].sum())
    output = copied(torch.ones(1, 4))
    assert copied.features["y"] is output is features["y"]


def test_a_copy_has_parts_and_attributes_of_its_own():
    net, seen = Net(), []
    net.inner.weight.no_decay = True
    net.device = device = torch.device("cpu")
    net.inner.register_forward_hook(lambda module, x, y: seen.append(y.to(device)))
    net.method, net.product = net.inner.forward, partial(torch.mul, net.inner.weight)
    copied = given(net)
    assert copied.inner.weight is not net.inner.weight
    assert copied.inner.weight.no_decay
    assert copied.method.__self__ is copied.inner
    assert copied.product.args[0] is copied.inner.weight
    copied(torch.ones(1, 4))
    assert len(seen) == 1  # the caller's list


GLOBAL_NETS = {}


class ReadsGlobal(Net):
    """Computes with the module of a table of the program, or with its own parts, too."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.key = reads, id(self)
        GLOBAL_NETS[self.key] = self

    def forward(self, x):
        other = GLOBAL_NETS[self.key].inner
        if self.reads == "its buffers":
            return self.inner(x) + other.bias.detach()
        return other(x) if self.reads == "others" else self.inner(x) + other(x)


@pytest.mark.usefixtures("main")
@pytest.mark.parametrize("reads", ["others", "both", "its buffers"])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_forward_that_reaches_the_given_module_by_a_global_is_refused(reads, has_gradients):
    x, y = torch.randn(16, 4), torch.arange(16) % 4
    data = (TensorDataset(x, y), TensorDataset(x, y))
    net = ReadsGlobal(reads)
    if has_gradients:  # of the program's own training before
        net(x).sum().backward()
    words = ["tracking=none", "train.max_steps=2", "train.batch_size=8", "task=classification"]

    def run():
        return runner.run(words, model=net, data=data, quiet=True, callbacks=[])

    if reads == "its buffers":
        assert run().steps == 2
        return
    reason = r"ReadsGlobal cannot be copied: a forward.* by a global .*model=lambda"
    with pytest.raises(ConfigError, match=reason):
        run()
