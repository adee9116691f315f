"""Small data sets whose lowest possible loss is known. Inputs and targets are float32."""

import math

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

VAL = 1024  # examples


def split_in_two(inputs: Tensor, targets: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation sets; the first VAL examples validate."""
    return (TensorDataset(inputs[VAL:], targets[VAL:]), TensorDataset(inputs[:VAL], targets[:VAL]))


def kinks(features: int, count: int, noise: float):
    """Three bent directions of normal inputs, [count, 1], under normal noise: the least squared
    error is noise**2."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, features, generator=generator)
    exact = 3 * inputs[:, 0].abs() - 2 * inputs[:, 1].relu() + inputs[:, 2]
    return split_in_two(inputs, (exact + noise * torch.randn(count, generator=generator))[:, None])


def ticks(count: int, noise: float):
    """Four tones in time, [count, 1], of 13 to 16 turns each and variance 1/2 in all, under normal
    noise. Time comes as the three hexadecimal digits of a tick from 0 to 4095, exact in any dtype.
    """
    generator = torch.Generator().manual_seed(0)
    tick = torch.randint(4096, (count,), generator=generator)
    turns = torch.arange(13, 17) * tick[:, None].double() / 4096
    exact = (2 * math.pi * turns + torch.arange(4)).sin().sum(1) / 2
    digits = torch.stack([tick // 256, tick // 16 % 16, tick % 16], 1).float()
    target = exact.float() + noise * torch.randn(count, generator=generator)
    return split_in_two(digits, target[:, None])


def clusters(features: int, classes: int, count: int, spread: float):
    """Normal clusters of deviation 1 around normal centres of deviation `spread`."""
    generator = torch.Generator().manual_seed(0)
    centres = spread * torch.randn(classes, features, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return split_in_two(centres[labels] + torch.randn(count, features, generator=generator), labels)
