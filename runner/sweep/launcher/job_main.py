"""A job's process, from the fork to its end."""

import atexit
import ctypes
import faulthandler
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

from runner.sweep.launcher.job_request import STATUS_STRUCT, JobRequest, ProcessEnvironment
from runner.tracking import writer_process
from runner.tracking.writer_proxy import WriterProxy
from runner.utils.stop_signals import CommandSignals, Interrupted

_PR_SET_PDEATHSIG = 1


def run_job_process(order: int, tracking: int, life: int, out: int, err: int) -> NoReturn:
    """Does what the order says. What it came to goes back through `order`: a JobReturn, or the exit
    status with which the job was stopped; nothing where it failed beyond what the job can tell."""
    status = 1
    try:
        with CommandSignals(lambda: True):
            _settle(life, out, err)
            writer_process.use_writer(WriterProxy(socket.socket(fileno=tracking)))
            status = _work(Connection(order))
            atexit._run_exitfuncs()
    except Interrupted as error:
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _settle(life: int, out: int, err: int) -> None:
    """A process group of its own, an end together with its parent, the job's own output."""
    parent = os.getppid()
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    # Anew, for the nursery's may have been no terminal; by lines, so that a death costs none.
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(open(1, "wb"), line_buffering=True)  # noqa: SIM115
    faulthandler.enable(all_threads=False)
    atexit._clear()  # what the nursery does at its own end
    os.write(life, STATUS_STRUCT.pack(os.getpid()))
    os.close(life)


def _work(line: Connection) -> int:
    surroundings: ProcessEnvironment = line.recv()
    surroundings.enter()
    try:
        order: JobRequest = pickle.loads(line.recv_bytes())
        line.send(order.run())
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
        line.send(status)
        return status
    return 0
