"""Generate damped oscillations to predict: a regression whose loss floor is the arithmetic's.

It shows what double precision is for: float32 stops at a loss far above what float64 reaches.
"""

import math

import torch

from runner.data.splits import Splits, first_for_validation, held_out, require_at_least


def signals(
    window: int = 8,
    horizon: int = 4,
    poles: int = 3,
    count: int = 384,
    val_fraction: float = 0.25,
    seed: int = 0,
) -> Splits:
    """Generate signals whose next `horizon` samples are to be predicted from `window` samples.

    A signal is the real part of a sum of `poles` damped complex exponentials with fixed
    frequencies and dampings and random complex amplitudes. Without noise, 2 x `poles` samples
    determine the rest by a linear recurrence (Prony's method), which ComplexMLP can represent
    exactly: the only floor of the loss is the arithmetic. 800 iterations of full-batch L-BFGS
    with strong Wolfe line search stop between 1e-14 and 1e-12 in complex64 and go below 1e-16
    in complex128, in a second or two on a CPU. No files are read.

    Args:
        window: samples of the input, at least 2 x `poles`.
        horizon: samples to predict, at least 1.
        poles: exponentials in a signal, at least 1.
        count: training and validation signals together.
        val_fraction: share for validation, between 0 and 1.
        seed: of the data alone; the run's seed does not change them. The global random state is not
            touched.

    Returns:
        Inputs [N, window] and targets [N, horizon], both float64 and of unit order.

    Raises:
        ConfigError: a size is too small, or a split would be empty.
    """
    require_at_least("signals", poles=(poles, 1), horizon=(horizon, 1), count=(count, 2))
    require_at_least("signals", window=(window, 2 * poles))
    val = held_out(count, val_fraction, "signals")
    frequency = torch.linspace(0.3, 2.2, poles, dtype=torch.float64)  # radians per sample
    damping = torch.linspace(0.02, 0.08, poles, dtype=torch.float64)  # nepers per sample
    time = torch.arange(window + horizon, dtype=torch.float64)
    modes = torch.exp(torch.complex(-damping, frequency)[:, None] * time)
    generator = torch.Generator().manual_seed(seed)
    amplitude = torch.randn(count, poles, generator=generator, dtype=torch.complex128)
    samples = (amplitude @ modes).real * math.sqrt(2 / poles)
    inputs = samples[:, :window].contiguous()
    targets = samples[:, window:].contiguous()
    return first_for_validation(inputs, targets, val)
