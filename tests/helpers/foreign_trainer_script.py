"""Train with Accelerate and a PrecisionRecord for a long time, until a signal ends it.

Arguments: the working directory.
"""

import os
import sys
import time

import torch
from accelerate import Accelerator
from foreign_models import examples, tiny_net

from runner.integrations.accelerate import PrecisionRecord


def train():
    os.chdir(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    net = tiny_net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = {name: torch.stack([row[name] for row in examples(4)]) for name in ("x", "labels")}
    with PrecisionRecord(accelerator, model, optimizer, log_every=1) as record:
        for _ in range(6000):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            record.step()
            time.sleep(0.05)


if __name__ == "__main__":
    train()
