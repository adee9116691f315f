"""A GPT-2 style decoder in plain modules, so that layer conversions find every Linear."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_STD = 0.02  # initializer_range of the released GPT-2 (github.com/openai/gpt-2, src/model.py)


class Attention(nn.Module):
    """Causal multi-head self-attention: float [B, T, width] to [B, T, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map float [B, T, width] to the same shape; a position sees itself and earlier ones."""
        batch, length, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream [B, T, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.activation = nn.GELU(approximate="tanh")  # GPT-2 uses the tanh form
        self.contract = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map float [B, T, width] to the same shape."""
        hidden = hidden + self.drop(self.attention(self.norm1(hidden)))
        return hidden + self.drop(self.contract(self.activation(self.expand(self.norm2(hidden)))))


class GPT(nn.Module):
    """Decoder-only language model (Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners", section 2.3).

    Args:
        vocab_size: number of tokens, and of logits.
        context: longest sequence, in tokens.
        layers, heads, width: size; heads divides width.
        dropout: probability in [0, 1).
        tie_weights: the head shares the token embedding's weight.

    Raises:
        ValueError: a size is below 1, or heads does not divide width.
    """

    def __init__(  # noqa: PLR0913 - its parameters are the keys of the yaml
        self,
        vocab_size: int,
        context: int,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        if min(vocab_size, context, layers, heads, width) < 1 or width % heads:
            raise ValueError(
                f"GPT needs sizes of 1 or more and heads dividing width, got {vocab_size=}, "
                f"{context=}, {layers=}, {heads=}, {width=}"
            )
        self.context = context
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self._initialise(layers)
        # After the initialisation, which would draw a shared weight twice.
        if tie_weights:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens int64 [B, T] to next-token logits [B, T, vocab_size].

        Raises:
            ValueError: T is above `context`.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"GPT got {length} tokens, but its context is {self.context}")
        positions = torch.arange(length, device=tokens.device)
        hidden = self.drop(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def _initialise(self, layers: int) -> None:
        """Draw weights from normal(0, 0.02) and set biases to zero.

        The 2 x layers projections that write to the residual stream start smaller by
        1 / sqrt(2 x layers) (Radford et al. 2019, section 2.3).
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("attention.projection", "contract"))
                std = _STD / math.sqrt(2 * layers) if residual else _STD
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
