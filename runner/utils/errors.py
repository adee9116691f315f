"""What the command line shows without a traceback. Each message says what was given, what is
allowed here, and what to type."""


class RunnerError(Exception):
    """A problem that the user can mend. Exit status 2 unless a subclass says otherwise.

    Attributes:
        finished: it came after a run's work was done; the run's result stands.
    """

    exit_status = 2
    finished = False


class ConfigError(RunnerError):
    """The composed config cannot run. Holds every problem found, one per line."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class Unavailable(RunnerError):
    """This machine lacks what the precision or accelerator needs.

    Args:
        what: what was asked for and why it cannot run here.
        remedy: what to install, or the nearest override that runs here.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"{what} {remedy}")


class CheckpointError(RunnerError):
    """A checkpoint, or the result, cannot be written. Exit status 1."""

    exit_status = 1


class TrackingError(RunnerError):
    """The tracking store refused the run or cannot be reached."""

    exit_status = 1


class DataError(RunnerError):
    """The data cannot be trained on: a sample, a label or the process that loads them."""

    exit_status = 1


class ModelError(RunnerError):
    """The model or the loss fails after the run has trained. Exit status 1."""

    exit_status = 1


class Diverged(RunnerError):
    """A guard stopped the run for its numbers. The run has left its result."""

    exit_status = 1
    finished = True
