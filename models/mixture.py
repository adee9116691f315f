"""A small mixture-of-experts decoder in plain torch: the GPT's attention, and routed gated MLPs."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The wheel and the checkout both have models/ as runner.models; pyright sees neither.
from runner.models.gpt import Attention  # pyright: ignore[reportMissingImports]

_STD = 0.02  # initializer_range of Mixtral (Jiang et al. 2024, arXiv:2401.04088)


class Experts(nn.Module):
    """Gated MLPs whose weights are stacked, called as transformers' mixtures call theirs.

    Args:
        num_experts: E.
        width: of the tokens.
        hidden: width within each expert.
    """

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, hidden))

    def forward(self, tokens: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map float [N, width] to the weighted sum of each token's experts, [N, width].

        Args:
            tokens: float [N, width].
            top_k_index: int64 [N, k], the numbers of a token's experts.
            top_k_weights: float [N, k].
        """
        # Each expert's tokens lie together, so that one product serves all experts.
        experts, order = top_k_index.flatten().sort(stable=True)
        rows = tokens[order // top_k_index.shape[1]].to(self.gate_up_proj.dtype)
        gate, up = _grouped_linear(rows, self.gate_up_proj, experts).chunk(2, dim=-1)
        outputs = _grouped_linear(F.silu(gate) * up, self.down_proj, experts)
        outputs = outputs[order.argsort()].view(*top_k_index.shape, -1)
        return (outputs * top_k_weights[..., None]).sum(1).to(tokens.dtype)


def _grouped_linear(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Multiply rows [N, in] by the matrices [E, out, in] of their experts, int64 [N], sorted."""
    numbers = torch.arange(len(weights), device=rows.device)
    # torch 2.14 has no such kernel in float64, and does not trace the one in float32.
    is_traced = rows.dtype == torch.float32 and torch.compiler.is_compiling()
    if rows.dtype == torch.float64 or is_traced:
        chosen = (experts[:, None] == numbers).to(rows.dtype)
        products = [F.linear(rows * chosen[:, i, None], matrix) for i, matrix in enumerate(weights)]
        return torch.stack(products).sum(0)
    ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
    return F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


class Block(nn.Module):
    """Pre-norm attention and a mixture of experts, each added to the residual stream."""

    def __init__(self, width: int, heads: int, experts: int, top_k: int, hidden: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout=0.0)
        self.norm2 = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Map float [B, T, width] to the same shape, and to the load-balancing loss, a scalar.

        That loss is 1 where the experts' loads or the mean probabilities are even (Fedus et al.
        2021, arXiv:2101.03961, equation 4, with the load of all top-k choices as in Mixtral).
        """
        hidden = hidden + self.attention(self.norm1(hidden))
        tokens = self.norm2(hidden).flatten(0, 1)
        logits = self.router(tokens)
        # In 16 bits two probabilities are often equal.
        wide = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.softmax(-1, dtype=wide)
        weights, chosen = probabilities.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        experts = logits.shape[1]
        load = F.one_hot(chosen, experts).to(wide).mean((0, 1))
        balance = experts * (load * probabilities.mean(0)).sum()
        return hidden + self.experts(tokens, chosen, weights).view_as(hidden), balance


class Mixture(nn.Module):
    """Decoder-only language model with routed experts in the place of each MLP.

    Args:
        vocab_size: number of tokens, and of logits.
        context: longest sequence, in tokens.
        layers, heads, width: size; heads divides width, a multiple of 8.
        experts: of each layer.
        top_k: experts of a token, at most `experts`.
        hidden: width within each expert, a multiple of 8.
        aux_loss_coef: what the load-balancing loss is multiplied by in training.

    Raises:
        ValueError: a size is below 1, heads does not divide width, width or hidden is no multiple
            of 8, or top_k is above experts.
    """

    def __init__(  # noqa: PLR0913 - its parameters are the keys of the yaml
        self,
        vocab_size: int,
        context: int,
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        experts: int = 8,
        top_k: int = 2,
        hidden: int = 128,
        aux_loss_coef: float = 0.01,
    ) -> None:
        super().__init__()
        sizes = (vocab_size, context, layers, heads, width, top_k, hidden)
        # torch's grouped product takes rows of a multiple of 16 bytes.
        if min(sizes) < 1 or width % heads or width % 8 or hidden % 8 or top_k > experts:
            raise ValueError(
                f"Mixture needs sizes of 1 or more, heads dividing width, multiples of 8 for width "
                f"and hidden, and top_k of at most experts, got {vocab_size=}, {context=}, "
                f"{layers=}, {heads=}, {width=}, {experts=}, {top_k=}, {hidden=}"
            )
        self.aux_loss_coef = aux_loss_coef
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        blocks = (Block(width, heads, experts, top_k, hidden) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Map tokens int64 [B, T] to `logits` [B, T, vocab_size] of the next ones, and `aux_loss`,
        the mean of the layers' load-balancing losses."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        losses = []
        for block in self.blocks:
            hidden, balance = block(hidden)
            losses.append(balance)
        return {"logits": self.head(self.norm(hidden)), "aux_loss": torch.stack(losses).mean()}

    def _initialise(self, layers: int) -> None:
        """Draw weights from normal(0, 0.02), those before the residual stream smaller by
        1 / sqrt(2 x layers) as in the GPT, and set biases to zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                is_residual = name.endswith(("attention.projection.weight", "down_proj"))
                std = _STD / math.sqrt(2 * layers) if is_residual else _STD
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
