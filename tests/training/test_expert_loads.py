"""What is recorded of a mixture's routers."""

import pytest
import torch
from states import CPU, make_state
from torch import nn
from torch.utils.data import TensorDataset

from runner.core.config.schema import TrainSpec
from runner.core.loop.step_records import EvalRecord
from runner.core.loop.training_loop import LoopHooks, fit
from runner.data.loader import Loader
from runner.models.huggingface import huggingface
from runner.models.mixture import Mixture
from runner.training.expert_loads import ExpertLoads
from runner.training.tasks.language import Language

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
KINDS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


class Layer(nn.Module):
    num_experts = 4

    def forward(self, tokens, index, weights):
        return tokens


def numbers(loads):
    return {name: value.item() for name, value in loads.gauges().items()}


def test_loads_and_entropies_of_known_choices():
    model = nn.ModuleDict({"layer": Layer(), "other": nn.Linear(2, 2)})
    loads = ExpertLoads(model)
    assert loads.gauges() == {}
    index = torch.tensor([[1, 0], [0, 1], [2, 0]])
    weights = torch.tensor([[1.0, 1.0], [1.0, 3.0], [2.0, 0.0]])
    model["layer"](torch.ones(3, 2), index, weights=weights)
    expected = {
        "experts/load_max/layer": 3 / 6 * 4,
        "experts/load_entropy/layer": 1.0114,  # of 3/6, 2/6, 1/6
        "experts/entropy/layer": (0.693147 + 0.562335) / 3,  # of 1/2, of 1/4, and 0
        "experts/idle/layer": 1,
        "experts/dropped/layer": 1 / 6,
    }
    assert numbers(loads) == pytest.approx(expected, abs=1e-4)
    model.eval()
    model["layer"](torch.ones(3, 2), 3 - index, weights)  # an evaluation's
    model.train()
    model["layer"](torch.ones(3, 2), weights, weights)  # no numbers of experts
    loads.close()
    model["layer"](torch.ones(3, 2), 3 - index, weights)
    assert numbers(loads) == pytest.approx(expected, abs=1e-4)


def test_a_choice_of_no_expert_or_without_weight_is_dropped():
    layer = Layer()
    loads = ExpertLoads(layer)
    weights = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    layer(torch.ones(3, 2), torch.tensor([[0, 4], [-1, 1], [0, 1]]), weights)
    found = numbers(loads)
    assert found["experts/load_max/"] == 2
    assert found["experts/idle/"] == 2
    assert found["experts/dropped/"] == pytest.approx(4 / 6)
    assert found["experts/entropy/"] == pytest.approx(0.693147)


def hooks_of(model):
    return [len(module._forward_pre_hooks) for module in model.modules()]


def model_of(name):
    torch.manual_seed(0)
    if name == "mixture":
        return Mixture(32, 8, layers=1, width=16, experts=4, hidden=16)
    return huggingface("causal_lm", config={"model_type": name, **SIZES, **KINDS[name]})


@pytest.mark.parametrize("name", ["mixture", *KINDS])
def test_a_training_records_what_the_router_chose_and_leaves_no_hook(name):
    model = model_of(name)
    state = make_state(model, task=Language())
    hooks = hooks_of(model)
    (layer,) = (n for n, m in model.named_modules() if n.endswith(".experts"))
    chosen = []
    handle = model.get_submodule(layer).register_forward_pre_hook(
        lambda module, args: chosen.append(args[1]) if module.training else None
    )
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    batches = Loader(data, 4, shuffle=False, seed=0, device=CPU)
    loads = ExpertLoads(model)
    shown = LoopHooks(gauges=loads.gauges)
    records = [*fit(state, batches, batches, TrainSpec(max_steps=2, log_every=1), shown)]
    loads.close()
    handle.remove()
    blocks = [record for record in records if not isinstance(record, EvalRecord)]
    for index, (step,) in zip(chosen, blocks, strict=True):
        counts = torch.bincount(index.flatten(), minlength=4)
        assert step.gauges[f"experts/idle/{layer}"] == (counts == 0).sum()
        largest = (counts.max() / index.numel() * 4).item()
        assert step.gauges[f"experts/load_max/{layer}"] == pytest.approx(largest)
        assert 0 < step.gauges[f"experts/entropy/{layer}"] <= 0.6932
    assert hooks_of(model) == hooks
