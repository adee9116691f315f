import torch

# On busy cores OpenMP's barriers cost more than tensors of this size: 39 s became 3 s.
torch.set_num_threads(1)
