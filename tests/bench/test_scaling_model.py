"""bench/scaling: what must hold of any model of a step's time and memory."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.scaling import model, predict, tables
from bench.scaling.links import Measured
from bench.scaling.measure import Fit, fit
from bench.scaling.model import KINDS, STRATEGIES, Case, Work
from models.gpt import GPT

LINKS = predict.CLUSTER
NET = next(net for net in predict.NETS if net.name == "GPT 7B")
WORK = Work(0.1, 0.2, 0.03)
FAR = 10**9


def at(world, **changes):
    return replace(LINKS, world=world, **changes)


def step(strategy, precision="bf16-mixed", world=64, overlaps=True, work=WORK, links=None):
    case = Case(NET, KINDS[precision], work, links or at(world), 4e12, overlaps)
    return STRATEGIES[strategy](case)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_one_process_sends_nothing(collective):
    times = {collective: {2**20: 1.0}}
    assert getattr(at(1), collective)(1e9) == 0
    assert getattr(Measured(1, times), collective)(1e9) == 0


def test_what_was_timed_is_what_is_predicted_and_lines_join_it():
    links = Measured(2, {"all_reduce": {100: 1.0, 200: 1.5, 400: 4.0}})
    seconds = [links.all_reduce(size) for size in (4, 100, 150, 200, 300, 400, 800)]
    assert seconds == pytest.approx([1.0, 1.0, 1.25, 1.5, 2.75, 4.0, 8.0])


def test_an_all_reduce_moves_twice_n_minus_one_nths():
    """Patarasuk and Yuan: with no latency its time is that of 2 (N - 1) / N of the bytes."""
    none = type(LINKS.ring)(0, 0, 0)
    for world in (2, 4, 8):
        links = at(world, ring=none, tree=type(LINKS.tree)(1e9, 0, 0), share=1.0)
        assert links.all_reduce(1e9) == pytest.approx(2 * (world - 1) / world * 1e9 / 450e9)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_where_rings_win():
    links = at(8, tree=type(LINKS.tree)(1e9, 0, 0), ring=LINKS.ring._replace(base=0.0))
    parts = links.reduce_scatter(1e8) + links.all_gather(1e8)
    assert links.all_reduce(1e8) == pytest.approx(parts)


def test_trees_keep_small_messages_from_growing_with_the_ring():
    ring = at(1024).all_gather(4)
    assert at(1024).all_reduce(4) < ring / 10
    assert ring > 50 * at(8).all_gather(4)


def test_a_bus_between_nodes_is_what_their_cards_carry_together():
    assert at(8).bandwidth == pytest.approx(0.8 * 450e9)
    assert at(16).bandwidth == pytest.approx(0.8 * 8 * 50e9)


@pytest.mark.parametrize(
    ("strategy", "precision", "per_weight"),
    [
        ("ddp", "32-true", 8),
        ("ddp", "bf16-mixed", 8),
        ("ddp", "bf16-true", 8),
        ("fsdp", "32-true", 12),
        ("fsdp", "bf16-mixed", 12),
        ("fsdp", "bf16-true", 8),
    ],
)
def test_what_a_weight_sends(strategy, precision, per_weight):
    sent = model.wire(NET, KINDS[precision], strategy, FAR)
    assert sent / NET.params == pytest.approx(per_weight)
    assert model.wire(NET, KINDS[precision], strategy, 1) == 0


def test_buckets_hold_every_gradient_once_in_order():
    found = list(model.buckets(NET, KINDS["32-true"], 25 * model.MIB))
    assert sum(size for _, size in found) == pytest.approx(4 * NET.params)
    shares = [share for share, _ in found]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert found[0][1] == model.FIRST_BUCKET


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", KINDS)
def test_overlap_hides_collectives_and_invents_no_time(strategy, precision):
    hidden, plain = (step(strategy, precision, overlaps=overlaps) for overlaps in (True, False))
    assert plain.total == pytest.approx(plain.compute + plain.copies + plain.collectives)
    assert hidden.compute + hidden.copies < hidden.total < plain.total
    assert hidden.collectives == pytest.approx(plain.collectives)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_compute_to_hide_behind_every_collective_shows(strategy):
    idle = step(strategy, work=Work(0.0, 0.0, 0.0))
    assert idle.exposed == pytest.approx(idle.collectives)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_processes_and_worse_links_never_make_collectives_cheaper(strategy):
    worlds = [step(strategy, world=n).collectives for n in (1, 2, 4, 8, 16, 64, 1024)]
    assert worlds == sorted(worlds)
    assert worlds[0] == 0
    slower = step(strategy, links=at(64, share=0.4))
    assert slower.total >= step(strategy).total
    assert slower.collectives > step(strategy).collectives


def test_only_fsdp_shares_found_inf():
    for strategy, extra in (("ddp", 0.0), ("fsdp", at(64).all_reduce(4))):
        scaled, plain = (step(strategy, p).collectives for p in ("16-mixed", "bf16-mixed"))
        assert scaled - plain == pytest.approx(extra)


def test_fsdp_updates_its_part_only():
    alone = sum(WORK)
    assert step("ddp").compute == pytest.approx(alone)
    assert step("fsdp", world=10).compute == pytest.approx(alone - 0.9 * WORK.update)


@pytest.mark.parametrize("precision", KINDS)
def test_memory_of_very_many_processes_is_what_is_not_parted(precision):
    kind = KINDS[precision]
    far = model.memory(NET, kind, "fsdp", FAR, 1)
    assert far["weights"] + far["gradients"] + far["optimizer"] < 200
    assert far["casts"] == NET.params * kind.cast
    one = model.memory(NET, kind, "fsdp", 1, 1)
    whole = model.memory(NET, kind, "ddp", FAR, 1)
    for part in ("weights", "gradients", "optimizer", "casts", "activations"):
        assert one[part] == whole[part]


def test_the_largest_model_is_where_memory_ends():
    for kind in KINDS.values():
        held = predict.largest(kind) * predict.per_parameter(kind)
        assert held == pytest.approx(predict.CAPACITY * predict.USABLE)


def test_parameters_and_flops_are_the_models():
    made = predict.gpt("small", 3, 64, 32, 100)
    built = GPT(100, 32, layers=3, width=64, heads=4)
    assert made.params == sum(p.numel() for p in built.parameters())
    assert made.block == sum(p.numel() for p in built.blocks[0].parameters())
    gpt2 = next(iter(predict.NETS))
    assert gpt2.flops / 1024 == pytest.approx(0.86e9, rel=0.01)  # 6N + 12LdT of 124M weights


def test_the_fit_finds_alpha_and_beta():
    line = Fit(3e-4, 2e-9)
    found = fit({size: line(size) for size in (2**12, 2**16, 2**20, 2**24)})
    assert found.alpha == pytest.approx(line.alpha)
    assert found.beta == pytest.approx(line.beta)
    assert fit({2**12: 1e-6, 2**20: 1.0}).alpha >= 0


def test_the_page_of_results_shows_the_committed_figures():
    assert (tables.RESULTS / "scaling.md").read_text() == tables.page()
