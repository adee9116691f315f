"""Describe a run's data sets by a digest and a schema, so that runs on the same data can be found,
and by the facts that a model learns of its data, which a checkpoint holds.

The descriptions become MLflow's dataset inputs of a run. They must be the same in every process and
cheap for large data sets, so the digest covers a sample of the examples.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import Subset

from runner.core import fmt, random_streams, targets
from runner.data.collate import input_and_target
from runner.data.loader import restored_random_state
from runner.data.splits import RunData, RunSets, Splits
from runner.data.stream_loader import first_examples, is_stream
from runner.data.value_hash import hash_value, value_digest

SAMPLE_COUNT = 64  # examples that a digest covers at most
DIGEST_BYTES = 8
_MLFLOW_CONTEXTS = {"train": "training", "val": "validation", "test": "testing"}


def describe_data(
    name: str, node: Mapping[str, Any], data: Splits | RunData
) -> list[dict[str, Any]]:
    """Return the descriptions of a run's data sets, as MLflow's inputs of a run.

    The digest is over the number of examples and up to 64 of them, evenly spaced, so it is the
    same in every process; on another machine where the data set computes the same bits there.
    Of a stream it is over the kind of the stream and its first 64 examples, which the profile says.
    For a folder of images it is over the files, and an augmentation does not change it; for another
    data set that draws its samples at random it is over what it draws from one seed. The global
    random states are restored. Nothing here raises: what cannot be read is left out.

    Args:
        name: of the data config.
        node: its target and keywords.
        data: the data sets.

    Returns:
        For each data set name, context, digest (16 hex digits), source_type (local, or code),
        source, schema and profile: strings, JSON in the last three; schema is None where a sample
        is neither a tensor or number nor a flat nest of them.
    """
    kind, source = _source(node)
    sets = data.labelled if isinstance(data, RunSets) else data._asdict()
    descriptions = []
    for label, dataset in sets.items():
        use, slash, set_name = label.partition("/")
        facts = _stream_facts if is_stream(dataset) else _dataset_facts
        descriptions.append(
            {
                "name": name,
                "context": f"{_MLFLOW_CONTEXTS[use]}{slash}{set_name}",
                "source_type": kind,
                "source": json.dumps(source, default=str),
                **facts(dataset, node),
            }
        )
    return descriptions


def learned_facts(dataset: Any) -> dict[str, Any]:
    """Return what a model learns of its data beside the examples, by name.

    A checkpoint holds it, and data that differ in it mean other things by the same numbers.

    Args:
        dataset: its `learned_facts`, a mapping, is taken, and its `classes`, the names in the order
            of the numbers, as torchvision lists them.

    Returns:
        Names of classes, and digests of any other fact.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    facts = {**getattr(dataset, "learned_facts", {})}
    names = facts.pop("classes", getattr(dataset, "classes", None))
    learned: dict[str, Any] = {name: value_digest(fact).hex() for name, fact in facts.items()}
    # A target_transform gives other numbers than the places in the list, and classes that are
    # numbers have no names.
    has_names = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if has_names and getattr(dataset, "target_transform", None) is None:
        learned["classes"] = [*names]
    return learned


def fact_problems(facts: Mapping[str, Any], owner: str, sets: Mapping[str, Any]) -> Iterator[str]:
    """Yield in which facts data sets differ from those that a model has learned.

    Args:
        facts: as learned_facts returns them.
        owner: that has the facts, in words.
        sets: the data sets by their labels.
    """
    for label, dataset in sets.items():
        for name, value in learned_facts(dataset).items():
            known = facts.get(name, value)
            # The last classes may be missing on one side: the others have their numbers.
            is_alike = known == value
            if name == "classes":
                is_alike = all(one == other for one, other in zip(known, value, strict=False))
            if not is_alike:
                different = sorted({*value} ^ {*map(str, known)}) if name == "classes" else ()
                detail = f": {fmt.first_names(different)} on one side only" if different else ""
                yield (
                    f"data: the {name} of {owner} and of the {label} set differ{detail}. Give both "
                    "the same: class names in one order, or the tokenizer of the training."
                )


