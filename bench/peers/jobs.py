"""The jobs that every contender trains. Nothing here imports torch, which the contenders do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SEED = 0


@dataclass(frozen=True)
class Job:
    """One thing to train.

    Attributes:
        name: in the tables.
        model, data: options of the runner's config.
        model_args, data_args: what their targets are called with.
        batch: examples in a batch.
        steps: in a segment, that is between two readings of the clocks.
        rounds: segments of each contender.
        real: realistic, so that throughput is what matters; else the cost of a step is.
    """

    name: str
    model: str
    model_args: Mapping[str, Any]
    data: str
    data_args: Mapping[str, Any]
    batch: int
    steps: int
    rounds: int
    real: bool = True


def _images(side: int, examples: int) -> dict[str, Any]:
    return {"shape": [3, side, side], "classes": 10, "count": examples}


def _resnet(depth: int, side: int) -> dict[str, Any]:
    return {"depth": depth, "classes": 10, "input_shape": [3, side, side]}


def _gpt(vocab: int, context: int, layers: int, width: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "context": context,
        "layers": layers,
        "heads": width // 32,
        "width": width,
    }


def _tokens(context: int, examples: int) -> dict[str, Any]:
    return {"vocab": 64, "context": context, "count": examples}


MLP = Job(
    "mlp",
    "mlp",
    {"input_shape": [16], "classes": 4, "hidden": [16]},
    "synthetic_images",
    {"shape": [16], "classes": 4, "count": 640},
    8,
    1000,
    15,
    real=False,
)
RESNET18 = Job(
    "resnet18", "resnet", _resnet(18, 32), "synthetic_images", _images(32, 320), 4, 20, 7
)
RESNET50 = Job(
    "resnet50", "resnet", _resnet(50, 32), "synthetic_images", _images(32, 320), 4, 20, 5
)
GPT = Job("gpt", "gpt", _gpt(64, 64, 4, 128), "synthetic_tokens", _tokens(64, 320), 4, 20, 9)
JOBS = {job.name: job for job in (MLP, RESNET18, RESNET50, GPT)}
GPU_JOBS = {
    job.name: job
    for job in (
        MLP,
        Job(
            "resnet50", "resnet", _resnet(50, 224), "synthetic_images", _images(224, 640), 64, 40, 9
        ),
        Job(
            "gpt124m",
            "gpt",
            {**_gpt(50304, 1024, 12, 768), "heads": 12},
            "synthetic_tokens",
            _tokens(1024, 320),
            8,
            40,
            9,
        ),
    )
}


def jobs(device: str) -> dict[str, Job]:
    """Return the jobs for a device, by name."""
    return GPU_JOBS if device == "cuda" else JOBS
