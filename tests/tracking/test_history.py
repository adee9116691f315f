import os

import pytest

from runner.core.base.layout import HISTORY
from runner.core.record.journals import Journal
from runner.tracking import history


def journal(folder, *values):
    made = Journal(folder)
    made.append_metrics(
        (step, 1000 + step, {"train/loss": value}) for step, value in enumerate(values)
    )
    made.close()
    return made.path


def losses(folder):
    return history.from_folder(folder)["train/loss"][2].tolist()


def test_recorded_values_are_read_back_unchanged(tmp_path):
    values = [0.1, float("inf"), -1e308, 2**-1074]
    curves = history.from_journal(journal(tmp_path, *values))
    kept = history.read_history(history.write_history(tmp_path / HISTORY, curves))["train/loss"]
    assert kept.tolist() == [[0, 1, 2, 3], [1000, 1001, 1002, 1003], values]


def test_a_damaged_history_is_read_from_its_journal(tmp_path):
    path = history.write_history(tmp_path / HISTORY, history.from_journal(journal(tmp_path, 1.0)))
    whole = path.read_bytes()
    for damaged in (whole[:-30], b"", whole[:40] + b"\0" * 20 + whole[60:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"history\.npz is damaged"):
            history.read_history(path)
        assert losses(tmp_path) == [1.0]


def test_an_archive_that_unpacks_to_more_than_a_gibibyte_is_not_read(tmp_path):
    path = history.write_history(tmp_path / HISTORY, history.from_journal(journal(tmp_path, 1.0)))
    data = bytearray(path.read_bytes())
    # The size of the file unpacked, in the archive's table of contents.
    size = data.index(b"PK\x01\x02") + 24
    data[size : size + 4] = (2**30 + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="it unfolds to more than a run records"):
        history.read_history(bytes(data))


def test_a_folder_used_again_shows_its_last_run(tmp_path):
    for number in range(1, 12):
        path = journal(tmp_path, float(number))
    assert path.name == "journal-11.jsonl"
    assert losses(tmp_path) == [11.0]
    kept = history.write_history(tmp_path / HISTORY, history.from_journal(path))
    assert losses(tmp_path) == [11.0]
    journal(tmp_path, 12.0)
    os.utime(kept, (1, 1))
    assert losses(tmp_path) == [12.0]


def test_a_folder_without_a_record_has_an_empty_history(tmp_path):
    assert history.from_folder(tmp_path) == {}
    assert history.from_journal(journal(tmp_path)) == {}
