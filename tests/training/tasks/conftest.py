import pytest

from runner.core.base.errors import ConfigError
from runner.core.config.targets import check_targets
from runner.data.task_target import build_task, task_problems


@pytest.fixture
def refusal(compose):
    """What is said of a wrong task before anything else of the run is built."""

    def said(*overrides):
        spec = compose("task=classification", *overrides)
        problems = [*check_targets(spec), *task_problems(spec.task)]
        if not problems:
            with pytest.raises(ConfigError) as caught:
                build_task(spec.task)
            problems = caught.value.problems
        return "\n".join(problems)

    return said
