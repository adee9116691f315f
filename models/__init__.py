"""Plain nn.Modules: they import torch only, never runner."""
