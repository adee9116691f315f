"""Which device each precision needs, and what a run on another is told to type."""

import sys
from types import SimpleNamespace

import pytest
import torch
from precision_models import CPU, CUDA, MPS, pretend_gpu

from runner.core.base.errors import Unavailable
from runner.precision import devices, registry, te_recipes

pytest.importorskip("runner.precision.layers.bnb_linear")

TRANSFORMER_ENGINE = [n for n in registry.precision_names() if n.startswith("transformer-engine")]
WEIGHT_FORMATS = ("int4", "int8", "nvfp4", "qat-int4", "qat-int8", "qat-nvfp4")
EMULATE = "Type precision.emulate=true for its numbers without its speed, or precision="
CPU_ONLY = "precision.emulate=true runs on a CPU; this run is on cuda"

# Elsewhere than on a GPU: the device, what is missing, and what to type.
REFUSED_WITHOUT_GPU = [
    ("64-true", {}, MPS, "an Apple GPU (mps), which has no float64", "accelerator=cpu, or"),
    ("tf32", {}, CPU, "needs an NVIDIA GPU of compute capability 8.0", f"{EMULATE}32-true"),
    ("tf32", {}, MPS, "this run is on mps", f"{EMULATE}32-true"),
    (
        "bnb-nf4",
        {},
        MPS,
        "needs a CPU or an NVIDIA GPU of compute capability 6.0 or higher; this run is on mps.",
        "Type accelerator=cpu, or precision=bf16-true.",
    ),
    *(
        (
            name,
            {},
            MPS,
            "needs a CPU or an NVIDIA GPU; this run is on mps",
            "or precision=bf16-true",
        )
        for name in WEIGHT_FORMATS
    ),
    ("float8-rowwise", {}, CPU, "needs an NVIDIA GPU of compute capability 8.9", EMULATE),
    ("float8-tensorwise", {}, MPS, "no FP8 dtypes", "accelerator=cpu precision.emulate=true."),
    (
        "float8-tensorwise",
        {"emulate": True},
        MPS,
        "cannot run on mps, not even emulated",
        "Type precision=bf16-mixed, or accelerator=cpu precision.emulate=true.",
    ),
    *(
        (name, {}, device, f"of compute capability {least}", f"{EMULATE}bf16-mixed, the nearest")
        for name, device, least in (
            ("transformer-engine", CPU, "8.9 or higher; this run is on cpu."),
            ("transformer-engine-block", MPS, "9.0 or higher; this run is on mps."),
            ("transformer-engine-mxfp8", CPU, "10.0 or higher, below 12.0; this run is on cpu."),
            ("torchao-mxfp8", CPU, "10.0 or higher, below 11.0; this run is on cpu."),
        )
    ),
]


