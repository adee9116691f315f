"""Give a run objects of one's own in place of config nodes.

An object that a call of the Python API gets becomes an option of its config group, named by its
class, so that labels, records and sweeps treat it as any other option. The option's target is a
function of this module, which finds the object by its role in the call that is running.
"""

import copy
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isclass
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runner.config.python_objects import KEYS, current_objects
from runner.core import ConfigError, RunSpec, fmt, layout, refuse
from runner.training.callbacks.user_callbacks import class_problems

_GROUPS = ("model", "data", "optimizer")
"""Roles that are config groups, in place of whose option the object stands."""
_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_DATA_KEYS = ("data.meta", "data.shuffle", "data.sampler", "data.collate")
"""Keys of the data group that fit data given as objects."""
_CARRIERS: Any = (Callable, CellType, ReferenceType, tuple, list, dict)
"""Types that copy.deepcopy leaves as they are, or may, and that lead to further objects."""
_BY_IDENTITY = (None, object.__hash__, torch.Tensor.__hash__)


def _find(role: str, name: str) -> Any:
    """Return the object of a role.

    Raises:
        ConfigError: the call that is running was given none.
    """
    found = current_objects().by_role.get(role)
    if found is None:
        raise ConfigError(
            f"{role}={name} is an object that a Python program gave to the run, and no file holds "
            f"it. In Python, give it again: runner.run([...], {role}=<the object>)."
        )
    return found


def given_model(name: str) -> nn.Module:
    """Return a copy of the model that was given, or what the function that was given returns."""
    found = _find("model", name)
    if not isinstance(found, nn.Module):
        built = found()
        if not isinstance(built, nn.Module):
            raise ConfigError(
                f"model={name} returned {_kind(built)}. Give a torch.nn.Module, or a function that "
                "returns one."
            )
        return built
    # Conversion and training change a model in place, and every run of a comparison starts from
    # the same weights.
    given = current_objects().by_role
    others = [given.get("loss"), given.get("optimizer"), *given.get("callbacks", ())]
    remedy = "a function that builds it, as in model=lambda: Net()"
    model = _copy_of("model", name, found, remedy, others)
    # mode=plan builds models without memory.
    is_planned = torch.get_default_device().type == "meta"
    return model.to("meta") if is_planned else model


def _copy_of(role: str, name: str, found: Any, remedy: str, others: Sequence[Any] = ()) -> Any:
    """Return a copy of an object, which a run may change; for `others` see _shared_part.

    What a function or another object refers to, too, and holds no weights (a config, the features
    that a hook keeps) stays one object in the copy.

    Raises:
        ConfigError: it cannot be copied, or a part of its copy would still refer to the object.
    """
    shared: list[Any] = []
    try:
        while True:
            memo = {id(part): part for part in shared}
            made = copy.deepcopy(found, memo)
            reference = _shared_part(memo, others)
            if reference is None or _holds_weights(reference[1]):
                break
            shared.append(reference[1])
    except Exception as error:  # of whatever type: objects copy themselves as they like
        reason = " ".join(str(error).split())
        raise ConfigError(f"{role}={name} cannot be copied: {reason}. Give {remedy}.") from error
    if reference:
        owner, part = reference
        reason = f"{owner} refers to the {type(part).__name__} that was given"
    else:
        reason = _copy_parameter_attributes(found, memo)
    if reason:
        raise ConfigError(f"{role}={name} cannot be copied: {reason}. Give {remedy}.")
    return made


def _holds_weights(part: Any) -> bool:
    """Return whether an object is, or leads to, a module or a tensor."""
    memo: dict[int, Any] = {}
    copy.deepcopy(part, memo)
    return any(isinstance(made, nn.Module | torch.Tensor) for made in memo.values())


def _copy_parameter_attributes(found: Any, memo: dict[int, Any]) -> str:
    """Copy the attributes of a module's parameters, which torch's copies lack; return a reason
    where a parameter has hooks, which cannot be copied."""
    for name, parameter in found.named_parameters() if isinstance(found, nn.Module) else ():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"a hook on the gradient of {name} belongs to the parameter that was given"
        vars(memo.get(id(parameter), parameter)).update(copy.deepcopy(vars(parameter), memo))
    return ""


