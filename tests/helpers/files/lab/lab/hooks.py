import random

import numpy as np
import torch

SEEN = []


def note(model, info):
    """Draw numbers, as a sampling hook does, and note what is given."""
    random.random(), np.random.rand(), torch.randn(3)
    state = (model.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    SEEN.append((info, state, next(model.parameters()).detach().clone()))
    output = model(info.batch[0])
    return {"largest": output.max(), "steps": info.step}


def fail(model, info):
    torch.randn(3)
    if info.step == 2:
        raise KeyError("no such prompt")


class Write:
    def __init__(self, text):
        self.text = text

    def __call__(self, model, info):
        (info.folder / "text.txt").write_text(self.text)


def partial(model, info, text):
    Write(text)(model, info)


def a_list(model, info):
    return [1]


def a_text(model, info):
    return {"bleu": "high"}


def the_loss(model, info):
    return {"loss": 1}
