"""Built-in models: plain nn.Modules that import torch and torchvision, never runner."""
