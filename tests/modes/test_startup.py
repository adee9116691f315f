"""Checks of the data before a run."""

from types import SimpleNamespace

import pytest
import torch
from items import Items
from torch import nn

import runner
from runner.core.base.errors import ConfigError
from runner.core.config.schema import GuardSpec
from runner.data.loader import Loader, LoaderOptions
from runner.modes.startup import check_data
from runner.training.tasks.classification import Classification

ROWS = [(torch.zeros(2), 0)] * 4


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_no_loading_process_of_a_test_set_waits_for_the_end_of_the_training():
    spec = SimpleNamespace(guard=GuardSpec(), data={})
    run = SimpleNamespace(spec=spec, task=Classification(), say=print)
    options = LoaderOptions(workers=1)
    loaders = {
        label: Loader(ROWS, 2, shuffle=False, seed=0, device=torch.device("cpu"), options=options)
        for label in ("train", "val", "test", "test/far")
    }
    check_data(run, loaders)
    waiting = [label for label, loader in loaders.items() if loader._worker_loader is not None]
    for loader in loaders.values():
        loader.close()
    assert waiting == ["train", "val"]


class Fails(nn.Module):
    """Fails in its second forward, which is that of the packed texts with another token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.calls = 0

    def forward(self, input_ids, position_ids):
        self.calls += 1
        if self.calls > 1:
            raise ValueError("only once")
        return self.embedding(input_ids)


def test_the_second_forward_for_packed_texts_is_part_of_the_first_batch(tmp_path):
    positions = torch.tensor([0, 1, 0, 1])
    row = {"input_ids": torch.tensor([1, 2, 3, 4]), "position_ids": positions, "labels": positions}
    given = {"model": Fails(), "data": (Items(lambda _: row, 8), Items(lambda _: row, 8))}
    with pytest.raises(ConfigError, match="only once"):
        runner.run(["tracking=none", "task=language"], **given, out=tmp_path / "run")
