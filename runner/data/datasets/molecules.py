"""Load molecules as SMILES with masked tokens, for masked language models of molecules.

Source: the package chemicals (Bell et al., MIT), its table of 71,347 compounds; the vocabulary of
the ALBERT of the package rxnmapper (Schwaller et al., Science Advances 7, 2021, MIT).
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from runner.core import ConfigError, batch_layout, files
from runner.data.splits import Splits, held_out, require_at_least, split_fields

_TABLE = ("chemicals", "Identifiers/chemical identifiers pubchem large.tsv")
_SMILES_COLUMN = 4
_VOCABULARY = ("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k/vocab.txt")
# The tokens of a SMILES string, as in Schwaller et al., Molecular Transformer, ACS Central Science
# 5, 2019.
_TOKEN = re.compile(
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$"
    r"|\%[0-9]{2}|[0-9])"
)
_SHORTEST = 8
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def molecules(
    path: str | None = None,
    count: int = 4500,
    length: int = 48,
    masked: float = 0.15,
    val_fraction: float = 0.1,
    seed: int = 0,
) -> Splits:
    """Load the first molecules of a table whose SMILES fit, and mask some of their tokens.

    A molecule fits with 8 to length - 2 tokens. The masks are drawn once from the seed, for
    training and validation, so every precision sees the same ones in each epoch.

    Args:
        path: a text file with a SMILES in each line; None for the package chemicals.
        count: molecules at most.
        length: tokens of an example with [CLS] and [SEP], padded with [PAD].
        masked: share of the tokens in whose place the model sees [MASK].
        val_fraction: share for validation, between 0 and 1.
        seed: of masks and split alone; the run's seed does not change it.

    Returns:
        Fields input_ids, attention_mask, labels: int64 [N, length]; labels are -100 where no token
        is masked.

    Raises:
        ConfigError: a file or package is missing, or a value is out of range.
    """
    require_at_least("molecules", count=(count, 2), length=(length, _SHORTEST + 2))
    if not 0 < masked < 1:
        raise ConfigError(
            f"data=molecules: masked={masked} is no share between 0 and 1. Type data.masked=0.15."
        )
    vocabulary = files.package_file(*_VOCABULARY)
    if vocabulary is None:
        raise ConfigError(
            "data=molecules needs rxnmapper's vocabulary. Type pip install --no-deps rxnmapper."
        )
    names = vocabulary.read_text(encoding="utf-8").splitlines()
    tokens = {name: i for i, name in enumerate(names)}
    rows = [*islice(_encoded(_smiles(path), tokens, length), count)]
    val = held_out(len(rows), val_fraction, "molecules")
    ids = torch.tensor(rows)
    special = torch.tensor([tokens[name] for name in _SPECIAL])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(ids.shape, generator=generator, dtype=torch.float32) < masked
    chosen = drawn & ~torch.isin(ids, special)
    fields = {
        "input_ids": ids.masked_fill(chosen, tokens["[MASK]"]),
        "attention_mask": (ids != tokens["[PAD]"]).long(),
        "labels": ids.masked_fill(~chosen, batch_layout.IGNORED_LABEL),
    }
    return split_fields(fields, val, seed)


def _encoded(lines: Iterator[str], tokens: dict[str, int], length: int) -> Iterator[list[int]]:
    """Yield the tokens [length] of each SMILES that fits and has known characters only."""
    for smiles in lines:
        parts = _TOKEN.findall(smiles)
        if _SHORTEST <= len(parts) <= length - 2 and "".join(parts) == smiles:
            numbers = [tokens.get(part, tokens["[UNK]"]) for part in parts]
            padding = [tokens["[PAD]"]] * (length - 2 - len(parts))
            yield [tokens["[CLS]"], *numbers, tokens["[SEP]"], *padding]


def _smiles(path: str | None) -> Iterator[str]:
    """Yield the SMILES of a text file, or of the package chemicals."""
    file = files.package_file(*_TABLE) if path is None else Path(path)
    if file is None:
        raise ConfigError(
            "data=molecules: the package chemicals, which ships the molecules (22 MB), is not "
            "installed. Type pip install --no-deps chemicals, or data.path=<SMILES in lines>."
        )
    if not file.is_file():
        raise ConfigError(
            f"data=molecules: {path} is no file. Type data.path=<file with a SMILES in each line>."
        )
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield line.split("\t")[_SMILES_COLUMN] if path is None else line.strip()
