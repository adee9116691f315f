"""Checks of the data before a run."""

from types import SimpleNamespace

import pytest
import torch

from runner.config.schema import GuardSpec
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