def _shared_part(memo: Mapping[int, Any], others: Sequence[Any]) -> tuple[str, Any] | None:
    """Return what in the copies that copy.deepcopy has made refers to an object that was copied,
    as functions do, which it does not copy, and that object; None without any.

    Args:
        memo: of copy.deepcopy: copies by the ids of the originals.
        others: objects that were given beside the copied one, which may refer to it, too.
    """
    # The memo keeps the originals alive in one more entry.
    copies = [made for key, made in memo.items() if key != id(memo)]
    known = {*map(id, copies)}
    pending: list[tuple[Any, Any]] = [(None, made) for made in copies]
    pending += [(other, other) for other in others]
    while pending:
        owner, value = pending.pop()
        for part in _referents(value, memo):
            is_copied = memo.get(id(part), part) is not part
            # An object that is hashed by its value (a device, a path) does not change.
            if owner is not None and is_copied and type(part).__hash__ in _BY_IDENTITY:
                return getattr(owner, "__qualname__", type(owner).__name__), part
            if id(part) not in known and isinstance(part, _CARRIERS) and not isclass(part):
                known.add(id(part))
                pending.append((part if isinstance(part, FunctionType) else owner or part, part))
    return None


def _referents(value: Any, memo: Mapping[int, Any]) -> Iterable[Any]:
    """Return the objects that a value refers to; of the globals of a function those that it names
    and that were copied, or are methods."""
    if isinstance(value, ReferenceType):
        return [value()]
    if not isinstance(value, FunctionType):
        return gc.get_referents(value)
    named = [value.__globals__.get(name) for name in value.__code__.co_names]
    named = [part for part in named if id(part) in memo or isinstance(part, MethodType)]
    return [*named, value.__closure__, value.__defaults__, value.__kwdefaults__]


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def given_data(name: str) -> Any:
    """Return the data sets that were given, or what the function that was given returns."""
    found = _find("data", name)
    return found() if callable(found) else found


def given_optimizer(params: Any, name: str) -> torch.optim.Optimizer:
    """Return what the function that was given returns for the parameters."""
    return _find("optimizer", name)(params)


def given_loss(name: str) -> Any:
    """Return a copy of the loss that was given, or an object of the class that was given."""
    found = _find("loss", name)
    # A module may count in its buffers.
    return found() if isclass(found) else _copy_of("loss", name, found, "its class")


def given_callback(name: str) -> Any:
    """Return a callback that was given, in a sweep a copy of it, or an object of the class that
    was given."""
    callbacks = _find("callbacks", name)
    found = dict(zip(callback_names(callbacks), callbacks, strict=True)).get(name)
    if isclass(found):
        return found()
    # After one run, its caller reads what the callback has gathered. In a sweep, what it has
    # gathered in one job would act on the next.
    is_copied = current_objects().has_several_runs
    return _copy_of("callbacks", name, found, "its class") if is_copied else found


def given_collate(name: str) -> Any:
    """Return the collator that was given."""
    return _find("collate", name)


def given_roles(**objects: Any) -> dict[str, Any]:
    """Return the objects that were given, by their roles."""
    return {role: value for role, value in objects.items() if value is not None}


