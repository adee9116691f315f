"""Make data sets of the columns of an Arrow table: numbers, texts through a tokenizer, images."""

import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.core import ConfigError, batch_layout, files
from runner.data.datasets.imagefolder import decoded_image, image_transform
from runner.data.datasets.npz import as_input, as_target
from runner.data.splits import (
    Splits,
    TensorFields,
    TextPairs,
    held_out,
    require_at_least,
    split_fields,
    split_rows,
)

log = logging.getLogger(__name__)

_TEXTS = "Texts are read with data.text=<column> data.tokenizer=<path>"
_CLASSES = "Number the classes from 0; other targets are numbers, too"
_TOKEN_FIELDS = ("input_ids", "attention_mask", "position_ids", "labels")
"""Fields that data.text becomes."""


@dataclass(frozen=True)
class _Tokenizer:
    """A tokenizer of transformers, and the token that ends each text, with its number."""

    loaded: Any
    end: tuple[str, int] | None = None

    def rows(
        self, texts: list[str], is_target: bool, ends_texts: bool, length: int | None
    ) -> list[list[int]]:
        """Return the tokens of each text, with the end token where it has no end yet.

        Args:
            texts: to be tokenized.
            is_target: they are an encoder-decoder's targets.
            ends_texts: add the end token.
            length: tokens of the longest row. The tokenizer cuts a longer text, so that it keeps
                the tokens that the tokenizer itself adds ([SEP], </s>). None cuts nothing.
        """
        limits = {} if length is None else {"truncation": True, "max_length": length}
        encoded = self.loaded(**{"text_target" if is_target else "text": texts}, **limits)
        # A tokenizer in Python has no encodings.
        cut = sum(bool(encoding.overflowing) for encoding in encoded.encodings or ())
        if cut:
            log.warning("%d of %d texts are cut at data.length=%d", cut, len(texts), length)
        rows = encoded["input_ids"]
        if self.end is None or not ends_texts:
            return rows
        # A text that BERT's tokenizer ends with [SEP], XLNet's with <cls>, has its end.
        ends = {self.end[1], self.loaded.sep_token_id, self.loaded.cls_token_id}
        return [row if row and row[-1] in ends else [*row, self.end[1]] for row in rows]


@dataclass(frozen=True, eq=False)
class EncodedImages(Dataset):
    """Pairs of an image, float32 [3, size, size], and its class as int.

    Attributes:
        images: a column of a table, Arrow's or a sequence: encoded bytes, or dicts of `bytes` and
            `path` as Hugging Face's datasets store them.
        labels: int64 [N].
        rows: of the column, which are the examples: int64.
        transform: takes an image of decoded_image.
        source: names the column in messages, for example `data=parquet: column photo`.
        learned_facts: see runner.data.fingerprint.learned_facts.
    """

    images: Sequence[Any]
    labels: Tensor
    rows: Tensor
    transform: Callable[[Any], Tensor]
    source: str
    learned_facts: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, transformed, and its class.

        Raises:
            ConfigError: it cannot be decoded; the message says which row of the table it is.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range: there are {len(self)} images")
        row = int(self.rows[index])
        value: Any = self.images[row]
        if hasattr(value, "as_py"):
            value = value.as_py()
        path = None
        if isinstance(value, Mapping):
            path = value.get("path")
            value = value.get("bytes")
        file = None if value is None else io.BytesIO(value)
        if file is None and path:
            file = Path(path)  # the table holds the path of the image alone
        image = decoded_image(file, f"{self.source}, row {row}")
        return self.transform(image), int(self.labels[row])


