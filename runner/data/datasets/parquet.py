"""Load rows of parquet files: columns of numbers, or texts through a tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.datasets.npz import as_input, as_target
from runner.data.fields import IGNORED_LABEL, TensorFields, split_fields
from runner.data.splits import Splits, held_out, require_at_least
from runner.utils.errors import ConfigError

_TOKEN_FIELDS = ("input_ids", "attention_mask", "labels")
"""Fields that data.text becomes."""

Tokenize = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class _TextOptions:
    """How texts become tokens.

    Attributes:
        column: with the texts.
        tokenize: returns the tokens of each text.
        length: tokens of an example.
        packing: whether texts follow each other without padding.
    """

    column: str
    tokenize: Tokenize
    length: int
    packing: bool


def parquet(  # noqa: PLR0913 - its parameters are the keys of the yaml
    path: str,
    val_path: str | None = None,
    val_fraction: float = 0.1,
    columns: Sequence[str] | None = None,
    target: str | None = None,
    text: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
    packing: bool = False,
    seed: int = 0,
) -> Splits:
    """Load a parquet file, or a folder of them, as the fields of a batch.

    Args:
        path: a file, or a folder whose *.parquet are read in the order of their names.
        val_path: of the validation set; None takes val_fraction of path's examples.
        val_fraction: share for validation, between 0 and 1.
        columns: columns of numbers, or of lists of one length, that are fields under their names.
        target: the column with the targets, the field `labels`; None makes the tokens of `text`
            their own labels, as task=causal_lm takes them.
        text: the column with texts, which become the fields input_ids and attention_mask.
        tokenizer: a local folder that transformers loads, or a tokenizer.json.
        length: tokens of an example: longer texts are cut, shorter ones padded at the end.
        packing: texts one after the other, cut into examples without padding; without target.
        seed: of the split.

    Returns:
        Fields of float32, int64 tokens and labels; labels are -100 at padding.

    Raises:
        ConfigError: a file, a column or the tokenizer cannot be used.
    """
    require_at_least("parquet", length=(length, 2))
    options = _text_options(text, tokenizer, length, packing, target)
    if options is not None and packing and columns:
        raise ConfigError(
            "data=parquet: data.packing=true mixes the texts of several rows, so data.columns="
            f"[{','.join(columns)}] have no rows of their own. Type data.packing=false."
        )
    if options is None and not columns:
        raise ConfigError(
            "data=parquet: neither data.text nor data.columns names an input. Type "
            "data.columns=[<names>] data.target=<name>, or data.text=<name> data.tokenizer=<path>."
        )

    def load(where: str) -> dict[str, Tensor]:
        return _fields(where, columns or (), target, options)

    fields = load(path)
    if val_path is not None:
        return Splits(TensorFields(fields), TensorFields(load(val_path)))
    val = held_out(len(fields["labels"]), val_fraction, "parquet")
    return Splits(*split_fields(fields, val, seed))


def _text_options(
    text: str | None, tokenizer: str | None, length: int, packing: bool, target: str | None
) -> _TextOptions | None:
    if text is None:
        return None
    if tokenizer is None:
        raise ConfigError(
            f"data=parquet: data.text={text} needs a tokenizer. Type data.tokenizer=<a local "
            "folder of a Hugging Face tokenizer, or a tokenizer.json>."
        )
    if packing and target is not None:
        raise ConfigError(
            "data=parquet: data.packing=true mixes the texts of several rows, so data.target="
            f"{target} has no row of its own. Type data.packing=false."
        )
    return _TextOptions(text, _load_tokenizer(Path(tokenizer)), length, packing)


def _load_tokenizer(path: Path) -> Tokenize:
    """Return a function from texts to their tokens."""
    if not path.exists():
        raise ConfigError(f"data.tokenizer={path} does not exist. Type a local folder or file.")
    try:
        if path.is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(path))
            return lambda texts: [encoding.ids for encoding in fast.encode_batch(texts)]
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer: transformers is not installed here. Type pip install "
            "'precision-runner[hf]'."
        ) from error
    except Exception as error:  # tokenizers raises a bare Exception
        raise ConfigError(f"data.tokenizer={path} cannot be loaded: {error}.") from error
    return lambda texts: loaded(texts)["input_ids"]


def _fields(
    path: str, columns: Sequence[str], target: str | None, options: _TextOptions | None
) -> dict[str, Tensor]:
    names = [*columns]
    # Fields that the columns below make.
    made: dict[str, str] = {}
    if options is not None:
        names.append(options.column)
        made = dict.fromkeys(_TOKEN_FIELDS, f"data.text={options.column}")
    if target is not None:
        names.append(target)
        made["labels"] = f"data.target={target}"
    for name in columns:
        if name in made and name != target:
            advice = "data.target=labels, or leave it out of" if name == "labels" else "others in"
            raise ConfigError(
                f"data=parquet: data.columns names {name}, and {made[name]} makes a field of that "
                f"name, too. Type {advice} data.columns."
            )
    table = _read(path, list(dict.fromkeys(names)))
    fields = {name: as_input(_array(table, name)) for name in columns}
    if options is not None:
        fields |= _token_fields(table[options.column].to_pylist(), options)
    if target is not None:
        fields["labels"] = as_target(_array(table, target))
    if "labels" not in fields:
        raise ConfigError("data=parquet: no column is the target. Type data.target=<name>.")
    return fields


def _read(path: str, names: Sequence[str]) -> Any:
    """Return the named columns of a file or of a folder's files as an Arrow table."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    where = Path(path)
    files = sorted(where.glob("*.parquet")) if where.is_dir() else [where]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"data=parquet: no parquet file is at {path}. Type data.path=<file>.")
    try:
        present = pq.read_schema(files[0]).names
        missing = [name for name in names if name not in present]
        if missing:
            raise ConfigError(
                f"data=parquet: {files[0]} has no column {', '.join(missing)}; it has "
                f"{', '.join(present)}."
            )
        return pa.concat_tables([pq.read_table(file, columns=[*names]) for file in files])
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data=parquet: {path} cannot be read: {error}.") from error


def _array(table: Any, name: str) -> np.ndarray:
    """Return a column of numbers, or of lists of one length, as an array [N, ...]."""
    column = table[name]
    if column.null_count:
        raise ConfigError(f"data=parquet: column {name} has {column.null_count} empty values.")
    values = column.to_numpy()
    try:
        array = np.stack(values) if values.dtype == object else values
    except ValueError as error:
        raise ConfigError(
            f"data=parquet: the lists of column {name} differ in length. Pad them to one length."
        ) from error
    if array.dtype.kind not in "fiub":
        raise ConfigError(
            f"data=parquet: column {name} holds {column.type}, no numbers. Texts are read with "
            f"data.text={name} data.tokenizer=<path>."
        )
    return array


def _token_fields(texts: list[str], options: _TextOptions) -> dict[str, Tensor]:
    """Return input_ids, attention_mask and labels, int64 [N, length] each."""
    if any(text is None for text in texts):
        raise ConfigError(f"data=parquet: column {options.column} has empty values.")
    rows = options.tokenize(texts)
    length = options.length
    if options.packing:
        stream = torch.tensor([token for row in rows for token in row])
        count = len(stream) // length
        if not count:
            raise ConfigError(
                f"data=parquet: all texts together have {len(stream)} tokens, fewer than one "
                f"example of data.length={length}."
            )
        ids = stream[: count * length].reshape(count, length)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        kept = row[:length]
        ids[i, : len(kept)] = torch.tensor(kept)
        mask[i, : len(kept)] = 1
    labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
