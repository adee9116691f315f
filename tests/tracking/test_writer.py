"""The writer retries, skips or closes when a store fails. Without a real store."""

import os
import time
from unittest.mock import create_autospec

import pytest

from runner.core.record.journals import Journal, encode_json
from runner.tracking import writer_process
from runner.tracking.upload_state import UploadState, journal_state
from runner.tracking.uri import RefusedError, UnreachableError
from runner.tracking.writer import uploader, writer_main
from runner.tracking.writer.store import MAX_POINTS, Store
from runner.tracking.writer.uploader import JournalUploader, next_batch
from runner.tracking.writer.writer_main import REST_FACTOR, rest_seconds

START = {"id": "1", "time": 1, "uri": "fake", "experiment": "e", "name": None, "params": {}}
START |= {"tags": {}, "sweep": None, "role": "run"}


def fake_store():
    """A store that takes every call of the real one; each first raises the next of `failures`.

    `taken` holds the name and arguments of the calls that raised nothing.
    """
    store = create_autospec(Store, instance=True)
    store.notices, store.failures, store.taken = [], [], []
    store.parents = {}

    def answer(name):
        def call(*args):
            if store.failures and (failure := store.failures.pop(0)):
                raise failure
            store.taken.append((name, *args))
            return None if name == "find_run" else name

        return call

    for name in vars(Store):
        if not name.startswith("_"):
            getattr(store, name).side_effect = answer(name)
    store.named = lambda name: [args for called, *args in store.taken if called == name]
    return store


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path)
    yield journal
    journal.close()


@pytest.fixture
def idle(journal, monkeypatch):
    """Return a writer on a fake store with one empty journal; `saved` is the state it saved."""
    one = writer_main.Writer(os.getpid())
    one.store = fake_store()
    one.open_store = create_autospec(Store, return_value=one.store)
    monkeypatch.setattr(uploader, "open_store", one.open_store)
    one_uploader = JournalUploader(journal.path)
    task = one.task = writer_main.JournalTask(one_uploader)
    one.tasks.append(task)
    monkeypatch.setattr(uploader, "PARTIAL_BATCH_SECONDS", 0.0)
    monkeypatch.setattr(writer_process, "upload_in_background", lambda folder: 0)

    def turn(seconds_later=0.0):
        if seconds_later:
            now = time.monotonic() + seconds_later
            monkeypatch.setattr(time, "monotonic", lambda: now)
        while task in one.tasks and one.advance(task):
            pass

    def saved():
        state = UploadState(journal.path)
        assert state.read()
        return state

    one.turn, one.saved = turn, saved
    yield one
    one_uploader.state.release_lock()


@pytest.fixture
def work(idle, journal):
    """Return the writer, with the start of a run in its journal."""
    journal.append("start", **START)
    return idle


def test_a_failing_store_is_tried_again_with_growing_pauses(work):
    work.store.failures = [UnreachableError("away")] * 6
    pauses = []
    for _ in range(6):
        before = time.monotonic()
        work.turn(seconds_later=10)
        pauses.append(round(work.task.retry_at - time.monotonic(), 1))
        assert before < time.monotonic()
    assert pauses == [0.5, 1, 2, 4, 5, 5]
    work.turn(seconds_later=10)
    assert work.task.uploader.state.run_id == "create_run"


def test_an_earlier_journal_of_a_store_that_is_not_the_users_is_not_sent(idle, journal):
    earlier = journal.path.with_name("journal-0.jsonl")
    earlier.write_text(encode_json({"kind": "start", **START, "uri": "http://other"}) + "\n")
    journal.append("start", **START, continues=earlier.name)
    idle.turn()
    assert "is not signed with this user's key" in idle.saved().refusal
    assert idle.store.taken == []


def test_no_attempt_is_made_during_a_pause(work):
    work.store.failures = [UnreachableError("away")]
    work.turn()
    work.turn(seconds_later=0.1)
    assert work.store.taken == []


def test_an_outage_is_saved_with_its_beginning_until_the_store_answers(work):
    away = "request failed (NewConnectionError('[Errno 111] Connection refused'))"
    work.store.failures = [UnreachableError(away)] * 9
    work.turn(seconds_later=10)
    since = work.saved().outage_since
    assert abs(since - time.time()) < 60
    for _ in range(8):
        work.turn(seconds_later=10)
    assert work.saved().outage == "[Errno 111] Connection refused"
    assert work.saved().outage_since == since
    work.turn(seconds_later=10)
    assert (work.saved().outage, work.saved().run_id) == (None, "create_run")


def test_a_refused_run_is_closed(work):
    work.store.failures = [RefusedError("no such permission\n[SQL: ...]")]
    work.turn()
    state = work.saved()
    assert (state.refusal, state.done) == ("no such permission", False)
    assert not work.tasks


