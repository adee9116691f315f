"""Keep apart what changes switches of the whole process: precisions' sessions, and runs.

Kernels of the dispatcher, TF32 switches and the random generators belong to the process, not to a
thread, so that a session that is open elsewhere would change the numbers of another one.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runner.core.base.errors import PolicyError
from runner.core.base.random_streams import host_rng_state, set_host_rng_state

_lock = threading.RLock()
_turn = threading.RLock()
# The threads of the run in progress and of those within it.
_runs: list[int] = []


class Switches(NamedTuple):
    """What a session switches in its process.

    Attributes:
        float32_matmul: see Precision.float32_matmul.
        reduced_sums: see Precision.reduced_precision_reduction.
        replacements: keys of emulation.cpu_kernels.replace_kernels.
        concerning: keys of all replacements that would compute for the precision.
        kernels: name of the kernels that half precision takes on a CPU; empty without a choice.
    """

    float32_matmul: str
    reduced_sums: bool
    replacements: set[Hashable]
    concerning: set[Hashable]
    kernels: str


@dataclass(eq=False)
class Session:
    """A precision's session.

    Attributes:
        name: of the precision.
        switches: what it switches.
        context: sets the switches.
        thread: that opens it.
        is_open: False once it has ended; its switches stay until those of later ones are restored.
    """

    name: str
    switches: Switches
    context: AbstractContextManager[Any]
    thread: int = field(default_factory=threading.get_ident)
    is_open: bool = True

    def suits(self, other: "Session") -> bool:
        """Return whether neither changes what the other computes."""
        own, others = self.switches, other.switches
        changed = (others.replacements - own.replacements) & own.concerning
        changed |= (own.replacements - others.replacements) & others.concerning
        return own[:2] == others[:2] and not changed


_sessions: list[Session] = []


@contextmanager
def open_session(session: Session) -> Iterator[None]:
    """Return the context of a session, beside which another one may be open, in any thread, if both
    want the same switches.

    Raises:
        PolicyError: it would change what an open session has set, or a run works in another thread.
    """
    name = session.name
    with _lock:
        if _runs and _runs[0] != session.thread:
            raise PolicyError(
                f"The session of precision={name} would share random generators and switches with "
                "the run in another thread. Open it when that run has ended."
            )
        for other in _sessions:
            if not other.suits(session):
                where = "" if other.thread == session.thread else " in another thread"
                raise PolicyError(
                    f"The session of precision={name} would change process-wide switches or "
                    f"kernels that precision={other.name}, whose session is open{where}, has set. "
                    "Open them one after the other."
                )
        session.context.__enter__()
        _sessions.append(session)
    try:
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
