"""How far is the memory that mode=plan predicts for a card from the peaks of an H200?

    python -m bench.plan.memory

predicted: on this machine, from tensors without values, with the layers that the card would hold.
measured: bench/results/gpu/h200.json, torch.cuda.max_memory_allocated of a loop that does not
evaluate.
"""

import json
import statistics
from typing import Any

from bench.common import RESULTS, table, write
from bench.plan.fit import spec_of
from bench.plan.published import own
from runner.core.base.tensor_facts import GIB
from runner.core.config.targets import build_group
from runner.core.policy.precision import ConversionPlan
from runner.planning.card_plan import planned_precision, rehearse
from runner.rooms import install_rooms

LORA = ("bnb-int8", "bnb-fp4", "bnb-fp4-dq", "bnb-nf4", "bnb-nf4-dq", "int8", "int4", "nvfp4")


def predicted_peak(precision: str, width: int) -> int:
    """Return the bytes at the peak of a step of the bench's GPT."""
    words = [*own(width).overrides, f"precision={precision}", "optimizer.eps=1e-4"]
    if precision.startswith(("transformer-engine", "float8", "torchao")):
        words.append("precision.emulate=true")
    spec = spec_of(words)
    value = planned_precision(spec, build_group("precision", spec.precision))
    size = spec.train.batch_size
    found = ConversionPlan()
    return max(map(sum, rehearse(spec, value, found, size, evaluates=False).timeline))


def main() -> None:
    """Predict every peak, and write both."""
    install_rooms()
    measured: list[dict[str, Any]] = json.loads((RESULTS / "gpu" / "h200.json").read_text())["gpt"]
    rows, errors = [], []
    for row in measured:
        if row["compiled"]:
            continue
        name, width = row["precision"], row["width"]
        try:
            peak = predicted_peak(name, width) / GIB
        except Exception as error:
            rows.append([str(width), name, "", f"{row['peak_gib']:.2f}", str(error)[:200]])
            continue
        errors.append(peak / row["peak_gib"] - 1)
        cells = [f"{peak:.2f}", f"{row['peak_gib']:.2f}", f"{errors[-1]:+.1%}"]
        rows.append([str(width), name, *cells])
        print(rows[-1], flush=True)
    worst = max(errors, key=abs)
    text = (
        f"{len(errors)} peaks: median {statistics.median(map(abs, errors)):.1%}, worst {worst:+.1%}"
    )
    head = ["width", "precision", "predicted GiB", "measured GiB", "error"]
    write("plan_memory", (__doc__ or "").splitlines()[0], f"{text}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
