"""Run one job: one module per mode, and the context, resume, result and artifacts they share."""
