import random

import numpy as np
import torch

from runner import RunCallback

SEEN = []


class Note(RunCallback):
    """Notes every call, reads the model, draws random numbers, and leaves modes changed."""

    def __init__(self):
        self.count = 0
        self.tensor = torch.zeros(2, dtype=torch.bfloat16)

    def on_steps(self, records, run):
        torch.randn(3), random.random()
        run.model.eval()
        self.count += len(records)
        self.tensor += len(records)
        weight = next(run.model.parameters())
        assert not (weight * 2).requires_grad
        SEEN.append(("steps", [record.step for record in records], run.step))
        for record in records:
            run.log({"doubled": 2 * record.loss}, step=record.step)
        run.log({"mine/count": torch.tensor(self.count)})

    def on_evaluation(self, record, run):
        SEEN.append(("evaluation", record.step, sorted(record.metrics)))
        run.save(f"text-{record.step}.txt", "hello")
        run.save("more/bytes", b"x")

    def on_end(self, end, run):
        SEEN.append(("end", end))

    def state_dict(self):
        numbers = [np.int64(1), (np.float32(2), None)]
        return {"count": self.count, "tensor": self.tensor, "list": numbers}

    def load_state_dict(self, state):
        assert state["list"] == [1, (2.0, None)]
        self.count, self.tensor = state["count"], state["tensor"]
        SEEN.append(("load", self.count, self.tensor.tolist(), str(self.tensor.dtype)))


class Stop(RunCallback):
    def __init__(self, hook="on_steps", at=2, reason="seen enough"):
        self.hook, self.at, self.reason = hook, at, reason

    def on_steps(self, records, run):
        if self.hook == "on_steps" and run.step >= self.at:
            run.stop(self.reason)

    def on_evaluation(self, record, run):
        if self.hook == "on_evaluation" and run.step >= self.at:
            run.stop(self.reason)

    def on_end(self, end, run):
        SEEN.append(("end", end))


def weights(run):
    with torch.no_grad():
        next(run.model.parameters()).mul_(2)


FAULTS = {
    "raise": lambda run: {}["no such thing"],
    "weights": weights,
    "name": lambda run: run.log({"train/loss": 1}),
    "value": lambda run: run.log({"loss": "high"}),
    "step": lambda run: run.log({"loss": 1}, step=99),
    "file": lambda run: run.save("../secret", "text"),
    "reason": lambda run: run.stop(""),
}


class Fail(RunCallback):
    def __init__(self, what="raise", until=4):
        self.what, self.until = what, until

    def on_steps(self, records, run):
        if run.step == self.until and self.what in FAULTS:
            FAULTS[self.what](run)

    def on_end(self, end, run):
        if self.what == "end":
            raise RuntimeError("at the end")

    def state_dict(self):
        return {"value": object() if self.what == "state" else 1}

    def load_state_dict(self, state):
        if self.what == "load":
            raise ValueError("of another version")


class Misspelt(RunCallback):
    def on_step(self, records, run):
        pass

    def on_evaluation(self, record):
        pass


class Idle(RunCallback):
    pass


class Stranger:
    def on_steps(self, records, run):
        pass


def made(times=1):
    return Note()


def wrong():
    return {}
