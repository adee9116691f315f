"""The callback of norms.every, imported where it is asked for."""

from contextlib import contextmanager

from runner.core import RunCallback


class LargestWeight(RunCallback):
    key = "norms"

    def __init__(self, state, every, say):
        self.state, self.every, self.say = state, every, say

    def around_step(self, step):
        return self.look(step) if step % self.every == 0 else None

    @contextmanager
    def look(self, step):
        yield
        largest = max(float(p.detach().abs().max()) for p in self.state.plain_model.parameters())
        self.say(f"step {step}: largest weight {largest:.3f}")
