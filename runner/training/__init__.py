"""Train: state, step, loop, records, optimizers, model set-up; tasks and callbacks."""
