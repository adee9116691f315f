from types import SimpleNamespace

from states import CPU
from torch import nn

from runner.core.loop.callback import RunCallback
from runner.core.record.tracker import NoTracker, RunOutput
from runner.output.console import plain_console
from runner.training.callbacks.user_callbacks import UserCallbacks


class Watched(nn.Identity):
    passes = 0

    def modules(self):
        self.passes += 1
        return super().modules()


class Reads(RunCallback):
    def on_steps(self, records, run):
        if run.step == 2:
            run.model.eval()


def test_the_modules_are_noted_only_for_a_hook_that_reads_the_model(step, tmp_path):
    model = Watched()
    strategy = SimpleNamespace(shards=False)
    state = SimpleNamespace(precision=SimpleNamespace(name="32-true"), step=2, device=CPU)
    state.plain_model, state.strategy = model, strategy
    output = RunOutput(tmp_path, plain_console(), NoTracker())
    callbacks = UserCallbacks({"mine": Reads()}, state, output)
    passes = []
    for number in (1, 2):
        callbacks.on_steps([step(number)], None)
        passes.append(model.passes)
    assert passes == [0, 1]
    assert model.training
