"""What holds of a TPU where there is none. torch knows the device `tpu` only once torch_tpu has
registered it, which cannot be undone: here another object has its type, and a process of its own
registers it."""

import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from forked_process import run_forked
from waiting import SECONDS

from runner.core import accelerators
from runner.core.base.accelerators import Accelerator, available_kinds, choose_accelerator
from runner.core.base.errors import ConfigError, Unavailable
from runner.core.base.tensor_facts import widest_float
from runner.core.policy.loss_scale import LossScale
from runner.precision import registry

TPU = SimpleNamespace(type="tpu", index=0)
RUNS = {"32-true", "bf16-mixed", "bf16-true"}
OUGHT = {  # what is typed in place of a precision that a TPU lacks
    "64-true": "precision=32-true",
    "tf32": "precision=32-true",
    "16-mixed": "precision=bf16-mixed",
    "16-true": "precision=bf16-true",
    "bnb": "precision=bf16-true",
    "float8": "precision=bf16-mixed",
    "torchao": "precision=bf16-mixed",
    "transformer": "precision=bf16-mixed",
    **dict.fromkeys(("qat", "int4", "int8", "nvfp4"), "precision=bf16-true"),
}
ROWS = """
import torch
from runner.core.base.accelerators import Accelerator
from runner.precision import registry
torch.utils.rename_privateuse1_backend("tpu")
device = torch.device("tpu", 0)
assert Accelerator(device).kind == "tpu"
print([(row.name, row.why, row.remedy) for row in registry.supported_precisions(device)])
"""


def rows(device):
    return [(row.name, row.why, row.remedy) for row in registry.supported_precisions(device)]


def named_tpu(env):
    done = run_forked([sys.executable, "-c", ROWS], SECONDS, env=env)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def test_the_precisions_of_a_tpu(clean):
    found = rows(TPU)
    assert {name for name, why, _ in found if not why} == RUNS
    assert named_tpu(clean) == found


@pytest.mark.parametrize("name", sorted(set(registry.precision_names()) - RUNS))
def test_a_precision_that_a_tpu_lacks_says_what_to_type(name):
    (said,) = [row for row in rows(TPU) if row[0] == name]
    assert f"precision={name} " in said[1]
    assert "TPU" in said[1] or said[1].endswith("this run is on tpu.")
    assert OUGHT[name if name in OUGHT else name.split("-")[0].rstrip("-")] in said[2]
    assert "\n" not in said[1] + said[2]


def test_fp8_is_not_emulated_on_a_tpu():
    with pytest.raises(Unavailable, match="not even emulated"):
        registry.load_precision("float8-rowwise", emulate=True).require(TPU)


def test_bf16_takes_the_place_of_float16_only_where_that_is_allowed():
    refused = registry.load_precision("16-mixed")
    with pytest.raises(Unavailable, match=r"bf16-mixed.*precision\.allow_substitute=true"):
        refused.require(TPU)
    assert (refused.name, refused.compute) == ("16-mixed", torch.float16)
    allowed = registry.load_precision("16-mixed", allow_substitute=True)
    with pytest.warns(UserWarning, match="16-mixed runs as bf16-mixed, and is recorded so"):
        substitute = allowed.substitute(TPU)
    substitute.require(TPU)
    assert (substitute.name, substitute.compute) == ("bf16-mixed", torch.bfloat16)
    assert type(substitute.scale(TPU)) is LossScale


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("mps")])
def test_elsewhere_float16_stays(device):
    precision = registry.load_precision("16-mixed", allow_substitute=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert precision.substitute(device) is precision
        precision.require(device)
    assert (precision.name, precision.compute) == ("16-mixed", torch.float16)


def test_allow_substitute_is_yes_or_no():
    with pytest.raises(ConfigError, match=r"allow_substitute=maybe is not known. Allowed: true"):
        registry.load_precision("16-mixed", allow_substitute="maybe")


def test_the_device_of_a_tpu():
    assert accelerators.is_tpu(TPU)
    assert Accelerator(TPU).kind == "tpu"
    assert not accelerators.is_tpu(torch.device("cpu"))
    assert widest_float(TPU) is torch.float32
    assert widest_float(torch.device("cpu")) is torch.float64


@pytest.mark.skipif(bool(find_spec("torch_tpu")), reason="torch_tpu is installed")
def test_without_the_package_it_is_named():
    assert "tpu" not in available_kinds()
    with pytest.raises(Unavailable, match="needs torch_tpu, which is not installed") as caught:
        choose_accelerator("tpu")
    assert caught.value.remedy.startswith("Type pip install torch_tpu on a machine with a TPU")
    assert caught.value.exit_status == 2
