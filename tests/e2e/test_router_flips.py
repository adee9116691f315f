"""What a sweep over a mixture of experts says of tokens that other experts get."""

from statistics import fmean

import pytest
from run_folders import only_sweep, read_json

from runner.core.base.fmt import format_percent
from runner.sweeps.report.load import load_from_folder, load_from_store
from runner.tracking.reader import Reader

SMALL = "model.width=16 model.hidden=16 model.experts=4 train.batch_size=4 train.max_steps=2"
SWEEP = ("-m", "hydra/launcher=basic", "accelerator=cpu", "model=mixture", "data=text")
NAME = "qat-nvfp4"


def test_the_tokens_that_other_experts_get_in_the_first_step(main, store, tmp_path):
    uri = f"tracking.uri={store}"
    done = main(*SWEEP, *SMALL.split(), f"precision=32-true,{NAME}", "seed=0,1", uri).check_ok()
    folder = only_sweep(tmp_path)
    chosen = [read_json(folder / str(n) / "routers.json") for n in range(4)]
    layers = {}
    for layer in chosen[0]:
        pairs = [
            (set(own), set(base))
            for seed in (0, 1)
            for own, base in zip(chosen[2 + seed][layer], chosen[seed][layer], strict=True)
        ]
        assert len(pairs) == 2 * 4 * 128  # seeds, sequences, tokens
        layers[layer] = fmean(own != base for own, base in pairs)
    assert all(0 < share < 1 for share in layers.values())
    data = load_from_folder(folder)
    reader = Reader(store)
    assert load_from_store(reader, reader.sweep(data.sweep_id)).router_flips == data.router_flips
    assert data.router_flips == {NAME: pytest.approx(layers)}
    row = " | ".join([NAME, *map(format_percent, layers.values())])
    assert f"| {row} |" in (folder / "report.md").read_text()
    mean = fmean(layers.values())
    answer = read_json(folder / "report.json")["answer"]
    assert answer[f"answer/router_flips/{NAME}"] == pytest.approx(mean)
    words = f"in the first step: {NAME} {format_percent(mean)}."
    assert f"Tokens with other experts than in 32-true, {words}" in done.stdout
