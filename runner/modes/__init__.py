"""Run one job: one module per mode, and the context, resume, checks and outputs they share."""
