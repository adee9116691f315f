"""Runs that differ in what is typed after the same first words."""

import json

from runner.core.record.checkpoint_file import load


class Trained:
    """A run that ended well: its folder, its result and what it printed in one line."""

    def __init__(self, folder, stdout):
        self.folder, self.stdout = folder, " ".join(stdout.split())
        self.result = json.loads((folder / "result.json").read_text())

    @property
    def numbers(self):
        """What equal runs have in common."""
        return self.result["train_loss"], self.result["metrics"], self.result["steps"]

    def content(self):
        """Return that of the last checkpoint."""
        return load(max(self.folder.glob("checkpoints/step-*.pt")))


class TypedRuns:
    """Commands of a working directory; what they type is one text."""

    def __init__(self, main, home, words):
        self.main, self.home, self.words = main, home, words.split()

    def __call__(self, typed=""):
        return self.main(*self.words, *typed.split())

    def train(self, typed="", name="run"):
        """Train in the folder of a name."""
        return self._trained(self(f"{typed} hydra.run.dir={name}"), name)

    def resume(self, typed, name="run"):
        """Resume the run in the folder of a name."""
        return self._trained(self.main(f"checkpoint.resume={name}", *typed.split()), name)

    def evaluate(self, name="run", typed=""):
        """Evaluate a run, without typing anything of its training again."""
        where = f"mode=evaluate checkpoint={name} tracking=none hydra.run.dir=evaluated"
        return self._trained(self.main(*where.split(), *typed.split()), "evaluated")

    def _trained(self, done, name):
        assert done.rc == 0, done.stderr
        return Trained(self.home / name, done.stdout)

    def fail(self, typed="", status=2):
        """Return the message of a command that fails in one line."""
        done = self(typed)
        assert done.rc == status, done
        assert "Traceback" not in done.stderr + done.stdout
        return " ".join(done.stderr.split())
