"""The journal keeps every record as it was, also what a crash leaves behind."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runner.core.record.journals import END_RESERVE_BYTES, Journal, has_live_owner, read_records


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "run")
    yield journal
    journal.close()


def records(journal):
    return [record for record, _ in read_records(journal.path)]


def test_records_are_readable_at_once_and_floats_are_bit_equal(journal):
    values = {"a": 0.1 + 0.2, "b": 5e-324, "c": 1.7976931348623157e308, "d": -0.0}
    journal.append_metrics([(3, 1700, values)])
    assert records(journal) == [{"kind": "metrics", "step": 3, "time": 1700, "values": values}]


def test_non_finite_values_survive(journal):
    journal.append_metrics([(1, 1, {"inf": math.inf, "low": -math.inf, "nan": math.nan})])
    values = records(journal)[0]["values"]
    assert (values["inf"], values["low"]) == (math.inf, -math.inf)
    assert math.isnan(values["nan"])


def test_numbers_of_other_libraries_become_plain(journal):
    journal.append_metrics([(1, 1, {"a": np.float32(0.5), "b": np.float64(0.25), "c": 2})])
    assert records(journal)[0]["values"] == {"a": 0.5, "b": 0.25, "c": 2}


def test_the_records_of_a_block_are_written_in_their_order(journal):
    journal.append_metrics((step, step, {"a": step}) for step in range(500))
    assert [record["step"] for record in records(journal)] == list(range(500))


def test_reading_continues_from_an_offset(journal):
    journal.append_metrics([(1, 1, {"a": 1}), (2, 2, {"a": 2})])
    (_, middle), (_, end) = read_records(journal.path)
    assert [record["step"] for record, _ in read_records(journal.path, middle)] == [2]
    assert list(read_records(journal.path, end)) == []


def test_an_unfinished_line_is_not_read_and_a_damaged_one_is_marked(journal):
    journal.append("tags", values={"a": "1"})
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"metr\n12\n{"kind":"end"')
    assert [record["kind"] for record in records(journal)] == ["tags", "damaged", "damaged"]


def test_two_runs_in_one_folder_have_a_journal_each(journal, tmp_path):
    other = Journal(tmp_path / "run")
    assert (journal.path.name, other.path.name) == ("journal.jsonl", "journal-2.jsonl")
    other.close()


def test_a_journal_has_a_live_owner_until_it_is_closed(journal):
    assert has_live_owner(journal.path)
    journal.close()
    assert not has_live_owner(journal.path)


@pytest.fixture
def disk(monkeypatch):
    """Return a disk for os.write with as many bytes free as its `room`."""
    write = os.write

    class Disk:
        room = 0

    def short(file, data):
        if not Disk.room:
            raise OSError(28, "No space left on device")
        done = write(file, data[: Disk.room])
        Disk.room -= done
        return done

    monkeypatch.setattr("os.write", short)
    return Disk


def test_a_full_disk_is_reported_once_and_records_are_in_order_with_room_again(
    journal, disk, caplog
):
    disk.room = 150  # ends in the middle of a line
    for step in range(1, 9):
        journal.append_metrics([(step, step, {"train/loss": 1 / step})])
    assert [record["step"] for record in records(journal)] == [1, 2]
    disk.room = 10**6
    journal.append_metrics([(9, 9, {"train/loss": 1 / 9})])
    journal.append_end(status="FINISHED")
    assert [record["step"] for record in records(journal)[:-1]] == list(range(1, 10))
    assert records(journal)[-1] == {"kind": "end", "status": "FINISHED", "lost": 0}
    assert (journal.lost, journal.has_end) == (0, True)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"{journal.path} cannot be written: No space left on device.")
    assert second == f"{journal.path} can be written again."


def test_a_disk_that_stays_full_costs_the_records_but_not_the_end(journal, disk, monkeypatch):
    disk.room = 150
    for step in range(1, 9):
        journal.append_metrics([(step, step, {"train/loss": 1 / step})])
    unlink = Path.unlink

    def freed(path, **options):
        disk.room = END_RESERVE_BYTES
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", freed)
    journal.append_end(status="FINISHED")
    kinds = [record["kind"] for record in records(journal)]
    assert kinds == ["metrics", "metrics", "damaged", "end"]
    assert records(journal)[-1] == {"kind": "end", "status": "FINISHED", "lost": 6}


def test_memory_for_a_full_disk_has_a_bound(tmp_path, disk):
    journal = Journal(tmp_path, max_waiting_bytes=200)
    for step in range(1, 9):
        journal.append_metrics([(step, step, {"train/loss": 1.0})])
    disk.room = 10**6
    journal.append_end(status="FINISHED")
    assert [record.get("step") for record in records(journal)] == [1, 2, 3, None]
    assert (journal.lost, journal.has_end) == (5, True)
    journal.close()


def test_the_trainers_side_imports_neither_mlflow_nor_torch():
    code = "import sys, runner.tracking.mlflow, runner.core.record.tracker; "
    code += "print([name for name in ('mlflow', 'torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
