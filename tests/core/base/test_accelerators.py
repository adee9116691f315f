import pytest
import torch

from runner.core.base import accelerators as accelerator
from runner.core.base.accelerators import (
    Accelerator,
    available_kinds,
    choose_accelerator,
    cpu_name,
    resident_peak_mib,
)
from runner.core.base.errors import ConfigError, Unavailable
from runner.core.base.tensor_facts import MIB


def test_every_machine_has_a_cpu_last():
    assert available_kinds()[-1] == "cpu"


def test_auto_takes_the_best(monkeypatch):
    assert choose_accelerator().device.type == available_kinds()[0]
    monkeypatch.setattr(accelerator, "available_kinds", lambda: ["mps", "cpu"])
    assert choose_accelerator().device.type == "mps"
    assert choose_accelerator("cpu").device.type == "cpu"


def test_an_unknown_kind_is_wrong():
    with pytest.raises(ConfigError, match=r"accelerator.name=warp is not known. Allowed: "):
        choose_accelerator("warp")


def test_a_kind_that_is_not_here_is_unavailable(monkeypatch):
    monkeypatch.setattr(accelerator, "available_kinds", lambda: ["cpu"])
    with pytest.raises(Unavailable, match=r"accelerator=mps is not on this machine") as caught:
        choose_accelerator("mps")
    assert caught.value.remedy == "Type accelerator=cpu."


@pytest.mark.parametrize("index", [1, -1])
def test_an_index_beyond_the_devices_is_refused(index):
    with pytest.raises(Unavailable, match=rf"accelerator.index={index}: this machine has 1 cpu"):
        choose_accelerator("cpu", index)


def test_the_cpu_has_a_name_with_its_threads():
    name = Accelerator(torch.device("cpu")).name
    assert name == cpu_name()
    assert f"{torch.get_num_threads()} of" in name
    assert name.split(" (")[0]
    assert "model name" not in name


def test_a_run_reports_its_own_peak_only():
    cpu = Accelerator(torch.device("cpu"))
    cpu.synchronize()
    cpu.reset_peak_memory()
    before = cpu.peak_memory_mib()
    assert before == pytest.approx(resident_peak_mib(), abs=5)
    block = torch.ones(200 * MIB // 4)
    del block
    with_block = cpu.peak_memory_mib()
    assert with_block > before + 150
    cpu.reset_peak_memory()
    assert cpu.peak_memory_mib() < with_block - 100
