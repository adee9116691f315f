"""Keep apart what changes switches of the whole process: precisions' sessions, and runs.

Kernels of the dispatcher, TF32 switches and the random generators belong to the process, not to a
thread, so that a session that is open elsewhere would change the numbers of another one.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from runner.precision.emulation.cpu_kernels import open_replacements
from runner.utils.errors import PolicyError
from runner.utils.reproducibility import host_rng_state, set_host_rng_state

_lock = threading.RLock()
_turn = threading.RLock()
# Of the run in progress and of those within it: their threads.
_runs: list[int] = []


@dataclass(eq=False)
class _Session:
    """An open session: its name, the dtypes it computes in, and the kernels that it replaced."""

    name: str
    dtypes: frozenset[torch.dtype]
    context: AbstractContextManager[Any]
    thread: int = field(default_factory=threading.get_ident)
    kernels: frozenset[Hashable] = frozenset()
    is_open: bool = True

    def suits(self, other: "_Session") -> bool:
        """Return whether neither's kernels would compute for the other."""
        foreign = self.kernels - other.kernels
        own = other.kernels - self.kernels
        return not any([*map(other.is_concerned, foreign), *map(self.is_concerned, own)])

    def is_concerned(self, kernels: Hashable) -> bool:
        """Return whether kernels of another session would compute for this one."""
        if isinstance(kernels, torch.dtype):
            return kernels in self.dtypes
        # Without autocast a precision stores and computes in one dtype.
        return len(self.dtypes) > 1 or kernels != "cuda_casts"


_sessions: list[_Session] = []


def _process_switches() -> tuple[object, ...]:
    """Return the process-wide switches of products that sessions set."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul
    return (
        matmul.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


@contextmanager
def open_session(
    name: str, dtypes: frozenset[torch.dtype], context: AbstractContextManager[Any]
) -> Iterator[None]:
    """Return the context of a precision's session, beside which another one may be open, in any
    thread, if both want the same switches.

    Args:
        name: of the precision.
        dtypes: that it stores and computes in.
        context: sets its switches.

    Raises:
        PolicyError: it changes what an open session has set, or a run works in another thread.
    """
    session = _Session(name, dtypes, context)
    with _lock:
        if _runs and _runs[0] != session.thread:
            raise PolicyError(
                f"The session of precision={name} would share random generators and switches with "
                "the run in another thread. Open it when that run has ended."
            )
        switches, depths = _process_switches(), open_replacements()
        context.__enter__()
        now = open_replacements()
        session.kernels = frozenset(key for key in now if now[key] > depths.get(key, 0))
        has_changed = bool(_sessions) and _process_switches() != switches
        other = next((s for s in _sessions if has_changed or not s.suits(session)), None)
        _sessions.append(session)
    try:
        if other is not None:
            where = "" if other.thread == session.thread else " in another thread"
            raise PolicyError(
                f"The session of precision={name} would change process-wide switches or kernels "
                f"that precision={other.name}, whose session is open{where}, needs. Open them one "
                "after the other."
            )
        yield
    finally:
        with _lock:
            session.is_open = False
            # What a session restores is what it found, so the last one opened is the first closed.
            while _sessions and not _sessions[-1].is_open:
                _sessions.pop().context.__exit__(None, None, None)


@contextmanager
def one_run(say: Callable[[str], object]) -> Iterator[None]:
    """Return the context of a run, which waits for a run in another thread; a run within a run
    does not. The host's random generators are restored after.

    Args:
        say: prints that it waits.

    Raises:
        PolicyError: a session is open in another thread.
    """
    if not _turn.acquire(blocking=False):
        say("Waits for the run in another thread: runs share random generators and switches.")
        _turn.acquire()
    try:
        thread = threading.get_ident()
        with _lock:
            other = next((s.name for s in _sessions if s.thread != thread), None)
            if other is not None:
                raise PolicyError(
                    f"A session of precision={other} is open in another thread, with which a run "
                    "would share random generators and switches. Start the run when it is closed."
                )
            _runs.append(thread)
        # Composing a command draws random numbers, before the run saves its process's state.
        drawn = host_rng_state()
        try:
            yield
        finally:
            _runs.pop()
            set_host_rng_state(drawn)
    finally:
        _turn.release()
