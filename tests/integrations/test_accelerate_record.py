"""Loops with a real Accelerator, recorded as runs of this runner."""

from pathlib import Path

import pytest
import torch
from foreign_models import examples, norm_of_gradients, tiny_net
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from runner.integrations.accelerate import PrecisionRecord
from runner.tracking import history
from runner.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _new_accelerate_state():
    """Accelerate keeps the first precision of a process."""
    _reset()
    yield
    _reset()


def _reset():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def parts(scaler=None, size=4, **changes):
    """Prepared model, optimizer and loader of an accelerator.

    Args:
        scaler: what Accelerate makes of mixed_precision="fp16" on a GPU, and not on a CPU.
    """
    accelerator = Accelerator(cpu=True, **changes)
    if scaler is not None:
        accelerator.native_amp = True
        accelerator.scaler = scaler
    net = tiny_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(examples(), batch_size=size)
    return (accelerator, *accelerator.prepare(net, optimizer, loader))


def loop(accelerator, model, optimizer, loader, batches=4, clip=None, after_step=None, **options):
    """Train; return the norms by hand, scaled and whole, of each step."""
    norms = []
    with PrecisionRecord(accelerator, model, optimizer, **options) as record:
        for batch, _ in zip(loader, range(batches), strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    norms.append(norm_of_gradients(model))
                    if clip:
                        accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                record.step()
                if after_step:
                    after_step()
    return norms


def test_every_step_is_in_the_store(lab):
    norms = loop(*parts(), clip=0.01)
    result = lab.result()
    assert (result.precision, result.model, result.status) == ("32-true", "TinyNet", "finished")
    assert list(lab.points(result, "train/grad_norm").values()) == pytest.approx(norms)
    assert list(lab.points(result, "train/loss")) == [1, 2, 3, 4]
    assert lab.points(result, "perf/examples_per_second") == {}
    assert result.examples_per_second is None


def test_skipped_steps_and_the_loss_scale_are_recorded(lab):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    norms = loop(*parts(scaler, mixed_precision="fp16"), batches=12, clip=0.01)
    result = lab.result()
    assert (result.precision, result.steps) == ("16-mixed", 12)
    scales = lab.points(result, "loss_scale/value")
    overflows = lab.points(result, "loss_scale/overflow")
    skipped = [step for step, is_skipped in overflows.items() if is_skipped]
    assert skipped
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step < 12)
    recorded = lab.points(result, "train/grad_norm")
    good = [step for step in scales if step not in skipped]
    by_hand = {step: norms[step - 1] / scales[step] for step in good}
    assert {step: recorded[step] for step in good} == pytest.approx(by_hand, rel=1e-4)
    assert result.skipped_steps == len(skipped)


def test_micro_batches_make_one_step(lab):
    loop(*parts(size=2, gradient_accumulation_steps=4), batches=12, folder="four")
    _reset()
    loop(*parts(size=8), batches=3, folder="one")
    four, one = (lab.result(lab.folder / name) for name in ("four", "one"))
    for name in ("train/loss", "train/grad_norm"):
        assert lab.points(four, name) == pytest.approx(lab.points(one, name), rel=1e-4)
    assert list(lab.points(four, "train/loss")) == [1, 2, 3]


def test_what_accelerate_replaced_is_named(lab, capsys):
    loop(*parts(mixed_precision="fp16"), batches=1)
    assert lab.result().precision == "32-true"
    assert "Accelerator(mixed_precision='fp16') asks for 16-mixed" in capsys.readouterr().out


def test_an_error_in_the_loop_ends_the_run(lab):
    with pytest.raises(ZeroDivisionError):
        loop(*parts(), after_step=lambda: 1 / 0)
    (stored,) = lab.stored()
    assert stored.status == "FAILED"
    assert lab.tags(lab.result())["error"] == "ZeroDivisionError: division by zero"


def test_a_loop_that_begins_at_a_later_step(lab):
    loop(*parts(), batches=2, start_step=10)
    assert list(lab.points(lab.result(), "train/loss")) == [11, 12]


def test_a_folder_that_is_being_recorded_in_is_refused(lab):
    accelerator, model, optimizer, _ = parts()

    def record(**options):
        return PrecisionRecord(accelerator, model, optimizer, folder="mine", **options)

    with record() as first:
        accelerator.backward(model(torch.ones(1, 4), torch.ones(1).long())["loss"])
        optimizer.step()
        first.step()
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ConfigError, match="another run is being recorded there"):
            record(start_step=1).__enter__()


def test_wrong_use_says_what_to_type(lab):
    accelerator, model, optimizer, _ = parts()
    with pytest.raises(ConfigError, match=r"takes what accelerator\.prepare returned"):
        PrecisionRecord(accelerator, model, torch.optim.SGD(model.parameters(), lr=1))
    with (
        pytest.raises(ConfigError, match=r"accelerator.backward\(loss\) was not since"),
        PrecisionRecord(accelerator, model, optimizer) as record,
    ):
        record.step()
    with PrecisionRecord(accelerator, model, optimizer) as record:
        accelerator.backward(model(torch.ones(1, 4), torch.ones(1).long())["loss"])
        with pytest.raises(ConfigError, match=r"called before optimizer.step\(\)"):
            record.step()
    with (
        pytest.raises(ConfigError, match="Record one optimizer"),
        PrecisionRecord(accelerator, model, optimizer),
        PrecisionRecord(accelerator, model, optimizer),
    ):
        pass


def test_the_time_of_no_step_is_negative(lab):
    """The run is opened after the first step, which has ended by then."""
    loop(*parts(), log_every=1)
    times = history.from_folder(Path(lab.result().folder))["perf/step_ms"][2]
    assert (times > 0).all()


def test_a_record_that_cannot_end_hides_no_error_of_the_loop(lab, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("the store is gone")

    accelerator, model, optimizer, _ = parts()
    record = PrecisionRecord(accelerator, model, optimizer, folder="run")

    def failing_loop():
        with record:
            monkeypatch.setattr(record.recorder, "finish", fail)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_loop()
    assert "warning: the record was not ended: the store is gone" in capsys.readouterr().err
