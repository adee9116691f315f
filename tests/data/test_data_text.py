import pytest
import torch

from runner.data.datasets.text import TextWindows, text
from runner.utils.errors import ConfigError


def test_windows_do_not_overlap_and_targets_are_one_on():
    windows = TextWindows(torch.arange(11, dtype=torch.uint8), context=5)
    assert len(windows) == 2
    first, second = windows[0], windows[1]
    assert first[0].tolist() == [0, 1, 2, 3, 4]
    assert first[1].tolist() == [1, 2, 3, 4, 5]
    assert second[1].tolist() == [6, 7, 8, 9, 10]
    assert first[0].dtype == torch.int64
    with pytest.raises(IndexError):
        windows[2]


def test_last_window_needs_its_target():
    assert len(TextWindows(torch.zeros(10, dtype=torch.uint8), context=5)) == 1


def test_batch_gathers_what_items_give():
    windows = text(context=16).val
    indices = torch.tensor([len(windows) - 1, 0, 7])
    inputs, targets = windows.batch(indices)
    assert inputs.dtype == targets.dtype == torch.int64
    for row, index in enumerate(indices.tolist()):
        assert torch.equal(inputs[row], windows[index][0])
        assert torch.equal(targets[row], windows[index][1])


def test_a_file_is_split_in_order_without_leaks(tmp_path):
    content = bytes(range(200))
    (tmp_path / "a.txt").write_bytes(content)
    train, val = text(str(tmp_path / "a.txt"), context=8, val_fraction=0.25)
    assert bytes(train.tokens.tolist()) == content[:150]
    assert bytes(val.tokens.tolist()) == content[150:]


def test_built_in_text_is_pythons_documentation():
    train, _ = text(context=128)
    assert len(train) > 2000
    assert b"statement" in bytes(train.tokens.tolist())


@pytest.mark.parametrize("content", [b"", b"x" * 257, None])
def test_bad_files_are_named(tmp_path, content):
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.txt.*data\.path=FILE"):
        text(str(path), context=128)


def test_a_folder_is_not_a_text(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path=FILE"):
        text(str(tmp_path))


@pytest.mark.parametrize("keywords", [{"val_fraction": 0.05}, {"val_fraction": 1}, {"context": 0}])
def test_splits_without_a_window_are_refused(tmp_path, keywords):
    (tmp_path / "a.txt").write_bytes(b"x" * 400)
    with pytest.raises(ConfigError, match="Type data"):
        text(str(tmp_path / "a.txt"), **{"context": 64} | keywords)
