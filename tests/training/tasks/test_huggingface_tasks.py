"""The tasks of Hugging Face's kinds of models compute what torch's functions do."""

import copy
from types import SimpleNamespace

import pytest
import torch
from states import make_state, optimizer_gradients
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from runner.core.base.errors import ConfigError
from runner.core.loop.batch_layout import KeywordInputs
from runner.core.loop.step import train_step
from runner.training.tasks.huggingface import TASKS, task_for
from runner.training.tasks.language import CausalLM, MaskedLM, Seq2Seq, TokenClassification
from runner.training.tasks.model_loss import ModelLoss
from runner.training.tasks.segmentation import Segmentation

LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, 3, -100, -100], [4, 5, 6, 0, 1]])


def summary(task, output, target):
    return task.summarise(task.totals(output, target).tolist())


def test_a_causal_model_predicts_the_next_of_its_own_tokens():
    task = CausalLM()
    expected = F.cross_entropy(LOGITS[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())
    assert torch.equal(task.loss({"logits": LOGITS}, LABELS), expected)
    assert task.labels(LABELS) == 6
    assert summary(task, LOGITS, LABELS)["val/loss"] == pytest.approx(expected.item())


@pytest.mark.parametrize("kind", [MaskedLM, TokenClassification])
def test_tokens_are_counted_where_they_have_a_label(kind):
    found = summary(kind(), LOGITS, LABELS)
    counted = LABELS != -100
    right = (LOGITS.argmax(-1) == LABELS)[counted]
    assert found["val/accuracy"] == pytest.approx(right.float().mean().item())
    expected = F.cross_entropy(LOGITS[counted], LABELS[counted]).item()
    assert found["val/loss"] == pytest.approx(expected)


def test_pixels_are_counted_by_class():
    logits = LOGITS[:, :3].unsqueeze(-1)  # [2, 3, 7, 1]
    target = torch.tensor([[0, 1, 2, 0, 1, 2, -100], [1, 1, 1, 1, 1, 1, 1]]).unsqueeze(-1)
    found = summary(Segmentation(), logits, target)
    predicted = logits.argmax(1)
    counted = target != -100
    ratios = []
    for label in range(3):
        both = ((predicted == label) & (target == label) & counted).sum()
        either = ((predicted == label) | (target == label)) & counted
        ratios.append((both / either.sum()).item())
    assert found["val/iou"] == pytest.approx(sum(ratios) / 3)
    expected = F.cross_entropy(logits, target)
    assert found["val/loss"] == pytest.approx(expected.item())
    assert torch.equal(Segmentation().loss(logits, target), expected)


@pytest.mark.parametrize(
    ("output", "options"),
    [
        (torch.tensor(2.0), {}),
        ({"loss": torch.tensor(2.0), "logits": LOGITS}, {}),
        ({"boxes": torch.tensor(0.5), "classes": torch.tensor(1.5)}, {}),
        ((LOGITS, torch.tensor(2.0)), {"output": 1}),
        (torch.tensor([1.0, 2.0]), {"output": 1}),
        (CausalLMOutput(loss=torch.tensor(2.0), logits=LOGITS), {"output": 0}),
    ],
)
def test_the_loss_of_a_model_is_taken(output, options):
    task = ModelLoss(**options)
    assert task.loss(output, LABELS) == 2
    assert summary(task, output, LABELS) == {"val/loss": 2}


def test_outputs_without_what_a_task_takes_are_refused():
    table = [
        (CausalLM(output="logits"), {"hidden": LOGITS}, "keys hidden, and that part of it is no t"),
        (CausalLM(output=2), (LOGITS, LOGITS), "Type task.output=<0 to 1>"),
        (CausalLM(output="logits"), {5: LOGITS}, "Type task.output=<5>"),
        (CausalLM(output="logits"), LOGITS, "returns one tensor. Leave task.output out"),
        (ModelLoss(), {"logits": LOGITS}, "the model returns no loss"),
    ]
    for task, output, said in table:
        with pytest.raises(ConfigError, match=said):
            task.loss(output, LABELS)
    assert torch.equal(CausalLM(output=1).select((None, LOGITS)), LOGITS)


def test_every_kind_of_model_has_its_task():
    assert {kind: type(task_for(kind)) for kind in TASKS} == TASKS
    assert TASKS["seq2seq_lm"] is Seq2Seq
    with pytest.raises(ConfigError, match="Allowed: causal_lm, masked_lm"):
        task_for("causal")


def mixtral():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    return MixtralForCausalLM(MixtralConfig(**sizes, **options))


def test_a_mixture_of_experts_trains_on_the_loss_of_transformers():
    tokens = torch.randint(32, (3, 8), generator=torch.Generator().manual_seed(1))
    model = mixtral()
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    state = make_state(mixtral(), "32-true", task=CausalLM())
    seen = optimizer_gradients(state)
    record = train_step(state, [(KeywordInputs({"input_ids": tokens}), tokens)])
    torch.testing.assert_close(record.loss, output.loss.detach())
    torch.testing.assert_close(record.measured["train/aux_loss"], output.aux_loss.detach())
    torch.testing.assert_close(seen, [p.grad for p in model.parameters()])
    state = make_state(mixtral(), "32-true", task=ModelLoss())
    fields = KeywordInputs({"input_ids": tokens, "labels": tokens})
    record = train_step(state, [(fields, tokens)])
    assert record.loss == output.loss
    assert record.measured == {"train/aux_loss": output.aux_loss}


class Penalised(nn.Linear):
    """Returns its logits with losses of its own."""

    def forward(self, x):
        logits = super().forward(x)
        size, detached = logits.square().mean(), logits.detach().mean()
        return SimpleNamespace(logits=logits, size_loss=size, loss=2 * size, log_loss=detached)


def test_what_a_model_returns_as_its_losses_is_added():
    torch.manual_seed(0)
    model = Penalised(4, 3)
    inputs, labels = torch.ones(2, 4), torch.tensor([0, 2])
    output = copy.deepcopy(model)(inputs)
    entropy = F.cross_entropy(output.logits, labels)
    task = TASKS["sequence_classification"]()
    record = train_step(make_state(model, task=task), [(inputs, labels)])
    torch.testing.assert_close(record.loss, (entropy + 3 * output.size_loss).detach())
    assert set(record.measured) == {"train/main_loss", "train/size_loss", "train/model_loss"}
