"""Record a run and upload the record to its store, MLflow, without slowing the training down.

A value, for example the loss of step 7, travels in four stages:

1. The trainer appends it to `journal.jsonl` in the run's folder, one JSON line per record. From
   then on it survives a kill of the trainer.
2. A writer process reads the journal. The trainer only names the journal to it, through a pipe; in
   a sweep the sweep's process does, which finds the journals in its jobs' folders.
3. The writer sends batches to the store. It is the only process of a run that imports mlflow.
4. When the store has answered, the writer saves the offset up to which the journal is stored in
   `journal.state`. A new writer continues there: a batch may be sent twice, which changes nothing.
   The state is also the only way back: the trainer, sweeps and `sync` read the run's id, the
   dashboard, errors and outages in it.

The writer outlives a killed trainer: it uploads the rest and gives the run its status. After a
kill of both, or a long outage, the next command uploads the rest, or `python -m runner sync`.

To follow the record of a sweep's job to MLflow, read in this order: core/record/tracker.py (what a
run may record), mlflow.py (a record becomes a line), core/record/journals.py (the file),
writer_process.py (the sweep finds it, starts and watches the writer), writer/writer_main.py (the
writer's loop), writer/uploader.py (one journal, batch by batch), writer/store.py (the calls to
MLflow), upload_state.py (the way back).
"""
