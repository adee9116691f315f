"""The conclusion of a sweep whose jobs are too short for a speed."""

from runner.modes.result import RunResult
from runner.sweep.report.compare import compare_with_baselines
from runner.sweep.report.conclusion import conclusion_text


def test_jobs_too_short_for_a_speed_are_compared_by_quality():
    jobs = [
        RunResult(
            p,
            f"{p} seed={s}",
            "",
            group=p,
            seed=s,
            device="x (2 of 2 threads)",
            quality="val/accuracy",
            metrics={"val/accuracy": 0.9 + s / 100},
        )
        for p in ("32-true", "bf16-mixed")
        for s in (0, 1)
    ]
    for some in (jobs, jobs[::2]):
        text = conclusion_text(compare_with_baselines(some))
        assert text.startswith("Too short for a comparison of speed; train for more steps. ")
        assert "val/accuracy against 32-true: bf16-mixed 0.9" in text
        assert "nothing compares" not in text
