"""How long a trainer waits for its journal's upload, and what it tells its user meanwhile."""

import time

import pytest

from runner.core.base.errors import TrackingError
from runner.core.record.journals import Journal
from runner.core.record.tracker import RunInfo
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.upload_state import JournalStatus, UploadState
from runner.tracking.writer_process import WriterProcess, shared_writer, use_writer


class Clock:
    """The time of this process, which a sleep moves on."""

    def __init__(self):
        self.now = time.monotonic()

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path)
    journal.append("start", uri="http://host")
    yield journal
    journal.close()


@pytest.fixture
def upload(journal):
    """The state of the journal's upload, as its writer saves it."""
    state = UploadState(journal.path)
    assert state.acquire_lock()
    yield state
    # A wait that succeeds lets later tests of this process wait as long as they ask for.
    state.save(done=True)
    wait(journal)
    state.release_lock()


def wait(journal, patience=60.0, stopped=lambda: False):
    status = JournalStatus(journal.path)
    return status.wait(patience, stopped, "http://host", lambda: None)


@pytest.mark.parametrize(
    ("patience", "is_stopped", "sends_file", "seconds"),
    [
        (60, False, False, 60),
        (2, False, True, 60),  # a file reports no progress: thirty times as long
        (60, True, False, 4),
        (2, True, False, 2),
        (0, False, False, 0),
    ],
)
def test_a_wait_in_vain_ends(journal, upload, clock, patience, is_stopped, sends_file, seconds):
    upload.save(sending_file=sends_file)
    begin = clock.now
    assert not wait(journal, patience, lambda: is_stopped)
    assert clock.now - begin == pytest.approx(seconds, abs=0.1)


def test_after_a_wait_in_vain_the_next_take_five_seconds_until_an_answer(journal, upload, clock):
    seconds = []
    for is_done in (False, False, False, True, False):
        upload.save(done=is_done)
        begin = clock.now
        assert wait(journal) == is_done
        seconds.append(clock.now - begin)
    assert seconds == pytest.approx([60, 5, 5, 0, 60], abs=0.1)


@pytest.mark.parametrize(("patience", "messages"), [(4.9, 0), (30, 1)])
def test_a_wait_above_five_seconds_is_told_once(journal, upload, clock, caplog, patience, messages):
    wait(journal, patience)
    assert [record.getMessage() for record in caplog.records] == [
        "Uploading the last records to http://host ..."
    ] * messages


@pytest.mark.parametrize(
    ("offset", "outage", "message"),
    [
        (0, None, "Uploading the last records to mlruns ..."),
        (25, None, "Uploading the last records to mlruns (25 % done) ..."),
        (
            0,
            "refused",
            "Uploading the last records to mlruns: no answer yet (refused). Gives up "
            "after 60 s without one; `python -m runner sync` then uploads the rest.",
        ),
    ],
)
def test_the_message_while_the_last_records_are_uploaded(tmp_path, offset, outage, message):
    journal = tmp_path / "journal.jsonl"
    journal.write_text("x" * 100)
    status = JournalStatus(journal)
    status.state.offset = offset
    status.state.outage = outage
    assert status.waiting_message("mlruns", 60.0) == message


def test_attempts_to_send_a_file_are_no_progress(journal, upload):
    status = JournalStatus(journal.path)
    before = status.progress_at
    for attempt in ("away", "still away"):
        upload.save(sending_file=True)
        status.refresh()
        assert (status.state.sending_file, status.progress_at) == (True, before)
        upload.save_outage(attempt)
        status.refresh()
        assert (status.state.sending_file, status.progress_at) == (False, before)
        assert status.state.outage == attempt
    upload.save(offset=7)
    upload.clear_outage()
    status.refresh()
    assert status.progress_at > before
    assert (status.state.outage, status.state.offset) == (None, 7)


def test_the_user_is_warned_of_a_long_outage_once_and_of_its_end(journal, upload, caplog):
    status = JournalStatus(journal.path)
    for seconds_ago in (1, 29, 31, 35):
        upload.save(outage="refused", outage_since=time.time() - seconds_ago)
        status.refresh()
        status.warn()
    upload.clear_outage()
    for _ in range(2):
        status.refresh()
        status.warn()
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("No answer from the tracking store for 31 s: refused.")
    assert second.startswith("The tracking store answers again")


class AbsentWriter(WriterProcess):
    """A writer that uploads nothing."""

    def add_journal(self, journal):
        pass


@pytest.fixture
def refused(tmp_path):
    """A tracker whose run its store has refused."""
    before = shared_writer()
    use_writer(AbsentWriter())
    tracker = MlflowTracker(uri="http://host")
    tracker.open(RunInfo(tmp_path))
    state = UploadState(tmp_path / "journal.jsonl")
    assert state.acquire_lock()
    state.save(refusal="no permission")
    yield tracker
    state.release_lock()
    tracker.close("FINISHED")
    use_writer(before)


def test_a_refusal_in_the_first_two_minutes_stops_a_run(clock, refused):
    clock.now += 119
    with pytest.raises(TrackingError, match="does not take the run: no permission"):
        refused.check()


def test_a_refusal_after_two_minutes_is_a_warning_and_an_error_at_the_end(clock, refused, caplog):
    clock.now += 121
    refused.check()
    clock.now += 10
    refused.check()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "does not take the run: no permission" in warning
    assert warning.endswith("Training continues.")
    refused.close("FINISHED")
    with pytest.raises(TrackingError, match="no permission"):
        refused.check()