def check_objects(objects: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Check objects before anything is composed.

    Args:
        objects: by role.
        overrides: what was typed beside them.

    Raises:
        ConfigError: an object cannot take its role, or its role was typed, too.
    """
    problems = [*_role_problems(objects)]
    for text in overrides:
        key = fmt.override_key(text)
        roles = [role for role in objects if f"{key}.".startswith(f"{KEYS[role]}.")]
        # The role of the object that the typed key would change.
        clashing = [role for role in roles if role != "data" or not key.startswith(_DATA_KEYS)]
        if clashing:
            problems.append(
                f"{text} was typed, and {clashing[0]}= is an object, which is taken as it is. "
                "Leave one of them out."
            )
    refuse(problems)


def _role_problems(objects: Mapping[str, Any]) -> Iterator[str]:
    for role, usage in _USAGE.items():
        if role in objects and not callable(objects[role]):
            yield f"{role}= is {_kind(objects[role])}, which cannot be called. {usage}"
    callbacks = objects.get("callbacks", ())
    if not isinstance(callbacks, tuple | list):
        yield f"callbacks= is {_kind(callbacks)}. Give a list of callbacks."
        callbacks = ()
    for callback in callbacks:
        kind = callback if isclass(callback) else type(callback)
        yield from class_problems(f"callbacks=[{object_name(callback)}]", kind)
    data = objects.get("data", ())
    if isinstance(data, tuple | list):
        loader = next((part for part in data if isinstance(part, DataLoader)), None)
        if loader is not None:
            is_default = loader.collate_fn is torch.utils.data.default_collate
            collate_word = "" if is_default else ", collate=train.collate_fn"
            size = loader.batch_size
            size_word = "" if size is None else f'"train.batch_size={size}", '
            yield (
                "data= holds a DataLoader. The runner draws the batches itself, from the seed, so "
                "that every precision sees the same ones. Give the data sets: "
                f"runner.run([{size_word}...], data=(train.dataset, val.dataset){collate_word})."
            )
    elif not callable(data):
        yield (
            f"data= is {_kind(data)}. Give a tuple of data sets, (train, val) or (train, "
            "val, test), or a function that returns one."
        )


_USAGE = {
    "model": "Give a torch.nn.Module, or a function that returns one.",
    "optimizer": (
        "Give a function of the parameters, as in functools.partial(torch.optim.SGD, lr=0.1)."
    ),
    "loss": "Give a function of (output, target).",
    "collate": "Give a function of a list of examples.",
}


@contextmanager
def object_options(objects: Mapping[str, Any], config_dir: Path | None) -> Iterator[list[str]]:
    """Make the objects options of their groups within a context; yield the overrides for them.

    Args:
        objects: by role.
        config_dir: folder of the user's own configs.
    """
    texts = []
    earlier = []
    repository: Any = ConfigStore.instance().repo
    folders = [layout.BUILT_IN_CONFIGS]
    if config_dir is not None:
        folders.append(config_dir)
    for role, value in objects.items():
        node = _node(role, value)
        if role not in _GROUPS:
            if role != "callbacks":
                # Hydra merges mappings: the object would get keywords of the node it replaces.
                texts.append(f"++{KEYS[role]}=null")
            # Hydra's grammar has no quotes around keys, and these texts are names.
            text = str(node).replace("'", "")
            texts.append(f"++{KEYS[role]}={text}")
            continue
        name = node["name"]
        if role == "data":
            # A model of a config reads its sizes from it.
            node["meta"] = {} if "model" in objects else _meta(value)
        # Hydra would take a yaml of this name.
        is_taken = any((folder / role / f"{name}.yaml").exists() for folder in folders)
        option = f"{name}_object" if is_taken else name
        file = f"{option}.yaml"
        earlier.append((role, file, repository.get(role, {}).get(file)))
        ConfigStore.instance().store(option, node, group=role, provider="runner")
        texts.append(f"{role}={option}")
    try:
        yield texts
    finally:
        # Messages of later calls list the options that exist.
        for group, file, node in earlier:
            if node is None:
                del repository[group][file]
            else:  # of a call within which this one was made
                repository[group][file] = node


def _node(role: str, value: Any) -> dict[str, Any]:
    """Return the config node that stands for an object."""
    if role == "callbacks":
        names = callback_names(value)
        target = f"{__name__}.given_callback"
        return {name: {"_target_": target, "name": name} for name in names}
    return {"_target_": f"{__name__}.given_{role}", "name": object_name(value)}


def callback_names(callbacks: Sequence[Any]) -> list[str]:
    """Return a name for each callback, which begins the names of its metrics: that of its class in
    snake_case, with a number from the second one of a class on."""
    names: list[str] = []
    for callback in callbacks:
        name = _WORD_STARTS.sub("_", object_name(callback)).lower()
        count = sum(re.fullmatch(rf"{name}(_\d+)?", known) is not None for known in names)
        names.append(f"{name}_{count + 1}" if count else name)
    return names


def object_name(value: Any) -> str:
    """Return the name of an object in labels and records: that of its class or function."""
    if isinstance(value, tuple | list):
        return object_name(value[0]) if value else "data"
    inner = getattr(value, "func", value)  # functools.partial
    name = getattr(inner, "__name__", type(inner).__name__)
    return re.sub(r"\W+", "_", name).strip("_") or "object"


def _meta(data: Any) -> dict[str, Any]:
    """Return what data.meta says of data sets: the input's shape, and the number of classes.

    Returns:
        Empty for what cannot be known without reading all examples.
    """
    train = data[0] if isinstance(data, tuple | list) and data else None
    meta: dict[str, Any] = {}
    if not hasattr(train, "__getitem__") or not hasattr(train, "__len__") or not len(train):  # type: ignore[arg-type]
        return meta
    example = train[0]  # type: ignore[index]
    is_pair = isinstance(example, tuple | list) and len(example) == 2
    if is_pair and isinstance(example[0], torch.Tensor):
        meta["input"] = [*example[0].shape]
    classes = getattr(train, "classes", None)
    if classes:
        meta["classes"] = len(classes)
    elif isinstance(train, TensorDataset) and not train.tensors[-1].is_floating_point():
        meta["classes"] = int(train.tensors[-1].max()) + 1
    return meta


def with_objects(spec: RunSpec, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec that name objects in place of what it names itself."""
    fields: dict[str, Any] = {}
    for role, value in objects.items():
        node = _node(role, value)
        if "." not in KEYS[role]:
            if role == "data":
                # Its meta is that of the data that the objects replace.
                kept = {key.partition(".")[2] for key in _DATA_KEYS} - {"meta"}
                node |= {key: value for key, value in spec.data.items() if key in kept}
            fields[role] = {**node, **fields.get(role, {})}
            continue
        group, key = KEYS[role].split(".")
        fields[group] = {**fields.get(group, getattr(spec, group)), key: node}
    return fields
