"""Measure claims about whole networks: log-probabilities and gradients in 16 bits."""

import copy
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.claims.claim import Measurement
from runner.config.targets import locate
from runner.precision.contract import CPU_DEVICE
from runner.precision.registry import load_precision
from runner.utils.import_warnings import suppress_import_warnings
from runner.utils.packages import package_file

LOSS_SCALE = 2.0**16
_ALBERT = "models/transformers/albert_heads_8_uspto_all_1310k"
_MOLECULES = ("chemicals", "Identifiers/chemical identifiers pubchem large.tsv")


def half_log_probabilities() -> Measurement:
    """Measure how far log-probabilities in float16 and bfloat16 are from float32's.

    The network is the pretrained one of experiment=molecules where its packages are installed, else
    a GPT with random weights.
    """
    has_packages = package_file("rxnmapper", _ALBERT) and package_file(*_MOLECULES)
    network, inputs, note = _albert() if has_packages else _gpt()
    exact = _log_probabilities("32-true", network, inputs)
    errors = {}
    for label, name in (("float16", "16-true"), ("bfloat16", "bf16-true")):
        error = _log_probabilities(name, network, inputs) - exact
        errors[label] = error.square().mean().sqrt().item()
    ratio = errors["bfloat16"] / errors["float16"]
    return Measurement({**errors, "bfloat16 / float16": ratio}, note)


def _albert() -> tuple[nn.Module, Mapping[str, Tensor], str]:
    """Return the network of experiment=molecules, a batch of molecules, and its description."""
    from runner.data.datasets.molecules import molecules

    build = locate("runner.models.huggingface.huggingface")
    # transformers draws a progress bar and lists the weights that the head does not need.
    with redirect_stderr(StringIO()), suppress_import_warnings():
        network = build("masked_lm", path=f"package://rxnmapper/{_ALBERT}")
    examples = [molecules(count=80).train[i] for i in range(64)]
    names = ("input_ids", "attention_mask")
    batch = {name: torch.stack([example[name] for example in examples]) for name in names}
    return network.eval(), batch, "pretrained ALBERT, 64 molecules"


def _gpt() -> tuple[nn.Module, Tensor, str]:
    """Return a GPT with random weights, tokens int64 [8, 64], and its description."""
    torch.manual_seed(0)
    network = locate("runner.models.gpt.GPT")(256, 64, layers=4, width=128, heads=4)
    return network.eval(), torch.randint(256, (8, 64)), "GPT with random weights"


def _log_probabilities(name: str, network: nn.Module, inputs: Any) -> Tensor:
    """Return a network's log-probabilities under a precision: float32 [tokens, vocabulary]."""
    precision = load_precision(name)
    model, _ = precision.convert(copy.deepcopy(network))
    with torch.no_grad(), precision.session(model, CPU_DEVICE), precision.forward(CPU_DEVICE):
        if isinstance(inputs, Mapping):
            output = model(**inputs)
            # Padding has no probability to speak of.
            logits = output.logits[inputs["attention_mask"] == 1]
        else:
            logits = model(inputs).flatten(0, 1)
    return logits.float().log_softmax(-1)


def loss_scale() -> Measurement:
    """Measure the share of activations' gradients that float16 turns into zero, by loss scale.

    Counted are the gradients of the linear layers' outputs that float32 does not compute as zero,
    and overflows under the larger scale. The network is trained on data=digits first, so that its
    gradients are small.
    """
    from runner.data.datasets.digits import digits

    images, labels = digits().train[:512]
    images = images.flatten(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    network.append(nn.Linear(128, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
    exact = _activation_gradients("32-true", network, images, labels, 1.0)
    values = {}
    for label, scale in (("scale 1", 1.0), ("scale 2^16", LOSS_SCALE)):
        found = _activation_gradients("16-mixed", network, images, labels, scale)
        values[label] = (found[exact != 0] == 0).double().mean().item()
        values["overflows"] = (~found.isfinite()).double().sum().item()
    return Measurement(values)


def _activation_gradients(
    name: str, network: nn.Module, images: Tensor, labels: Tensor, scale: float
) -> Tensor:
    """Return the gradients of all linear layers' outputs under a precision, in one dimension."""
    precision = load_precision(name)
    model, _ = precision.convert(copy.deepcopy(network))
    outputs = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    with precision.session(model, CPU_DEVICE):
        with precision.forward(CPU_DEVICE):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels) * scale
        with precision.backward(CPU_DEVICE):
            gradients = torch.autograd.grad(loss, outputs)
    return torch.cat([gradient.float().flatten() for gradient in gradients])
