"""Measure tokens per second of a GPT in every precision against bf16-mixed, by hidden size.

One process, contenders one after the other on the same shapes, timed with device events around
blocks of steps on random tokens; bf16-mixed and float8-* eagerly and through torch.compile.
The card's own ceilings (a large bfloat16 product, a copy) are measured first. One JSON line each,
written as it comes.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.common import parse_options
from bench.training import training_state
from models.gpt import GPT
from runner.core.loop.step import train_step
from runner.precision.registry import load_precision, supported_precisions
from runner.training.tasks.language import Language

VOCABULARY = 50304  # GPT-2's, rounded up to a multiple of 128
NOT_MEASURED = ("64-true", "32-true", "16-true")  # nobody trains a GPT in them for speed
COMPILED = ("bf16-mixed", "float8-")  # what compiling is compared for


def main() -> None:
    """Write one JSON line for each measurement."""
    # Tokens are those of a batch, steps those of a block.
    options = parse_options(
        __doc__,
        out="throughput.jsonl",
        device="cuda",
        widths=[4096, 2048, 1024],
        layers=4,
        tokens=16384,
        context=1024,
        blocks=5,
        steps=4,
    )
    device = torch.device(options.device)
    with Path(options.out).open("w") as file:
        for line in measure(options, device):
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)


def measure(options: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the ceilings, then every precision at every width.

    Packed weights do not get faster, and so are measured at the last width only.
    """
    yield {"kind": "ceilings", **ceilings(device)}
    runs = [
        row.name
        for row in supported_precisions(device)
        if row.runs and row.name not in NOT_MEASURED
    ]
    names = ["bf16-mixed", *(name for name in runs if name != "bf16-mixed")]
    for width in options.widths:
        for name in names:
            if name.startswith("bnb-") and width != options.widths[-1]:
                continue
            ways = (False, True) if name.startswith(COMPILED) else (False,)
            for compiled in ways:
                row = {"kind": "gpt", "precision": name, "width": width, "compiled": compiled}
                try:
                    yield row | measure_gpt(options, device, name, width, compiled)
                except Exception as error:
                    yield row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                finally:  # nothing of one precision stays for the next
                    torch._dynamo.reset()
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()


def device_seconds(device: torch.device, run: Callable[[], None]) -> float:
    """Return the device seconds of a call."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3


def ceilings(device: torch.device) -> dict[str, float]:
    """Measure TFLOP/s of a bfloat16 product and TB/s of a copy, on tensors larger than caches."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    big = torch.randn(2**28 if device.type == "cuda" else 2**20, device=device)
    other = torch.empty_like(big)
    product = min(device_seconds(device, lambda: torch.mm(a, b)) for _ in range(20))
    copy = min(device_seconds(device, lambda: other.copy_(big)) for _ in range(20))
    return {"tflops": 2 * size**3 / product / 1e12, "tbps": 2 * big.nbytes / copy / 1e12}


def measure_gpt(
    options: Any, device: torch.device, name: str, width: int, compiled: bool
) -> dict[str, float]:
    """Measure tokens per second (median, least and greatest), and peak memory in GiB."""
    precision = load_precision(name)
    torch.manual_seed(0)
    batch, length = options.tokens // options.context, options.context
    with device:
        model = GPT(VOCABULARY, length, options.layers, max(1, width // 128), width)
    parameters = sum(p.numel() for p in model.parameters())
    model, report = precision.convert(model, device)
    model.to(device)
    trained: Any = torch.compile(model) if compiled else model
    state = training_state(trained, precision, Language(), device, lr=1e-4, eps=1e-4)
    batches = [
        tuple(torch.randint(VOCABULARY, (batch, length), device=device) for _ in range(2))
        for _ in range(3)
    ]
    count_of_steps = 0

    def steps(count: int) -> None:
        nonlocal count_of_steps
        for _ in range(count):
            train_step(state, [batches[count_of_steps % len(batches)]])  # type: ignore[list-item]
            count_of_steps += 1

    with precision.session(model, device):
        steps(4)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        blocks = [
            device_seconds(device, lambda: steps(options.steps)) for _ in range(options.blocks)
        ]
    rates = [options.steps * batch * length / block for block in blocks]
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {
        "tokens_per_second": statistics.median(rates),
        "least": min(rates),
        "greatest": max(rates),
        "peak_gib": peak,
        "parameters": parameters,
        "converted": str(report),  # type: ignore[dict-item]
        "batch": batch,
        "context": length,
        "layers": options.layers,
    }


if __name__ == "__main__":
    main()
