"""Models of which it is known what each precision does to them; conf/ has their data and training,
tests/sweeps/advisor/test_planted.py shows that it is so."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Shares(nn.Module):
    """A linear map whose squared outputs are divided by their mean.

    Outputs are `gain` times normal ones, their squares about gain**2: 1e6 for a gain of 1000, where
    float16 ends at 65504. inf / inf is NaN. The gain cancels, so that where the square is finite
    the shares are of unit order, and exact to the dtype's rounding.
    """

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.gain = gain

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, width] to [B, width]."""
        amplitude = self.gain * F.linear(hidden, self.weight)
        energy = amplitude * amplitude
        return energy / energy.mean(-1, keepdim=True)


class BrokenByRange(nn.Module):
    """float16 breaks it, in `wide` alone, at the first forward; bfloat16, of float32's range, does
    not harm it."""

    def __init__(self, features: int, width: int = 32, gain: float = 1000.0) -> None:
        super().__init__()
        self.stem, self.wide = nn.Linear(features, width), Shares(width, gain)
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [B, features] to [B, 1]."""
        hidden = self.stem(inputs).relu()
        return self.head(self.body(hidden + self.wide(hidden + 0.1)).relu())


class Clock(nn.Module):
    """Sine and cosine of 1 to `turns` turns in 4096 ticks, of which it gets the hexadecimal digits.

    The phase goes up to 100 rad at 16 turns. There bfloat16's numbers (8 significant bits) are 0.5
    apart, 0.14 rad of rounding error rms; float16's (11 bits) 0.06 apart, 0.02 rad.
    """

    def __init__(self, turns: int) -> None:
        super().__init__()
        place = torch.tensor([256.0, 16.0, 1.0]) / 4096
        self.register_buffer("rate", 2 * math.pi * torch.arange(1, turns + 1)[:, None] * place)

    def forward(self, digits: Tensor) -> Tensor:
        """Map [B, 3] to [B, 2 x turns]."""
        phase = F.linear(digits, self.rate)
        return torch.cat([phase.sin(), phase.cos()], 1)


class HarmedByPrecision(nn.Module):
    """bfloat16 harms it, in `clock` alone; float16 does not."""

    def __init__(self, turns: int = 16, width: int = 32) -> None:
        super().__init__()
        self.clock, self.stem = Clock(turns), nn.Linear(2 * turns, width)
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, digits: Tensor) -> Tensor:
        """Map [B, 3] to [B, 1]."""
        hidden = self.stem(self.clock(digits))
        return self.head(hidden + self.body(hidden.relu()))


class HarmedInTheHead(nn.Module):
    """FP8 harms it, in `head` alone; bfloat16 and float16 over float32 weights do not.

    The head's weights begin with a part that all classes share, `drift`. The softmax does not see
    it, and its inputs are of mean zero. But FP8 (e4m3, 4 significant bits) rounds weights near 15
    to steps of 1.1, and with them the classes' own parts, which begin between -0.25 and 0.25;
    bfloat16 (8 bits) to 0.06. bf16-true harms it in another way: steps of 0.005 are rounded away.
    """

    def __init__(self, features: int, classes: int, width: int = 16, drift: float = 15.0) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(features, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, classes)
        with torch.no_grad():
            self.head.weight += drift

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [B, features] to logits [B, classes]."""
        hidden = self.body(self.stem(inputs).relu())
        return self.head(self.norm(hidden))


class HarmedByNothing(nn.Module):
    """Every native precision ends where float32 does: inputs, weights and gradients are of unit
    order, and the noise in the targets is greater than any rounding."""

    def __init__(self, features: int, width: int = 32) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(features, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [B, features] to [B, 1]."""
        return self.head(self.body(self.stem(inputs).relu()).relu())
