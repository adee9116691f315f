"""hydra/launcher=isolated: each job of a sweep in a process of its own."""