def test_a_refused_batch_is_skipped_and_the_rest_is_uploaded(work, journal):
    work.turn()
    journal.append("tags", values={"bad": "1"})
    journal.append("tags", values={"good": "1"})
    journal.append("end", status="FINISHED", error=None, time=9)
    work.store.failures = [RefusedError("bad tag")]
    work.turn()
    state = work.saved()
    assert (state.first_error, state.refusal, state.done) == ("bad tag", None, True)
    assert work.store.named("log_tags") == [["create_run", {"good": "1"}]]
    assert work.store.named("end_run") == [["create_run", "FINISHED", 9]]


def test_points_are_never_given_up_for_a_doubtful_answer(work, journal):
    work.turn()
    journal.append_metrics([(1, 1, {"a": 1.0})])
    work.store.failures = [UnreachableError("pool used up", doubtful=True)] * 20
    for _ in range(21):
        work.turn(seconds_later=10)
    assert work.store.named("log_points") == [["create_run", [("a", 1.0, 1, 1)]]]
    assert work.saved().first_error is None


def test_a_doubtful_answer_counts_as_a_refusal_after_thirty_seconds(work, journal):
    work.turn()
    journal.append("tags", values={"a": "1"})
    work.store.failures = [UnreachableError("pool used up", doubtful=True)] * 5
    for _ in range(5):
        work.turn(seconds_later=10)
    assert work.saved().first_error == "pool used up"


@pytest.mark.parametrize(
    "failure", [RefusedError("401", of_store=True), UnreachableError("pool used up", doubtful=True)]
)
def test_no_record_is_given_up_while_the_store_refuses_every_call(work, journal, failure):
    work.turn()
    journal.append("tags", values={"a": "1"})
    journal.append_metrics([(1, 1, {"a": 1.0})])
    work.store.failures = [failure] * 20
    for _ in range(21):
        work.turn(seconds_later=10)
    assert work.store.named("log_tags") == [["create_run", {"a": "1"}]]
    assert work.store.named("log_points") == [["create_run", [("a", 1.0, 1, 1)]]]
    assert work.saved().first_error is None


def test_a_disk_that_is_full_for_the_state_is_waited_for(work, monkeypatch):
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(UploadState, "save", lambda *_, **__: (_ for _ in ()).throw(full))
        for _ in range(9):
            work.turn(seconds_later=10)
    assert work.store.named("create_run") == []
    work.turn(seconds_later=1000)
    assert work.saved().run_id == "create_run"


def test_a_run_gets_its_status_even_if_its_artifacts_fail(work, journal):
    journal.append("metrics", step=1, time=1, values={"train/loss": 1.0})
    journal.append("end", status="FINISHED", error=None, time=9)
    full = UnreachableError("OSError: [Errno 28] No space left on device", doubtful=True)
    work.store.log_artifact.side_effect = full
    for _ in range(5):
        work.turn(seconds_later=10)
    assert work.store.named("end_run")[0] == ["create_run", "FINISHED", 9]
    assert "No space left" in work.saved().first_error
    assert work.saved().done


def test_points_wait_for_the_first_refused_artifact_alone(work, journal):
    work.turn()
    folder = journal.path.parent
    for index in range(3):
        (folder / f"{index}.yaml").write_text("a")
        journal.append("artifact", path=str(folder / f"{index}.yaml"), folder="")
    journal.append_metrics([(1, 1, {"a": 1.0})])
    work.store.log_artifact.side_effect = UnreachableError("error code 500", doubtful=True)
    for _ in range(8):
        work.turn(seconds_later=10)
    assert work.store.named("log_points") == [["create_run", [("a", 1.0, 1, 1)]]]


def test_a_status_is_never_given_up_for_a_doubtful_answer(work, journal):
    work.turn()
    journal.append("end", status="FINISHED", error=None, time=9)
    work.store.failures = [UnreachableError("pool used up", doubtful=True)] * 8
    for _ in range(8):
        work.turn(seconds_later=10)
    assert not work.task.uploader.state.done
    work.turn(seconds_later=10)
    assert work.store.named("end_run") == [["create_run", "FINISHED", 9]]


def test_long_texts_fit_into_the_state_file(journal):
    state = UploadState(journal.path)
    assert state.acquire_lock()
    text = "\u00fc\u4e2d" * 3000
    state.save(refusal=text, failure=text, outage=text, first_error=text, uri="u" * 400)
    for _ in range(9):
        state.add_notice(text)
    state.release_lock()
    read = UploadState(journal.path)
    assert read.read()
    assert text.startswith(read.refusal.rstrip("…"))
    assert len(read.notices) == 3