def _source(node: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return ("local", the folder or file that the data are read from) or ("code", the call)."""
    for key in ("path", "root"):
        location = node.get(key)
        if isinstance(location, str) and Path(location).exists():
            return "local", {"uri": str(Path(location).absolute())}
    call = {"target": node.get("_target_"), **targets.target_arguments(node)}
    return "code", {"tags": {key: str(value) for key, value in call.items()}}


def _dataset_facts(dataset: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digest, schema and profile of one data set."""
    with restored_random_state():
        random_streams.seed_host(0)
        try:
            digest = _digest(dataset)
        except Exception:  # a user's data set with one sample that cannot be read, for example
            digest = blake2b(_config_bytes(node), digest_size=DIGEST_BYTES).hexdigest()
        first = schema = None
        with suppress(Exception):
            sample = dataset[0]
            schema = _schema(sample)
            first = sample
    profile = {"num_rows": len(dataset), "classes": _class_count(dataset, first, node)}
    return {
        "digest": digest,
        "schema": schema,
        "profile": json.dumps({key: value for key, value in profile.items() if value is not None}),
    }


def _stream_facts(dataset: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digest, schema and profile of a stream, of which the first examples are read."""
    kind = type(dataset).__name__
    content = blake2b(kind.encode(), digest_size=DIGEST_BYTES)
    examples: list[Any] = []
    schema = None
    # A stream that fails here fails in the training, too, with a message.
    with restored_random_state(), suppress(Exception):
        random_streams.seed_host(0)
        examples = first_examples(dataset, SAMPLE_COUNT)
        for example in examples:
            hash_value(content, example)
        schema = _schema(examples[0])
    if not examples:
        content.update(_config_bytes(node))
    profile = {"stream": kind, "digest_of": f"the first {len(examples)} examples"}
    return {"digest": content.hexdigest(), "schema": schema, "profile": json.dumps(profile)}


def _config_bytes(node: Mapping[str, Any]) -> bytes:
    return repr(sorted((str(key), str(value)) for key, value in node.items())).encode()


def _digest(dataset: Any) -> str:
    """Return the hash of a data set's size and of SAMPLE_COUNT evenly spaced examples."""
    count = len(dataset)
    content = blake2b(str(count).encode(), digest_size=DIGEST_BYTES)
    sampled = min(count, SAMPLE_COUNT)
    for i in range(sampled):
        index = i * (count - 1) // max(sampled - 1, 1)
        base, base_index = _unwrap_subset(dataset, index)
        files = getattr(base, "samples", None)
        # Files are hashed as they are stored: decoding and augmenting them may differ by run.
        if isinstance(files, list) and _is_file_sample(files[base_index], base):
            path, target = files[base_index]
            content.update(f"{Path(path).relative_to(base.root)} {target} ".encode())
            content.update(Path(path).read_bytes())
        else:
            hash_value(content, dataset[index])
    return content.hexdigest()


def _unwrap_subset(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the data set under any number of Subsets, and the index of an example in it."""
    while type(dataset) is Subset:
        index = int(dataset.indices[index])
        dataset = dataset.dataset
    return dataset, index


def _is_file_sample(sample: Any, dataset: Any) -> bool:
    """Return whether a sample is torchvision's pair of a file below the data set's root and a
    class."""
    pair = isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], str)
    return pair and hasattr(dataset, "root") and Path(sample[0]).is_file()


def _schema(sample: Any) -> str | None:
    """Return MLflow's tensor schema of samples (input, target) as JSON, -1 for the rows."""
    features, labels = (_tensor_specs(part) for part in sample)
    if features is None or labels is None:
        return None
    parts = {"features": json.dumps(features), "targets": json.dumps(labels)}
    return json.dumps({"mlflow_tensorspec": parts})


def _tensor_specs(value: Any) -> list[dict[str, Any]] | None:
    """Return the specification of a tensor, or those of a flat nest by name; None for others."""
    specs = []
    for path, leaf in tree_flatten_with_path(value)[0]:
        array = leaf if isinstance(leaf, Tensor | np.ndarray | np.generic) else np.asarray(leaf)
        dtype = str(array.dtype).removeprefix("torch.")
        # MLflow's schema has neither nested names nor dtypes that numpy lacks (bfloat16).
        if len(path) > 1 or not hasattr(np, dtype):
            return None
        spec: dict[str, Any] = {"type": "tensor"}
        if path:
            spec["name"] = str(getattr(path[0], "key", getattr(path[0], "idx", path[0])))
        spec["tensor-spec"] = {"dtype": dtype, "shape": [-1, *array.shape]}
        specs.append(spec)
    return specs or None


def _class_count(dataset: Any, first: Any, node: Mapping[str, Any]) -> int | None:
    """Return the number of classes; None where the targets are not class numbers.

    Args:
        dataset: whose `classes`, as torchvision lists them, are counted.
        first: example, or None where it cannot be read.
        node: of the data config, whose meta.classes is taken for integer targets.
    """
    names = learned_facts(dataset).get("classes")
    if names:
        return len(names)
    _, target = input_and_target(first)
    is_integer = isinstance(target, int)
    if isinstance(target, Tensor):
        is_integer = not target.is_floating_point() and not target.is_complex()
    return (node.get("meta") or {}).get("classes") if is_integer else None