# On a GPU: its compute capability, what is missing, and what to type.
REFUSED_ON_GPU = [
    ("tf32", {}, (7, 0), "8.0 or higher; cuda:0 (NVIDIA X) has 7.0", "precision=32-true"),
    ("tf32", {"emulate": True}, (8, 0), CPU_ONLY, "accelerator=cpu"),
    ("16-true", {"emulate": True}, (8, 0), CPU_ONLY, "accelerator=cpu"),
    ("16-mixed", {"emulate": True}, (8, 0), CPU_ONLY, "accelerator=cpu"),
    ("bf16-true", {"emulate": True}, (8, 0), CPU_ONLY, "accelerator=cpu"),
    ("bf16-mixed", {"emulate": True}, (8, 0), CPU_ONLY, "accelerator=cpu"),
    (
        "bf16-true",
        {},
        (7, 5),
        "needs bfloat16 units (compute capability 8.0 or higher); cuda:0 (NVIDIA X) has 7.5",
        "Type precision=16-true, or precision.emulate=true",
    ),
    ("bf16-mixed", {}, (7, 5), "has 7.5", "Type precision=16-mixed, or precision.emulate=true"),
    ("bnb-nf4", {}, (5, 2), "needs an NVIDIA GPU of compute capability 6.0", "here: precision=16-"),
    ("bnb-int8", {}, (7, 0), "7.5 or higher; cuda:0 (NVIDIA X) has 7.0.", "precision=16-true"),
    ("bnb-int8-training", {}, (7, 0), "7.5 or higher", "precision=16-true"),
    (
        "bnb-nf4",
        {},
        (7, 5),
        "precision.compute_dtype=bfloat16 needs bfloat16 units",
        "Type precision.compute_dtype=float16, or precision.compute_dtype=float32.",
    ),
    ("bnb-int8", {}, (7, 5), "compute_dtype=bfloat16 needs", "precision.compute_dtype=float16"),
    ("float8-rowwise", {}, (8, 0), "8.9 or higher; cuda:0 (NVIDIA X) has 8.0.", "bf16-mixed"),
    ("float8-rowwise", {}, (7, 5), "cuda:0 (NVIDIA X) has 7.5.", "precision=16-mixed"),
    ("torchao-mxfp8", {}, (9, 0), "10.0 or higher, below 11.0; cuda:0", f"{EMULATE}bf16-mixed"),
    ("torchao-mxfp8", {}, (12, 0), "cuda:0 (NVIDIA X) has 12.0.", f"{EMULATE}bf16-mixed"),
    ("transformer-engine", {}, (8, 0), "8.9 or higher; cuda:0 (NVIDIA X) has 8.0.", "bf16-mixed"),
    ("transformer-engine", {}, (7, 5), "has 7.5.", "precision=16-mixed"),
    ("transformer-engine-block", {}, (8, 9), "9.0 or higher", "bf16-mixed"),
    ("transformer-engine-mxfp8", {}, (9, 0), "10.0 or higher, below 12.0", "bf16-mixed"),
    ("transformer-engine-mxfp8", {}, (12, 0), "10.0 or higher, below 12.0;", "bf16-mixed"),
    ("transformer-engine-nvfp4", {}, (9, 0), "10.0 or higher", "bf16-mixed"),
]


@pytest.mark.parametrize(
    ("name", "options", "place", "what", "remedy"), [*REFUSED_WITHOUT_GPU, *REFUSED_ON_GPU]
)
def test_a_device_that_cannot_run_it_is_refused(name, options, place, what, remedy, monkeypatch):
    if isinstance(place, tuple):  # a capability
        pretend_gpu(monkeypatch, place)
        place = CUDA
    with pytest.raises(Unavailable) as error:
        registry.load_precision(name, **options).require(place)
    assert f"precision={name} " in error.value.what
    assert what in error.value.what
    assert remedy in error.value.remedy


RUNS = [
    *((name, {}, MPS, None) for name in ("32-true", "16-true", "bf16-true")),
    *((f"bnb-{mode}", {}, CPU, None) for mode in ("nf4", "fp4-dq", "int8", "int8-training")),
    *((name, {}, device, (8, 0)) for name in WEIGHT_FORMATS for device in (CPU, CUDA)),
    *((name, {"emulate": True}, CPU, None) for name in ("float8-rowwise", "torchao-mxfp8")),
    ("float8-rowwise", {"emulate": True}, CUDA, (8, 0)),
    *(("float8-rowwise", {}, CUDA, capability) for capability in ((8, 9), (9, 0), (12, 0))),
    *(("torchao-mxfp8", {}, CUDA, capability) for capability in ((10, 0), (10, 3))),
    ("32-true", {}, CUDA, (7, 0)),
    ("tf32", {}, CUDA, (8, 0)),
    *((name, {}, CUDA, (7, 5)) for name in ("32-true", "64-true", "16-true", "16-mixed")),
    *((name, {"emulate": True}, CUDA, (7, 5)) for name in ("bf16-true", "bf16-mixed")),
    *((name, {}, CUDA, (8, 0)) for name in ("bf16-true", "bf16-mixed", "bnb-nf4")),
    ("bnb-nf4", {"compute_dtype": "float32"}, CUDA, (6, 0)),
    ("bnb-nf4", {"compute_dtype": "float16"}, CUDA, (7, 5)),
    ("bnb-fp4-dq", {"compute_dtype": "float32"}, CUDA, (7, 0)),
    ("bnb-int8", {"compute_dtype": "float32"}, CUDA, (7, 5)),
    ("transformer-engine", {"emulate": True}, CPU, None),
]


