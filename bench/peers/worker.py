"""Run one contender in a process of its own; a parent reads its clocks and says when to continue.

    python -m bench.peers.worker '{"contender": "raw", "job": "mlp", ...}'

Every contender, the runner included, has to call cross_entropy once in a step. There the steps are
counted, the first losses are noted, and between two segments the process waits for a line on stdin.
A segment is from one step's loss to the loss `steps` steps later: a whole number of steps with all
that a contender does between them. On stdout goes one JSON line per segment.
"""

import json
import os
import sys
import time
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.contenders import CONTENDERS
from bench.peers.jobs import jobs

PROFILE = "PEERS_PROFILE"
"""Environment variable: the file for cProfile's statistics of the segments."""


class Order(NamedTuple):
    """What a worker trains: warm-up steps, then segments of steps.

    Attributes:
        first: of how many first steps it reports the losses.
    """

    contender: str
    job: str
    precision: str
    device: str
    warmup: int
    steps: int
    segments: int
    first: int = 8

    @property
    def total(self) -> int:
        """Return the steps of the whole training: the last one's loss ends the last segment."""
        return self.warmup + self.segments * self.steps + 1


class StepGate:
    """A counter of steps that reports at the end of the warm-up and of each segment, and waits."""

    def __init__(self, order: Order, reports: Any) -> None:
        self.order, self.reports = order, reports
        self.count, self.next = 0, order.warmup + 1
        self.first: list[float] = []
        self.dtype = ""
        self.cpu = self.wall = 0.0
        self.profile = None
        if PROFILE in os.environ:
            self.profile = import_module("cProfile").Profile(time.process_time)

    def step(self, loss: Any) -> None:
        """Count a training step with its loss."""
        self.count += 1
        if self.count <= self.order.first:
            self.first.append(loss.item())
        if self.count == self.next:
            self.wait()

    def wait(self) -> None:
        """Report the clocks, and wait for the parent."""
        if self.profile:
            self.profile.disable()
        if self.order.device == "cuda":
            imported_torch().cuda.synchronize()
        cpu, wall, now = time.process_time(), time.perf_counter(), time.monotonic()
        report = {
            "cpu": cpu - self.cpu,
            "wall": wall - self.wall,
            "total_cpu": cpu,
            "now": now,
            "count": self.count,
            "peak": peak_memory(),
            "first": self.first,
            "dtype": self.dtype,
        }
        if self.order.device == "cuda":
            report["device_peak"] = imported_torch().cuda.max_memory_allocated()
        self.next += self.order.steps
        print(json.dumps(report), file=self.reports, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody waits for this contender any more")
        if self.profile and self.count < self.order.total:
            self.profile.enable()
        self.cpu, self.wall = time.process_time(), time.perf_counter()


def imported_torch() -> Any:
    """Return torch, whose import is left to the contender."""
    return import_module("torch")


def peak_memory() -> int:
    """Return the greatest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


class LossHook(MetaPathFinder):
    """A hook on the import of torch.nn.functional that shows the gate each training step's loss.

    The import is left to the contender. The gate also gets the dtype in which the last linear layer
    of the first step computed.
    """

    def __init__(self, gate: StepGate) -> None:
        self.gate, self.seen = gate, list[str]()

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return torch.nn.functional's spec with a loader that attaches the hook."""
        if name != "torch.nn.functional":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            self.attach(module)

        spec.loader.exec_module = executed
        return spec

    def attach(self, functional: Any) -> None:
        """Replace cross_entropy and linear by functions that notify the gate."""
        cross_entropy, linear = functional.cross_entropy, functional.linear

        def counted(output: Any, target: Any, **options: Any) -> Any:
            # Under a mode of torch's, the function calls itself by its name once more.
            functional.cross_entropy = cross_entropy
            loss = cross_entropy(output, target, **options)
            functional.cross_entropy = counted
            if loss.requires_grad:  # no trial and no evaluation
                self.gate.dtype = self.gate.dtype or self.seen[-1]
                functional.linear = linear
                self.gate.step(loss)
            return loss

        def watched(*arguments: Any, **options: Any) -> Any:
            output = linear(*arguments, **options)
            self.seen.append(str(output.dtype).removeprefix("torch."))
            return output

        functional.cross_entropy, functional.linear = counted, watched


def main() -> None:
    """Train the job of the order on the command line."""
    order = Order(**json.loads(sys.argv[1]))
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a contender prints is no report
    gate = StepGate(order, reports)
    sys.meta_path.insert(0, LossHook(gate))
    train = CONTENDERS[order.contender]
    train(jobs(order.device)[order.job], order.precision, order.total, order.device)
    if gate.profile:
        gate.profile.dump_stats(os.environ[PROFILE])


if __name__ == "__main__":
    main()
