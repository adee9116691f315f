"""What does a training step in emulated FP8 and FP4 cost against one in float32?

step: CPU time of a training step of a GPT (4 layers, 128 wide, 8 x 64 tokens) over that of 32-true
in the same round, contenders in turn, one thread.
"""

import argparse

import torch

from bench.common import interleave, median, table, versions, write
from bench.low_bit import here, steps

STEPS = 2  # of a round of low_bit.steps
KINDS = ("transformer-engine", "float8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    names = ["32-true", "bf16-true", *(name for name in here() if name.startswith(KINDS))]
    # CPU seconds: on a machine that others use, wall time is theirs as well.
    runs = {name: steps(name) for name in names}
    times = {name: [cpu for cpu, _ in spent] for name, spent in interleave(runs, rounds).items()}
    rows = []
    for name, spent in times.items():
        ratios = [a / b for a, b in zip(spent, times["32-true"], strict=True)]
        milliseconds = f"{median(spent) / STEPS * 1e3:.0f}"
        step = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([f"`{name}`", milliseconds, step])
    body = table(["precision", "ms", "step (least to greatest)"], rows)
    setting = f"{versions('torch', 'torchao')}, one thread, {rounds} rounds"
    write("emulated_fp8", (__doc__ or "").strip().splitlines()[0], f"{body}\n\n{setting}")


if __name__ == "__main__":
    main()
