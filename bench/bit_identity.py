"""Does a change of the code leave every bit of a training run as it was?

    python -m bench.bit_identity record FILE.json     before the change
    python -m bench.bit_identity compare FILE.json    after it; exit status 1 if anything differs

Tiny models train 20 steps in every precision (emulated where this machine lacks the hardware),
with several models, optimizers, adapters and options, through the command line alone. Each job's
metrics of each step, its result, and digests of its final weights and states are compared exactly.
Measures of time and of the process's memory are ignored. Imports nothing of the runner, so that
modules may move. Both commands need the same machine and the same versions of the packages.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import commit, versions

ROOT = Path(__file__).parents[1]
STEPS = 20
END = "end"
"""Stands for the step of what a run has once."""

Record = dict[str, dict[str, str]]
"""Points of one job: metric, step, value as text that keeps every bit."""

UNSTABLE = ("perf/", "memory/peak", "system/")
RESULT = (
    "status",
    "steps",
    "best",
    "metrics",
    "as_trained",
    "train_loss",
    "converted",
    "converted_weights",
    "trains",
    "kernels",
    "weights_mib",
    "plain_weights_mib",
    "optimizer_mib",
    "skipped_steps",
    "loss_scale",
    "stagnant_share",
)
STATES = ("model", "optimizers", "schedulers", "loss_scale", "precision_state", "rng")
PACKAGES = ("torch", "torchao", "bitsandbytes", "peft", "numpy", "scikit-learn")

PADDED = '''"""Random tokens whose sequences end early: the labels behind the end do not count."""

import torch
from torch.utils.data import TensorDataset


def tokens(context, vocab, count, **_):
    drawn = torch.randint(vocab, (count, context + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    lengths = torch.arange(count)[:, None] % context + 1
    targets[torch.arange(context) >= lengths] = -100
    half = count // 2
    train = TensorDataset(inputs[half:], targets[half:])
    return train, TensorDataset(inputs[:half], targets[:half])
'''
SHARED = "accelerator=cpu tracking.log_model=false tracking.system_metrics=null"
LOGGED = f"train.eval_every={STEPS // 2} train.log_every=7"
LENGTH = f"train.max_steps={STEPS} {LOGGED}"
MLP = f"-m {LENGTH} model=mlp model.hidden=[64,64] data=digits train.batch_size=16"
GPT = f"""
    {LOGGED} model=gpt model.layers=1 model.width=32 model.heads=2 model.dropout=0.1
    data=synthetic_tokens data._target_=padded.tokens data.vocab=32 data.context=16 data.count=128
    train.batch_size=8 train.clip_norm=0.5 train.accumulate=4
    scheduler=cosine scheduler.T_max={STEPS}
"""
IMAGES = f"-m {LENGTH} model=vit,resnet data=digits data.val_fraction=0.05 train.batch_size=4"
EMULATED = "precision.emulate=true optimizer.eps=1e-4"
# The loss scale of 16-mixed overflows at first and grows again within the run.
SCALE = "precision.loss_scale.init_scale=1e9 precision.loss_scale.growth_interval=4"
LANES = (
    {
        "mlp": f"{MLP} sweep=every_precision {EMULATED}",
        "evaluated": "-m mode=evaluate checkpoint.path=mlp/1 precision.emulate=true "
        "precision=64-true,16-true,bnb-int8,bnb-nf4,float8-rowwise",
        "kept_in_float32": f"{MLP} precision=16-mixed,16-true,bf16-true,transformer-engine "
        f"precision.keep_fp32=[layers.0] {EMULATED} {SCALE}",
        "optimizers": f"{MLP} precision=32-true,bf16-true "
        "optimizer=sgd,muon,adam8bit,adamw4bit,adamwfp8",
    },
    {
        "half": f"{GPT} precision=16-mixed {SCALE} optimizer=adamw8bit "
        f"optimizer.min_8bit_size=1 hydra.run.dir=resumed/0 train.max_steps={STEPS // 2}",
        "rest": f"checkpoint.resume=resumed/0 train.max_steps={STEPS}",
        "gpt": f"-m {GPT} train.max_steps={STEPS} {SCALE} adapter=none,lora "
        "precision=32-true,16-mixed,bf16-true,bnb-nf4",
        "images": f"{IMAGES} precision=16-mixed,bf16-true",
    },
)
"""Name and overrides of commands that run one after the other in a folder; lanes run at once."""


def train(lane: Mapping[str, str], folder: Path) -> None:
    """Run the commands of a lane.

    Raises:
        SystemExit: one of them fails.
    """
    folder.mkdir()
    (folder / "padded.py").write_text(PADDED)
    env = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, overrides in lane.items():
        began = time.perf_counter()
        words = f"{overrides} {SHARED} hydra.sweep.dir={name}".split()
        command = [sys.executable, "-m", "runner", *words]
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{done.stdout[-4000:]}\n{name}: exit status {done.returncode}")
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def exact_text(value: object) -> str:
    """Return a text that differs if any bit of a value does."""
    return value.hex() if isinstance(value, float) else json.dumps(value, default=str)


def leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the exact text of a value, or of each in a mapping."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{name} {key}")
    else:
        yield name, exact_text(value)


def update_digest(digest: Any, value: Any) -> None:
    """Add a checkpoint's mapping, list, tensor or plain value to a digest."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            digest.update(f"{key}:".encode())
            update_digest(digest, part)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} values".encode())
        for part in value:
            update_digest(digest, part)
    else:
        digest.update(f"{type(value).__name__} {exact_text(value)}".encode())