@pytest.mark.parametrize(("name", "options", "device", "capability"), RUNS)
def test_a_device_that_can_run_it_is_taken(name, options, device, capability, monkeypatch):
    pretend_gpu(monkeypatch, capability)
    precision = registry.load_precision(name, **options)
    precision.require(device)
    assert precision.emulated == (bool(options.get("emulate")) or "nvfp4" in name)


# TransformerEngine: the capability, the version of CUDA, the package, and the library's own check.


def pretend_library(monkeypatch, **functions):
    library = SimpleNamespace(**functions)
    monkeypatch.setattr(te_recipes, "import_library", lambda: library)


def refusal(name):
    with pytest.raises(Unavailable) as error:
        registry.load_precision(name).require(CUDA)
    return error.value


CAPABILITIES = {
    "delayed": {(8, 9), (9, 0), (10, 0), (12, 0)},
    "current": {(8, 9), (9, 0), (10, 0), (12, 0)},
    "block": {(9, 0), (10, 0), (12, 0)},
    "mxfp8": {(10, 0)},
    "nvfp4": {(10, 0), (12, 0)},
}


@pytest.mark.parametrize("name", TRANSFORMER_ENGINE)
def test_each_recipe_runs_on_its_capabilities(name, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    precision = registry.load_precision(name)
    pretend_library(monkeypatch, **{precision.kind.check_name: lambda return_reason: (True, "")})
    for capability in CAPABILITIES[precision.recipe["kind"]]:
        pretend_gpu(monkeypatch, capability)
        precision.require(CUDA)


def test_scales_of_blocks_need_a_newer_cuda(monkeypatch):
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    error = refusal("transformer-engine-block")
    assert "needs CUDA 12.9 or newer; this PyTorch was built with 12.8." in error.what


def test_the_librarys_own_check_comes_last(monkeypatch):
    pretend_gpu(monkeypatch, (8, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check = lambda return_reason: (False, "CublasLt is old.")  # noqa: E731
    pretend_library(monkeypatch, is_fp8_available=check)
    what = refusal("transformer-engine").what
    assert what.endswith("TransformerEngine refuses cuda:0: CublasLt is old.")


# Packages


def test_a_missing_transformer_engine_is_named_with_the_extra(monkeypatch):
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    error = refusal("transformer-engine")
    assert "needs TransformerEngine: transformer_engine.pytorch is not installed." in error.what
    assert error.remedy == 'Type pip install "precision-runner[transformer-engine]".'


def test_a_transformer_engine_that_does_not_import_says_why(monkeypatch):
    def fail(name):
        raise OSError("libnccl.so.2: cannot open shared object file")

    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(te_recipes.importlib, "import_module", fail)
    what = refusal("transformer-engine").what
    assert "cannot be imported: OSError: libnccl.so.2" in what


def test_a_missing_torchao_is_named_after_the_device(monkeypatch):
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(Unavailable) as error:
        registry.load_precision("float8-rowwise", emulate=True).require(CPU)
    assert error.value.remedy == "Type pip install torchao."
    with pytest.raises(Unavailable, match="GPU"):
        registry.load_precision("float8-rowwise").require(CPU)


def test_a_missing_bitsandbytes_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "runner.precision.layers.bnb_linear")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(Unavailable) as error:
        registry.load_precision("bnb-nf4").require(CPU)
    assert "precision=bnb-nf4 needs bitsandbytes, which does not import" in error.value.what
    assert error.value.remedy == 'Type pip install "bitsandbytes>=0.50".'


def test_a_bitsandbytes_without_its_kernels_is_refused(monkeypatch):
    monkeypatch.setattr("bitsandbytes.cextension.lib", type("LibraryMock", (), {})())
    with pytest.raises(Unavailable, match="does not load") as error:
        registry.load_precision("bnb-nf4").require(CPU)
    assert error.value.remedy.startswith("Type python -m bitsandbytes")
