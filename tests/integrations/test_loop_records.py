"""What a record of a loop of one's own does, with Fabric and with Accelerate."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from foreign_models import tiny_net
from torch import nn

from runner.core import step_records

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from accelerate import Accelerator
from foreign_trainings import (
    accelerate_parts,
    fabric_parts,
    train_with_accelerate,
    train_with_fabric,
)

from runner.core.base.errors import ConfigError
from runner.integrations import steps
from runner.integrations.accelerate import PrecisionRecord
from runner.integrations.lightning import FabricRecord
from runner.integrations.training_source import check_sharding
from runner.tracking import history

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and devices


def test_evaluations_and_examples_of_a_loop_are_recorded(lab):
    train_with_fabric(folder="told")
    result = lab.result(lab.folder / "told")
    assert result.metrics == {"val/loss": 0.5}
    assert lab.points(result, "val/loss") == {4: 0.5}
    assert lab.points(result, "perf/examples_per_second")[4] > 0
    train_with_accelerate(folder="not told")
    result = lab.result(lab.folder / "not told")
    assert lab.points(result, "perf/examples_per_second") == {}
    assert result.examples_per_second is None


def test_a_loop_that_begins_at_a_later_step(lab):
    train_with_accelerate(steps=2, start_step=10)
    assert list(lab.points(lab.result(), "train/loss")) == [11, 12]


def test_the_time_of_no_step_is_negative(lab):
    """The run is opened after the first step, which has ended by then."""
    train_with_accelerate(log_every=1)
    times = history.from_folder(lab.run)["perf/step_ms"][2]
    assert (times > 0).all()


def backward(accelerator, model):
    accelerator.backward(model(torch.ones(1, 4), torch.ones(1).long())["loss"])


def test_backwards_without_a_step_of_the_record_are_warned_of(lab, capsys):
    accelerator, model, optimizer, _ = accelerate_parts()
    with PrecisionRecord(accelerator, model, optimizer):
        backward(accelerator, model)
    assert "nothing is recorded. Call record.step() in each step." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("counts", "loss"), [((3, 1), 3.0), ((0, 0), 4.0)], ids=["told", "not told"]
)
def test_micro_batches_weigh_as_many_examples_as_they_have(counts, loss):
    reader = steps.StepReader(None)
    for number, count in enumerate(counts):
        # Two losses of one micro-batch are summed: 2 and 6 are the means over its examples.
        reader.add_loss(torch.tensor(1.0), number)
        reader.add_loss(torch.tensor(1.0 + 4 * number), number)
        reader.add_examples(count)
    reader.read_gradients(torch.optim.SGD(tiny_net().parameters()))
    record = reader.end_step(1, 1)
    assert (float(record.loss), record.examples) == (loss, sum(counts))


def test_slow_steps_are_sent_before_their_block_is_full(monkeypatch):
    buffer = Mock(ready_records=list)
    monkeypatch.setattr(step_records, "RecordBuffer", lambda *_: buffer)
    monkeypatch.setattr(steps, "MAX_BLOCK_SECONDS", -1.0)
    records = steps.StepRecords(SimpleNamespace(plain_model=nn.Linear(1, 1)), [], None, 100)
    records.add(SimpleNamespace(step=1, epoch=1))
    assert buffer.send.call_count == 1


def test_a_folder_that_is_being_recorded_in_is_refused(lab):
    accelerator, model, optimizer, _ = accelerate_parts()
    with PrecisionRecord(accelerator, model, optimizer, folder="mine") as first:
        backward(accelerator, model)
        optimizer.step()
        first.step()
        second = PrecisionRecord(
            Accelerator(cpu=True), model, optimizer, folder="mine", start_step=1
        )
        with pytest.raises(ConfigError, match="another run is being recorded there"):
            second.__enter__()


def fabric_record():
    fabric, model, optimizer = fabric_parts()
    return fabric, model, FabricRecord(fabric, model, optimizer)


def accelerate_record():
    accelerator, model, optimizer, _ = accelerate_parts()
    return accelerator, model, PrecisionRecord(accelerator, model, optimizer)


@pytest.mark.parametrize(
    ("parts", "owner"), [(fabric_record, "fabric"), (accelerate_record, "accelerator")]
)
def test_wrong_use_of_a_record_says_what_to_type(lab, parts, owner):
    library, model, record = parts()
    with pytest.raises(ConfigError, match=f"Type with {type(record).__name__}"):
        record.step()
    with pytest.raises(ConfigError, match=rf"{owner}.backward\(loss\) was not since"), record:
        record.step()
    with pytest.raises(ConfigError, match="Make a new one for each training"), record:
        pass
    library, model, record = parts()
    with record:
        backward(library, model)
        with pytest.raises(ConfigError, match=r"called before optimizer.step\(\)"):
            record.step()


def test_what_the_library_has_not_prepared_is_refused(lab):
    fabric, _, optimizer = fabric_parts()
    with pytest.raises(ConfigError, match=r"takes what fabric\.setup returned"):
        FabricRecord(fabric, tiny_net(), optimizer)
    accelerator, model, *_ = accelerate_parts()
    with pytest.raises(ConfigError, match=r"takes what accelerator\.prepare returned"):
        PrecisionRecord(accelerator, model, torch.optim.SGD(model.parameters(), lr=1))


@pytest.mark.parametrize("strategy", ["FSDP", "DEEPSPEED", "FSDPStrategy", "ModelParallelStrategy"])
def test_a_training_of_shards_is_refused(strategy):
    with pytest.raises(ConfigError, match=r"record a training with Mine: .* Leave it out"):
        check_sharding("FabricRecord", ["Mine", strategy, "object"])
    check_sharding("FabricRecord", ["DDPStrategy", "ParallelStrategy", "object"])


def test_two_records_of_one_loop_are_refused(lab):
    accelerator, model, optimizer, _ = accelerate_parts()
    with (
        pytest.raises(ConfigError, match="Record one optimizer"),
        PrecisionRecord(accelerator, model, optimizer),
        PrecisionRecord(accelerator, model, optimizer),
    ):
        pass


def test_a_record_that_cannot_end_hides_no_error_of_the_loop(lab, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("the store is gone")

    _, _, record = accelerate_record()

    def failing_loop():
        with record:
            monkeypatch.setattr(record.recorder, "finish", fail)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_loop()
    assert "warning: the record was not ended: the store is gone" in capsys.readouterr().err
