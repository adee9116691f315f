"""Samples of the machine under MLflow's names, and nothing that can fail the writer."""

import os
import subprocess
import sys
import time

import pytest

from runner.core.base.errors import ConfigError
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.writer import system_metrics
from runner.tracking.writer.system_metrics import SystemMetrics

pytest.importorskip("psutil")

STANDARD = {
    *(
        "system/cpu_utilization_percentage system/system_memory_usage_megabytes "
        "system/system_memory_usage_percentage system/disk_usage_percentage "
        "system/disk_usage_megabytes system/disk_available_megabytes "
        "system/network_receive_megabytes system/network_transmit_megabytes"
    ).split()
}
OWN = {"system/process_cpu_percentage", "system/process_memory_megabytes"}


def test_a_sample_has_the_names_that_mlflow_shows():
    metrics = SystemMetrics(10, os.getpid(), 0.0)
    values = metrics.sample()
    assert set(values) >= STANDARD | OWN
    assert {name for name in values if "gpu" not in name} == STANDARD | OWN
    assert all(isinstance(value, float) for value in values.values())
    assert 0 < values["system/system_memory_usage_percentage"] <= 100
    assert values["system/process_memory_megabytes"] > 10
    metrics.sample()
    assert metrics.count == 2


def test_a_sample_is_due_once_per_interval_and_missed_ones_are_not_made_up():
    metrics = SystemMetrics(10, os.getpid(), 100.0)
    asked = (100.0, 109.9, 110.0, 110.1, 119.0, 120.5, 175.0, 176.0, 185.0)
    assert [now for now in asked if metrics.is_due(now)] == [110.0, 120.5, 175.0, 185.0]


@pytest.mark.parametrize("seconds", [0, -1.5, float("nan")])
def test_an_interval_of_zero_or_less_is_refused(seconds):
    with pytest.raises(ConfigError, match=rf"tracking.system_metrics={seconds}: .* or null"):
        MlflowTracker(system_metrics=seconds)
    assert MlflowTracker(system_metrics=None).system_metrics is None


def test_each_sample_is_of_its_own_moment(monkeypatch):
    """Else averages over all samples so far would be told."""
    from mlflow.system_metrics.metrics import cpu_monitor

    metrics = SystemMetrics(10, os.getpid(), 0.0)
    shares = iter([20.0, 60.0])
    monkeypatch.setattr(cpu_monitor.psutil, "cpu_percent", lambda: next(shares))
    name = "system/cpu_utilization_percentage"
    assert [metrics.sample()[name] for _ in range(2)] == [20.0, 60.0]


def test_a_busy_process_is_seen():
    metrics = SystemMetrics(10, os.getpid(), 0.0)
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert metrics.sample()["system/process_cpu_percentage"] > 0


def test_a_process_that_has_ended_is_not_sampled():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    metrics = SystemMetrics(10, child.pid, 0.0)
    assert set(metrics.sample()) >= OWN
    child.communicate(b"\n", timeout=20)
    values = metrics.sample()
    assert not OWN & set(values)
    assert set(values) >= STANDARD


def test_a_monitor_that_breaks_or_is_missing_is_left_out(monkeypatch):
    real = system_metrics.import_module

    def without_disk(name):
        if name.endswith("disk_monitor"):
            raise ImportError("No module named 'psutil'")
        return real(name)

    monkeypatch.setattr(system_metrics, "import_module", without_disk)
    values = SystemMetrics(10, os.getpid(), 0.0).sample()
    assert "system/cpu_utilization_percentage" in values
    assert "system/disk_usage_percentage" not in values


def test_without_any_monitor_no_sample_is_due(monkeypatch):
    def nothing(name):
        raise ImportError(name)

    monkeypatch.setattr(system_metrics, "import_module", nothing)
    metrics = SystemMetrics(10, os.getpid(), 0.0)
    assert not metrics.is_due(1e9)
    assert metrics.sample() == {}


def test_the_names_are_those_of_the_installed_mlflow():
    """Its own monitor is the reference."""
    from mlflow.system_metrics.metrics import cpu_monitor, disk_monitor, network_monitor

    found = set()
    kinds = (cpu_monitor.CPUMonitor, disk_monitor.DiskMonitor, network_monitor.NetworkMonitor)
    for kind in kinds:
        monitor = kind()
        monitor.collect_metrics()
        found |= {f"system/{name}" for name in monitor.aggregate_metrics()}
    assert found == STANDARD
