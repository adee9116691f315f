"""Loading processes that an error leaves do not keep the command from ending."""

import pytest
from run_folders import copy_files


@pytest.mark.parametrize("name", ["rows", pytest.param("lines", marks=pytest.mark.extended)])
def test_a_model_that_fails_on_the_first_batch_ends_the_command(fresh_cli, tmp_path, name):
    copy_files("left_processes", tmp_path)
    model = "~model +model._target_=torch.nn.Linear +model.in_features=5 +model.out_features=2"
    data = f"~data +data._target_=mysets.{name} task=classification"
    rest = "train.max_steps=3 train.num_workers=1 tracking=none"
    done = fresh_cli(*model.split(), *data.split(), *rest.split(), timeout=120)
    done.check_refused("fails on the first batch")