def test_a_bug_or_a_lost_journal_ends_one_run_only(work, journal):
    work.turn()
    journal.path.unlink()
    work.turn()
    assert "FileNotFoundError" in work.saved().failure
    assert not work.tasks


def test_a_creation_whose_answer_was_lost_is_looked_up(work):
    work.store.failures = [None, UnreachableError("timeout")]  # experiment, create_run
    work.turn()
    assert work.store.named("find_run") == []
    work.turn(seconds_later=1)
    assert work.store.named("find_run") == [["experiment", {"mlflow.runner.journal": "1"}]]


def test_a_child_waits_for_its_parent_but_not_for_ever(idle, journal):
    journal.append("start", **{**START, "sweep": "night"})
    idle.turn()
    assert idle.store.named("create_run") == []
    for _ in range(2):
        idle.turn(seconds_later=10)
    assert idle.saved().first_error == "The sweep night has no parent run; this run stands alone."
    assert idle.saved().run_id == "create_run"


def test_a_batch_fills_one_call_and_never_splits_a_record(journal):
    journal.append_metrics((step, step, dict.fromkeys("abcdefg", 1.0)) for step in range(300))
    batch = next_batch(journal.path, 0)
    assert batch.is_complete
    assert len(batch.points) == MAX_POINTS // 7 * 7
    rest = next_batch(journal.path, next_batch(journal.path, batch.end).end)
    assert (rest.is_complete, len(rest.points)) == (False, 2100 - 2 * len(batch.points))


def test_another_kind_of_record_completes_a_batch(journal):
    journal.append_metrics([(1, 1, {"a": 1.0})])
    journal.append("tags", values={})
    assert next_batch(journal.path, 0).is_complete


def test_the_upload_state_survives_a_writer_and_admits_one_writer_at_a_time(journal):
    first, second = UploadState(journal.path), UploadState(journal.path)
    assert first.acquire_lock()
    assert not second.acquire_lock()
    first.save(run_id="r", offset=7)
    first.release_lock()
    assert second.acquire_lock()
    assert (second.run_id, second.offset, second.done) == ("r", 7, False)
    second.release_lock()


def test_a_run_that_another_writer_ended_is_not_ended_again(work, journal):
    journal.append("end", status="FINISHED", error=None, time=9)
    work.trainer_is_alive = False
    other = UploadState(journal.path)
    assert other.acquire_lock()
    work.turn()
    other.save(run_id="r", offset=journal.path.stat().st_size, done=True)
    other.release_lock()
    work.turn(seconds_later=1)
    assert work.store.taken == []
    assert not work.tasks


def test_a_journal_is_uploaded_to_the_store_that_sync_gave_it(work, journal):
    progress = UploadState(journal.path)
    assert progress.acquire_lock()
    progress.save(run_id="half sent elsewhere", offset=journal.path.stat().st_size)
    progress.change_store("other", "new name")
    progress.release_lock()
    work.turn()
    work.open_store.assert_called_once_with("other")
    assert work.store.named("experiment") == [["new name", None]]
    assert work.task.uploader.state.run_id == "create_run"


def test_a_journal_without_its_start_is_refused_and_not_tried_in_the_background(idle, journal):
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"sta\n')
    journal.append_metrics([(1, 1, {"a": 1.0})])
    idle.turn()
    assert "does not begin with the start of a run" in idle.saved().refusal
    assert not UploadState(journal.path).is_locked()
    journal.close()
    assert journal_state(journal.path) == "refused"


def test_a_damaged_upload_state_starts_over_and_looks_for_the_run(journal):
    journal.path.with_suffix(".state").write_bytes(b'{"run_id": "r", "off')
    progress = UploadState(journal.path)
    assert progress.acquire_lock()
    assert (progress.run_id, progress.offset, progress.tried) == (None, 0, True)
    progress.release_lock()


def test_the_writer_rests_the_less_the_more_waits_and_not_once_the_run_has_ended():
    assert rest_seconds(0.5, backlog=0.0, is_awaited=False) == 0.5 * REST_FACTOR
    assert rest_seconds(0.5, backlog=3.0, is_awaited=False) == 0.5 * REST_FACTOR / 16
    assert rest_seconds(0.5, backlog=0.0, is_awaited=True) == 0.0


def test_a_pause_ends_with_the_run(work, journal):
    work.store.failures = [UnreachableError("away")]
    work.turn()
    work.task.look_for_end()
    assert (work.task.is_awaited, work.task.retry_at > 0) == (False, True)
    journal.append("end", status="FINISHED", error=None, time=9)
    work.task.look_for_end()
    assert (work.task.is_awaited, work.task.retry_at) == (True, 0.0)