def read_job(folder: Path) -> Record:
    """Return what a job's files hold."""
    result = json.loads((folder / "result.json").read_text())
    record = {
        metric: {END: text}
        for key in RESULT
        for metric, text in leaves(result.get(key), f"result {key}")
    }
    if (folder / "history.npz").exists():
        with np.load(folder / "history.npz") as history:
            for metric in sorted(history.files):
                if metric.startswith(UNSTABLE):
                    continue
                steps = record.setdefault(metric, {})
                for step, _, value in history[metric].T.tolist():
                    steps[str(int(step))] = f"{steps.get(str(int(step)), '')} {value.hex()}".strip()
    for path in sorted((folder / "checkpoints").glob("*.pt")):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for state in STATES:
            digest = hashlib.sha256()
            update_digest(digest, checkpoint[state])
            record[f"sha256 of {state} in {path.name}"] = {END: digest.hexdigest()}
    return record


def run_all() -> dict[str, Record]:
    """Run every job and return its record, by sweep, number and label.

    Raises:
        SystemExit: a job fails.
    """
    jobs = {}
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor() as pool:
        folders = [Path(home) / str(number) for number in range(len(LANES))]
        list(pool.map(train, LANES, folders))
        for path in sorted(Path(home).glob("*/*/*/result.json")):
            label = json.loads(path.read_text())["label"]
            name = f"{path.parent.parent.name} {path.parent.name} {label}"
            jobs[name] = read_job(path.parent)
    return jobs


def differences(before: Mapping[str, Record], after: Mapping[str, Record]) -> Iterator[str]:
    """Yield a line for each value that differs: job, step, metric, before, after."""
    for job in sorted({*before, *after}):
        old, new = before.get(job, {}), after.get(job, {})
        for metric in sorted({*old, *new}):
            was, now = old.get(metric, {}), new.get(metric, {})
            for step in sorted({*was, *now}, key=lambda step: (step == END, step.zfill(9))):
                if was.get(step) != now.get(step):
                    change = f"{was.get(step, 'nothing')} -> {now.get(step, 'nothing')}"
                    yield f"{job}, step {step}, {metric}: {change}"


def machine() -> str:
    """Return what two records must share to be comparable."""
    return f"{versions(*PACKAGES)}, CPU kernels {torch.backends.cpu.get_cpu_capability()}"


def main() -> int:
    """Record, or compare and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    before = json.loads(args.file.read_text()) if args.command == "compare" else {}
    if before and before["machine"] != machine():
        sys.exit(f"recorded with {before['machine']}; here is {machine()}. Record anew.")
    jobs = run_all()
    if args.command == "record":
        results = {"commit": commit(), "machine": machine(), "jobs": jobs}
        args.file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{len(jobs)} runs of {STEPS} steps: recorded in {args.file}")
        return 0
    lines = list(differences(before["jobs"], jobs))
    print("\n".join(lines) or f"{len(jobs)} runs of {STEPS} steps: bit-identical")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