@dataclass
class TableColumns:
    """Columns of a table that are read, and what they become.

    Its examples are fields of float32, int64 tokens and labels, which are -100 at padding. Images
    are float32 [3, size, size], normalised with ImageNet's statistics, and decoded when they are
    read.

    Attributes:
        source: name of the data config, for messages. The others are keys of it.
        columns: columns of numbers, or of lists of one length, that are fields under their names.
        target: the column with the targets, the field `labels`; None makes the tokens of `text`
            their own labels, as task=causal_lm takes them.
            A column of texts, beside `text`, becomes the tokens of an encoder-decoder's targets.
        text: the column with texts, which become the fields input_ids and attention_mask.
        tokenizer: a local folder that transformers loads, or a tokenizer.json.
        length: tokens of an example: longer texts are cut by the tokenizer, which keeps the tokens
            that it adds, such as [SEP]; shorter ones are padded at the end.
        end_token: the token after each text that does not end with one: a token, True for that of
            the tokenizer, `auto` for that one where the tokenizer has one and tokens are targets,
            False for none.
        packing: texts one after the other, cut into examples without padding; without target.
        separate: packed texts are alone: the field position_ids, in place of attention_mask, begins
            anew at each, and the first token of a text is no label.
        seed: of the split into examples for training and validation.
        image: the column with images, as the bytes of PNG or JPEG files or as Hugging Face's
            {bytes, path} (datasets.Image); examples are then pairs (image, class).
        label: the column with the images' classes, integers from 0.
        size: side of the square image in pixels: the shorter side is resized to it, then
            the centre is cropped.
        augment: train on random resized crops and mirror images instead.

    Raises:
        ConfigError: no input is named, keys contradict each other, or the tokenizer cannot be used.
    """

    source: str
    columns: Sequence[str] | None = None
    target: str | None = None
    text: str | None = None
    tokenizer: str | None = None
    length: int = 128
    # Runs that began before these keys resume with what they had: conf/data has other defaults.
    end_token: str | bool = False
    packing: bool = False
    separate: bool = False
    seed: int = 0
    image: str | None = None
    label: str | None = None
    size: int = 224
    augment: bool = False
    _tokenizer: _Tokenizer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_at_least(self.source, length=(self.length, 2), size=(self.size, 1))
        if self.image is not None:
            if self.label is None:
                raise self._error(f"data.image={self.image} needs classes. Type data.label=<name>")
            others = {"text": self.text, "columns": self.columns, "target": self.target}
            keys = ", ".join(f"data.{key}" for key, value in others.items() if value)
            if keys:
                raise self._error(f"data.image={self.image} is the one input; leave out {keys}")
            return
        if self.label is not None:
            raise self._error(
                f"data.label={self.label} needs data.image=<name>; other inputs have data.target"
            )
        if self.text is not None:
            self._check_text_keys()
        elif not self.columns:
            raise self._error(
                "no input is named. Type data.columns=[<names>] data.target=<name>, or data.text="
                "<name> data.tokenizer=<path>, or data.image=<name> data.label=<name>"
            )
        self._check_field_names()

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"data={self.source}: {reason}.")

    def _check_text_keys(self) -> None:
        if self.tokenizer is None:
            raise self._error(
                f"data.text={self.text} needs a tokenizer. Type data.tokenizer=<folder or json>"
            )
        if self.packing and (self.target is not None or self.columns):
            key = "target" if self.columns is None else "columns"
            raise self._error(
                f"data.packing=true mixes rows: data.{key} fits none. Type data.packing=false"
            )
        self._tokenizer = _load_tokenizer(Path(self.tokenizer), self.end_token)

    def _check_field_names(self) -> None:
        """Raise ConfigError where a column has the name of a field that other keys make."""
        made: dict[str, str] = {}
        if self.text is not None:
            made = dict.fromkeys(_TOKEN_FIELDS, f"data.text={self.text}")
        if self.target is not None:
            made["labels"] = f"data.target={self.target}"
        for name in self.columns or ():
            if name in made and name != self.target:
                labels = "data.target=labels, or leave it out of"
                advice = labels if name == "labels" else "others in"
                raise self._error(f"{made[name]} makes {name}, too. Type {advice} data.columns")

    @property
    def names(self) -> list[str]:
        """Return the columns that are read, each once."""
        names = [*(self.columns or ()), self.text, self.target, self.image, self.label]
        return list(dict.fromkeys(name for name in names if name is not None))

    def check_present(self, where: object, present: Sequence[str]) -> None:
        """Raise ConfigError where a table lacks a column.

        Args:
            where: the table's place, for the message.
            present: its columns.
        """
        missing = ", ".join(name for name in self.names if name not in present)
        if missing:
            raise self._error(f"{where} has no column {missing}; it has {', '.join(present)}")

    def splits(self, train: Any, val: Any, val_fraction: float) -> Splits:
        """Return the data sets of tables.

        Args:
            train: Arrow table with the columns.
            val: of the validation set; None takes a share of train's examples.
            val_fraction: that share, between 0 and 1.

        Raises:
            ConfigError: a column does not hold what it is to become.
        """
        if self.image is not None:
            if val is None:
                count = held_out(len(train), val_fraction, self.source)
                rows, val_rows = split_rows(len(train), count, self.seed)
                val = train
            else:
                rows, val_rows = torch.arange(len(train)), torch.arange(len(val))
            return Splits(
                self._encoded_images(train, rows, self.augment),
                self._encoded_images(val, val_rows, augment=False),
            )
        fields = self._fields(train)
        if self._tokenizer is not None:
            end = self._tokenizer.end if self._ends_texts(train) else None
            ending = f"each text ends with {end[0]}" if end else "no end token is added to texts"
            joins = self.packing and not self.separate
            joined = "; packed texts see each other (data.separate=false)" if joins else ""
            value = str(self.end_token).lower()
            log.warning("data=%s: %s (data.end_token=%s)%s", self.source, ending, value, joined)
        kind = TextPairs if self._has_target_texts(train) else TensorFields
        facts = self._facts(train)
        if val is not None:
            return Splits(kind(fields, facts), kind(self._fields(val), self._facts(val)))
        count = held_out(len(fields["labels"]), val_fraction, self.source)
        return split_fields(fields, count, self.seed, partial(kind, facts=facts))

    def _facts(self, table: Any) -> dict[str, Any]:
        """Return the tokenizer's vocabulary, and the names of classes where the table has them:
        Hugging Face's datasets write those of a ClassLabel column into the schema."""
        facts = {}
        if self._tokenizer is not None:
            facts["vocabulary"] = str(sorted(self._tokenizer.loaded.get_vocab().items()))
        with suppress(LookupError, TypeError, ValueError):  # whoever wrote the file
            schema = json.loads(table.schema.metadata[b"huggingface"])
            feature = schema["info"]["features"][self.label or self.target]
            facts["classes"] = feature.get("feature", feature)["names"]  # of a list, its items
        return facts

    def _has_target_texts(self, table: Any) -> bool:
        return bool(self.text and self.target) and "string" in str(table[self.target].type)

    def _ends_texts(self, table: Any) -> bool:
        # A text that is classified is given as the tokenizer makes it.
        is_generated = self.target is None or self._has_target_texts(table)
        return self.end_token != "auto" or is_generated

    def _encoded_images(self, table: Any, rows: Tensor, augment: bool) -> EncodedImages:
        """Return the data set of some rows of a table."""
        import pyarrow as pa

        kind = table[self.image].type
        is_struct = pa.types.is_struct(kind) and {"bytes", "path"} <= {part.name for part in kind}
        if not (is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise self._error(
                f"column {self.image} holds {kind}, no encoded images (bytes of PNG or JPEG files, "
                "or Hugging Face's {bytes, path}). Type data.image=<another column>"
            )
        assert self.label is not None
        labels = as_target(self._array(table, self.label, _CLASSES))
        if labels.is_floating_point() or labels.ndim != 1:
            kind = table[self.label].type
            wanted = "Type data.label=<a column of integers from 0>"
            raise self._error(f"column {self.label} holds {kind}, no classes. {wanted}")
        crop = image_transform(self.size, augment)
        source = f"data={self.source}: column {self.image}"
        return EncodedImages(table[self.image], labels, rows, crop, source, self._facts(table))

    def _fields(self, table: Any) -> dict[str, Tensor]:
        fields = {name: as_input(self._array(table, name)) for name in self.columns or ()}
        if self.text is not None:
            rows = self._token_rows(table, self.text)
            fields |= self._packed(rows) if self.packing else self._padded(rows)
        if self._has_target_texts(table):
            fields["labels"] = self._padded(self._token_rows(table, self.target))["labels"]
        elif self.target is not None:
            fields["labels"] = as_target(self._array(table, self.target, _CLASSES))
        if "labels" not in fields:
            raise self._error("no column is the target. Type data.target=<name>")
        return fields

    def _array(self, table: Any, name: str, remedy: str = _TEXTS) -> np.ndarray:
        """Return a column of numbers, or of lists of one length, as an array [N, ...]."""
        column = table[name]
        if column.null_count:
            raise self._error(f"column {name} has {column.null_count} empty values")
        values = column.to_numpy()
        try:
            array = np.stack(values) if values.dtype == object else values
        except ValueError as error:
            raise self._error(
                f"the lists of column {name} differ in length. Pad them to one length"
            ) from error
        if array.dtype.kind not in "fiub":
            raise self._error(f"column {name} holds {column.type}, no numbers. {remedy}")
        # Arrow's own memory, a file perhaps, is not writable, of which torch warns.
        return array if array.flags.writeable else array.copy()

    def _token_rows(self, table: Any, name: Any) -> list[list[int]]:
        """Return the tokens of a column's texts."""
        texts = table[name].to_pylist()
        if any(text is None for text in texts):
            raise self._error(f"column {name} has empty values")
        if not all(isinstance(text, str) for text in texts):
            raise self._error(
                f"column {name} holds values of type {type(texts[0]).__name__}, no texts. Type "
                "data.text=<another column>, or data.columns=[<names>] for numbers"
            )
        assert self._tokenizer is not None
        length = None if self.packing else self.length
        return self._tokenizer.rows(texts, name == self.target, self._ends_texts(table), length)

    def _padded(self, rows: list[list[int]]) -> dict[str, Tensor]:
        """Return input_ids, attention_mask and labels, int64 [N, length] each."""
        ids = torch.zeros(len(rows), self.length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            tokens = row[: self.length]
            ids[i, : len(tokens)] = torch.tensor(tokens)
            mask[i, : len(tokens)] = 1
        labels = ids.masked_fill(mask == 0, batch_layout.IGNORED_LABEL)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _packed(self, rows: list[list[int]]) -> dict[str, Tensor]:
        """Return input_ids, attention_mask or position_ids, and labels, int64 [N, length] each."""
        length = self.length
        stream = torch.tensor([token for row in rows for token in row])
        count = len(stream) // length
        if not count:
            raise self._error(
                f"all texts have {len(stream)} tokens, fewer than data.length={length}"
            )
        ids = stream[: count * length].reshape(count, length)
        if not self.separate:
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        starts = torch.zeros(len(stream) + 1, dtype=torch.bool)
        starts[torch.tensor([0, *map(len, rows)]).cumsum(0)] = True
        starts = starts[: count * length].reshape(count, length)
        # A text that began in the example before is a text of its own here.
        starts[:, 0] = True
        places = torch.arange(length)
        positions = places - torch.where(starts, places, 0).cummax(1).values
        labels = ids.masked_fill(starts, batch_layout.IGNORED_LABEL)
        # transformers finds the texts by their positions only where it is given no mask.
        return {"input_ids": ids, "position_ids": positions, "labels": labels}


def table_target(source: str, load: Callable[..., Splits]) -> Callable[..., Splits]:
    """Return a data target whose keys are those of TableColumns and of a function.

    Args:
        source: name of the data config.
        load: called with the TableColumns, then with its own keys.
    """
    keys_of_columns = dict(signature(TableColumns).parameters)
    del keys_of_columns["source"]
    _, *own_keys = signature(load).parameters.values()

    @wraps(load)
    def target(*items: Any, **keywords: Any) -> Splits:
        columns = {name: keywords.pop(name) for name in keys_of_columns if name in keywords}
        return load(TableColumns(source, **columns), *items, **keywords)

    # A command's keys are compared with these.
    target.__signature__ = Signature([*own_keys, *keys_of_columns.values()])  # type: ignore[attr-defined]
    target.__annotations__ = get_type_hints(load) | get_type_hints(TableColumns)
    return target


def _load_tokenizer(path: Path, end_token: str | bool) -> _Tokenizer:
    """Return the tokenizer at a path."""
    if not path.exists():
        raise ConfigError(f"data.tokenizer={path} does not exist. Type a local folder or file.")
    loaded: Any
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if path.is_file():
            loaded = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            keys = {"local_files_only": True, "trust_remote_code": False}
            with files.read_as_data():
                loaded = AutoTokenizer.from_pretrained(path, **keys)
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer: transformers is missing. Type pip install 'precision-runner[hf]'."
        ) from error
    except Exception as error:  # tokenizers raises a bare Exception
        raise ConfigError(f"data.tokenizer={path} cannot be loaded: {error}.") from error
    if end_token is False or (end_token == "auto" and loaded.eos_token is None):
        return _Tokenizer(loaded)
    token = loaded.eos_token if end_token in (True, "auto") else end_token
    number = loaded.get_vocab().get(token)
    if number is None:
        raise ConfigError(
            f"data.end_token={str(end_token).lower()}: {path} "
            f"{'names no end token' if token is None else 'has no such token'}. Type "
            "data.end_token=<one of its tokens>, auto or false."
        )
    return _Tokenizer(loaded, (str(token), number))
