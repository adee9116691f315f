"""Is the bound of mode=plan ever beaten on this machine, and how far is the expected step?

    python -m bench.plan.machine

bound: the products and attention of a step at the rate that the best large product reached, just
before. expected: runner.planning.card_speed's, with the bandwidth of a copy. measured: the least
and the median of several steps on random data, in one process.
"""

import statistics
import time

import torch

from bench.common import table, write
from bench.plan.fit import spec_of
from runner.core import ConfigError, accelerators, train_step
from runner.core.config.targets import build_group
from runner.core.policy.precision import ConversionPlan
from runner.data.loader import Batch
from runner.diagnostics.memory.forecast import build_rehearsal
from runner.planning.card_plan import rehearse
from runner.planning.card_speed import least_seconds, step_seconds
from runner.planning.measured_device import measure_device
from runner.rooms import install_rooms
from runner.training.example_batch import example_batch

MODELS = {
    "mlp": ("model=mlp", "data=digits", "model.hidden=[1024,1024]", "train.batch_size=512"),
    "resnet": ("model=resnet", "data=synthetic_images", "train.batch_size=32"),
    "vit": ("model=vit", "data=digits", "train.batch_size=64"),
    "gpt": ("model=gpt", "data=text", "train.batch_size=32"),
    "mixture": ("model=mixture", "data=text", "train.batch_size=32"),
    "llama": (
        *("model=hf", "model.kind=causal_lm", "task=hf", "data=synthetic_tokens"),
        "model.config={model_type:llama,hidden_size:256,intermediate_size:688,num_hidden_layers:4,"
        "num_attention_heads:4,num_key_value_heads:2,vocab_size:1024,max_position_embeddings:256}",
        *("data.meta.classes=1024", "data.meta.input=[256]", "train.batch_size=8"),
    ),
}
PRECISIONS = ("32-true", "64-true", "bf16-mixed")
STEPS = 7


def measured_seconds(overrides: tuple[str, ...]) -> list[float]:
    """Return the times of steps on random data."""
    spec = spec_of(overrides)
    device = torch.device("cpu")
    precision = build_group("precision", spec.precision)
    size = spec.train.batch_size

    def micro_batches(count: int) -> list[Batch]:
        return [example_batch(spec, count, device)]

    rehearsal = build_rehearsal(
        spec, precision, device, ConversionPlan(), micro_batches, fake=False
    )
    times = []
    with precision.session(rehearsal.state.plain_model, device):
        batch = micro_batches(size)
        for _ in range(STEPS + 2):
            start = time.perf_counter()
            train_step(rehearsal.state, batch)
            times.append(time.perf_counter() - start)
    return times[2:]


def main() -> None:
    """Measure every model in every precision."""
    install_rooms()
    rows, factors, bounds = [], [], []
    for name, words in MODELS.items():
        for precision in PRECISIONS:
            overrides = (*words, f"precision={precision}")
            card = measure_device(accelerators.choose_accelerator("cpu"))
            spec = spec_of(overrides)
            try:
                cost = rehearse(spec, None, ConversionPlan(), spec.train.batch_size).cost
            except ConfigError as error:
                rows.append([name, precision, f"not planned: {error}", *[""] * 5])
                continue
            bound = least_seconds(cost, card)
            expected = step_seconds(cost, card, False, False).total
            times = measured_seconds(overrides)
            factors.append(statistics.median(times) / expected)
            bounds.append(min(times) / bound)
            cells = [bound, expected, min(times), statistics.median(times)]
            rows.append([name, precision, *(f"{1e3 * cell:.1f}" for cell in cells)])
            rows[-1] += [f"{bounds[-1]:.2f}", f"{factors[-1]:.2f}"]
            print(rows[-1], flush=True)
    head = ["model", "precision", "bound, ms", "expected, ms", "least, ms", "median, ms"]
    head += ["least over bound", "median over expected"]
    text = (
        f"Least over bound: {min(bounds):.2f} and more. Median over expected: {min(factors):.2f} "
        f"to {max(factors):.2f}, median {statistics.median(factors):.2f}."
    )
    write("plan_machine", (__doc__ or "").splitlines()[0], f"{text}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
