from torch.utils.data import RandomSampler

from lab.data import Rows


def sets(count):
    return Rows(count), {"seen": Rows(7), "unseen": Rows(5)}, Rows(6)


def few(dataset):
    return RandomSampler(dataset, num_samples=16)
