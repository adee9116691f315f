"""Run the jobs of a sweep as processes: on this machine, or through a plugin of Hydra's.

Why a process for each job: a job that crashes or is killed fails alone, `n_jobs` of them run at
once, a stop signal to the sweep reaches all of them, and no job inherits memory, a device or random
state from the one before. A fork of a process that has imported torch already saves the 5.5 CPU
seconds that imports cost a new Python process (bench/results/launcher_cost.md).

How a job starts: Hydra calls IsolatedLauncher, whose JobRunner asks the fork server for a child
process and sends it a JobRequest: the words of a `python -m runner` command in the sweep's folder,
which a user can type, too. The child composes the config for itself. What comes back: the exit
status through one pipe, output through two more, and `result.json` in the job's folder, which says
what came of the job. The job's record is the journal in its folder, which the sweep's process names
to its writer process: MLflow is imported once for all jobs.

Reading order: `isolated` (the launcher, and the JobRunner: so many jobs at once), `job_process`
(one job, seen from the sweep), `fork_server` (the process that forks), `job_request` (what is sent,
and the job's own process), then `runner/tracking/writer_process.py` (the sweep finds the job's
journal) and `writer/uploader.py` (journal to MLflow). Not on that path: `remote` (Slurm, Ray,
joblib, whose processes run one job each through a JobRunner).
"""
