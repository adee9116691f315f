"""Results of a sweep's jobs, made up."""

from runner.core.run.run_result import RunResult

GPU = "NVIDIA H100"
CPU = "Some CPU (2 of 2 threads)"


def finished(precision, seed=0, quality: float | None = 0.9, settings="", **more):
    """Return the result of a job that trained; `settings` are those besides precision and seed."""
    group = f"{precision} {settings}".strip()
    values = {
        "overrides": [f"precision={precision}", f"seed={seed}", *settings.split()],
        "group": group,
        "settings": settings.split(),
        "seed": seed,
        "model": "mlp",
        "device": GPU,
        "device_type": "cpu" if more.get("device") == CPU else "cuda",
        "quality": "val/accuracy",
        "metrics": {} if quality is None else {"val/loss": 1.0, "val/accuracy": quality},
        "best": quality,
        "steps": 10,
        "examples_per_second": 100.0,
        "peak_memory_mib": 1000.0,
        "weights_mib": 40.0,
        "optimizer_mib": 80.0,
    }
    return RunResult(
        precision=precision, label=f"{group} seed={seed}", folder="/x", **(values | more)
    )


def lost(precision, status="failed", error="broke", seed=0):
    """Return the result of a job that never trained."""
    label = f"{precision} seed={seed}"
    return RunResult(
        precision=precision,
        label=label,
        folder="/x",
        status=status,
        error=error,
        overrides=(),
        group=precision,
        seed=seed,
    )
