import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from runner.precision import registry
from runner.precision.options import float32_matmul
from runner.utils.errors import ConfigError

CPU, CUDA, MPS = map(torch.device, ("cpu", "cuda", "mps"))
ADAMS = {
    "Adam": {},
    "AdamW": {},
    "NAdam": {},
    "RMSprop": {"eps": 1e-8},
    "Adagrad": {"eps": 1e-10},
}


def switches():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("name", "inside"), [("32-true", ("highest", False)), ("tf32", ("high", True))]
)
def test_the_session_sets_both_switches_and_restores_them(name, inside):
    model, before = nn.Linear(2, 2), switches()
    assert before == ("highest", True)  # torch leaves TF32 on for convolutions
    with registry.load_precision(name).session(model, CPU):
        assert switches() == inside
    assert switches() == before


def _fail_inside(precision):
    with float32_matmul(precision):
        raise RuntimeError("inside")


@pytest.mark.parametrize("before", [("high", False), ("medium", True), ("highest", False)])
def test_the_switches_come_back_after_an_exception(before):
    previous = switches()
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
    try:
        for precision in ("highest", "high"):
            with pytest.raises(RuntimeError, match="inside"):
                _fail_inside(precision)
            assert switches() == before
    finally:
        torch.set_float32_matmul_precision(previous[0])
        torch.backends.cudnn.allow_tf32 = previous[1]


@pytest.mark.parametrize("kind", ADAMS)
def test_an_eps_that_float16_rounds_to_zero_is_refused(kind):
    optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.ones(1))], **ADAMS[kind])
    with pytest.raises(ConfigError, match=rf"optimizer\.eps=1e-\d+: {kind}.*optimizer\.eps=1e-4"):
        registry.load_precision("16-true").check_optimizers([optimizer])
    with pytest.raises(ConfigError, match=r"precision=transformer-engine-float16"):
        registry.load_precision("transformer-engine-float16").check_optimizers([optimizer])
    for name in set(registry.precision_names()) - {"16-true", "transformer-engine-float16"}:
        registry.load_precision(name).check_optimizers([optimizer])


def test_an_eps_that_works_and_none_at_all_pass():
    weights = [nn.Parameter(torch.ones(1))]
    good = [torch.optim.AdamW(weights, eps=1e-4), torch.optim.SGD(weights)]
    registry.load_precision("16-true").check_optimizers(good)


def train(eps):
    """Five steps whose squared gradients underflow in float16."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight], lr=0.01, eps=eps)
    for _ in range(5):
        weight.grad = torch.tensor([1e-5, 1.0, 0.0, 1e-3], dtype=torch.float16)
        optimizer.step()
    return weight


def test_the_refused_eps_fails_and_the_advised_one_works():
    assert not train(1e-8).isfinite().all()
    assert train(1e-4).isfinite().all()


def optimizer(kind, eps, lr, **keywords):
    return getattr(torch.optim, kind)([nn.Parameter(torch.ones(1))], lr=lr, eps=eps, **keywords)


REFUSED = {
    "the issue's": ("Adam", 1e-7, 1e-3, {}, "1e-4"),
    "ten times it": ("AdamW", 1e-6, 1e-3, {}, "1e-4"),
    "a large rate": ("NAdam", 3e-5, 1e-2, {}, "1e-3"),
    "a long memory": ("Adam", 1e-5, 1e-3, {"betas": (0.9, 0.9999)}, "1e-4"),
    "RMSprop's": ("RMSprop", 1e-7, 1e-3, {}, "1e-4"),
    "Adagrad's": ("Adagrad", 1e-7, 1e-2, {}, "1e-4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_eps_that_cannot_stand_in_for_vanished_squares_is_refused(case):
    kind, eps, lr, keywords, works = REFUSED[case]
    message = rf"optimizer\.eps={eps:g}: {kind} keeps .* round to 0.*Type optimizer\.eps={works},"
    for name in ("16-true", "transformer-engine-float16"):
        precision = registry.load_precision(name)
        with pytest.raises(ConfigError, match=message):
            precision.check_optimizers([optimizer(kind, eps, lr, **keywords)])
        precision.check_optimizers([optimizer(kind, float(works), lr, **keywords)])
    for name in ("16-mixed", "32-true", "bf16-true"):
        registry.load_precision(name).check_optimizers([optimizer(kind, eps, lr, **keywords)])


def test_an_eps_that_only_hurts_is_warned_of():
    with pytest.warns(UserWarning, match=r"eps=1e-05: AdamW .*= 0\.55\. Type optimizer.eps=1e-4"):
        registry.load_precision("16-true").check_optimizers([optimizer("AdamW", 1e-5, 1e-3)])


def test_optimizers_without_squares_take_any_eps_that_float16_holds():
    for kind in ("Adamax", "Adadelta"):
        registry.load_precision("16-true").check_optimizers([optimizer(kind, 1e-6, 1e-2)])


def worst_loss(eps, lr):
    """(the first loss, the largest of 12 steps) of a small GPT-2 in 16-true with AdamW."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1,
        n_embd=32,
        n_head=2,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    precision = registry.load_precision("16-true")
    model, _ = precision.convert(GPT2LMHeadModel(config))
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, eps=eps)
    tokens = torch.randint(0, 32, (8, 17))
    losses = []
    for _ in range(12):
        with precision.forward(CPU):
            output = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(output.float().flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses[0], max(losses)


@pytest.mark.parametrize(("eps", "lr"), [(1e-6, 1e-3), (1e-7, 1e-4), (3e-5, 1e-2)])
def test_a_refused_eps_destroys_a_gpt2_and_the_advised_one_trains_it(eps, lr):
    precision = registry.load_precision("16-true")
    with pytest.raises(ConfigError) as error:
        precision.check_optimizers([optimizer("AdamW", eps, lr)])
    works = float(str(error.value).partition("Type optimizer.eps=")[2].partition(",")[0])
    first, worst = worst_loss(eps, lr)
    assert not worst < 2 * first
    first, worst = worst_loss(works, lr)
    assert worst < 1.1 * first


@pytest.mark.parametrize("choice", ["native", "float32_accumulate"])
def test_kernels_returns_the_float16_kernels_that_ran(choice):
    precision, model = registry.load_precision("16-true", cpu_float16=choice), nn.Linear(2, 2)
    assert precision.kernels() == ""
    with precision.session(model, CPU):
        assert precision.kernels() == choice
    other = registry.load_precision("bf16-true")
    with other.session(model, CPU):
        assert other.kernels() == ""


@pytest.mark.parametrize("name", ["64-true", "16-true", "bf16-true"])
def test_tensors_that_a_forward_makes_are_in_the_dtype(name):
    precision = registry.load_precision(name)
    for _ in range(2):
        with precision.forward(CPU):
            assert torch.zeros(1).dtype is precision.storage
        assert torch.zeros(1).dtype is torch.float32


@pytest.mark.parametrize("name", ["64-true", "32-true", "tf32", "16-true", "bf16-true"])
def test_inputs_are_cast_and_the_loss_dtype_is_wide(name):
    precision = registry.load_precision(name)
    cast = precision.cast({"x": torch.ones(1), "mask": torch.ones(1, dtype=torch.bool)})
    assert (cast["x"].dtype, cast["mask"].dtype) == (precision.storage, torch.bool)
    assert precision.loss_dtype is (torch.float64 if name == "64-true" else torch.float32)
