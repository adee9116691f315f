"""Callbacks of one's own for runs of several processes."""

from runner import RunCallback


class Stop(RunCallback):
    """Logs, and asks to stop at a step."""

    def __init__(self, at=2):
        self.at = at

    def on_steps(self, records, run):
        run.log({"loss": records[-1].loss})
        run.save(f"step-{run.step}.txt", "seen")
        if run.step >= self.at:
            run.stop("seen enough")

    def state_dict(self):
        return {"at": self.at}


class Fail(RunCallback):
    """Fails in its second call, or reads the model."""

    def __init__(self, reads=False):
        self.reads = reads

    def on_steps(self, records, run):
        if self.reads:
            run.model.train()
        if run.step >= 2:
            raise ValueError("failed as it was told to")
