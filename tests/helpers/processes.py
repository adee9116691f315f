"""What the tests of several processes share."""

import json

import torch

MLP = "model=mlp model.hidden=[16,16]"
SGD = "optimizer=sgd optimizer.lr=0.1"
IMAGES = (
    "data=synthetic_images data.shape=[1,8,8] data.count=300 train.batch_size=30 "
    "train.max_steps=6 train.eval_every=3 train.log_every=2"
)


class Outcome:
    """What a run left in its folder."""

    def __init__(self, folder):
        self.folder = folder

    def text(self, name):
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    @property
    def refused(self):
        return self.text("refused-0.txt")

    def values(self, key, rank=0):
        """A metric by step."""
        own = self.folder / "ranks" / str(rank) if rank else self.folder
        assert not self.text(f"failed-{rank}.txt"), self.text(f"failed-{rank}.txt")
        assert not self.text(f"refused-{rank}.txt"), self.text(f"refused-{rank}.txt")
        rows = map(json.loads, (own / "steps.jsonl").read_text().splitlines())
        return {row["step"]: row[key] for row in rows if key in row}

    def checkpoint(self):
        found = sorted(self.folder.glob("checkpoints/step-*.pt"))
        return found[-1]

    def content(self):
        """Return that of the last checkpoint."""
        from runner.core.record.checkpoint_file import load

        return load(self.checkpoint())

    def weights(self):
        return self.content()["model"]

    def moments(self):
        """Return the tensors of the optimizer's state, whole, by parameter and key."""
        from runner.core.record.checkpoint_file import load_full, shards_folder

        (optimizer,) = self.content()["optimizers"]
        state = load_full(optimizer, shards_folder(self.checkpoint()))["state"]
        named = ((index, key, value) for index, own in state.items() for key, value in own.items())
        return {(index, key): value for index, key, value in named if key != "step"}

    def averages(self):
        return self.content()["average"]["weights"]


def close(one, other, **how):
    """Whether two mappings of numbers or tensors agree."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(other[key]), **how)
