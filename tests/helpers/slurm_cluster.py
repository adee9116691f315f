"""Slurm of this one machine, without accounting, whose daemons and files are the test's own."""

import os
import pwd
import shutil
import socket
import subprocess
from contextlib import contextmanager

from serving import free_port
from waiting import wait_for

PATH = f"{os.environ['PATH']}:/usr/sbin"
"""Where the daemons are, also for a user whose path has no programs of the administrator's."""
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=ALL Default=YES
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthInfo=socket={home}/munge.socket
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=5
"""


def missing_program():
    """Return the first of Slurm's programs that is not here; None if all are."""
    names = ("sbatch", "slurmctld", "slurmd", "munged")
    return next((name for name in names if not shutil.which(name, path=PATH)), None)


@contextmanager
def slurm_cluster(home):
    """Start Slurm in a folder; yield a function that calls a command of it, and returns its output.

    SLURM_CONF must name the folder's slurm.conf in the processes that use it.
    """
    for name in ("state", "spool"):
        (home / name).mkdir(parents=True)
    (home / "munge.key").touch(mode=0o600)
    (home / "munge.key").write_bytes(os.urandom(128))
    config = CONFIG.format(
        home=home,
        host=socket.gethostname().partition(".")[0],
        user=pwd.getpwuid(os.getuid()).pw_name,
        controller_port=free_port(),
        node_port=free_port(),
    )
    (home / "slurm.conf").write_text(config)
    env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(home / "slurm.conf")}
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
    munge = [f"--{key}={home}/munge.{name}" for key, name in {**files, "seed-file": "seed"}.items()]
    commands = (["munged", "-F", "--force", *munge], ["slurmctld", "-D"], ["slurmd", "-D"])

    def call(*words):
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        return done.stdout

    daemons = []
    try:
        for command in commands:
            with (home / f"{command[0]}.log").open("w") as log:
                daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_for((home / "munge.socket").exists, daemons[-1])
        wait_for(lambda: "idle" in call("sinfo"), daemons[-1])
        yield call
        call("scancel", "--me")
        wait_for(lambda: call("squeue") and not call("squeue", "--noheader"))
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
