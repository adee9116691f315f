"""Compare the arguments of a config node with the signature of its target."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, get_type_hints

from runner.config.annotations import BUILT, annotation_words, fits_type, typed_value
from runner.config.instantiation import is_target_node

# Keywords that transformers' configs take without a field, a property or an alias of that name.
_TRANSFORMERS_KEYWORDS = (
    *("attn_implementation", "experts_implementation", "per_layer_config"),
    *("rope_theta", "partial_rotary_factor"),
)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Arguments:
    """What a config node passes to its target.

    Attributes:
        key: dotted key of the node.
        path: of the target.
        items: those of `_args_`.
        keywords: by name.
        leading: number of arguments that the runner passes first.
        is_partial: True if the target is called later, with more arguments.
    """

    key: str
    path: str
    items: Sequence[Any]
    keywords: Mapping[str, Any]
    leading: int
    is_partial: bool

    def problems(self, target: Any) -> Iterator[str]:
        """Yield a message for each argument that the target does not take, lacks or cannot use."""
        if not callable(target):
            kind = type(target).__name__
            yield f"{self.key}._target_={self.path} is a {kind}, not a class or function."
            return
        try:
            parameters = list(signature(target).parameters.values())
        except (TypeError, ValueError):
            # A builtin without a signature: its own call reports wrong arguments.
            return
        rest = self._free_parameters(parameters)
        by_position = [p for p in rest if p.kind in _BY_POSITION]
        filled = dict(zip((p.name for p in by_position), self.items, strict=False))
        if len(self.items) > len(by_position) and not _takes_any(parameters, "*"):
            names = ", ".join(parameter.name for parameter in by_position)
            yield (
                f"{self.key}._args_={list(self.items)}: {self.path} takes no more than "
                f"{len(by_position)} by position: {names or 'none'}."
            )
        yield from self._keyword_problems(target, rest, filled)
        yield from self._type_problems(target, rest, filled)

    def _free_parameters(self, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
        """Return the parameters that the runner does not fill; those that it does come first."""
        # ChainedScheduler takes the optimizer behind its schedules, by its name.
        if self.key.startswith("scheduler") and "optimizer" in [p.name for p in parameters[1:]]:
            return [p for p in parameters if p.name != "optimizer"]
        return parameters[self.leading :]

    def _keyword_problems(
        self, target: Any, parameters: Sequence[Parameter], filled: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message for each keyword too many and each that is missing.

        Args:
            target: that is called.
            parameters: of the target, without those that the runner fills.
            filled: names that `_args_` fills, with their values.
        """
        defaults = {p.name: p.default for p in parameters if p.kind in _BY_KEYWORD}
        takes_any_keyword = _takes_any(parameters, "**")
        for name, value in self.keywords.items():
            if name in filled:
                yield f"{self.key}.{name}={value}: _args_ gives {name}, too. Leave one of them out."
            elif not (name in defaults or takes_any_keyword or _is_config_keyword(target, name)):
                leading = [*signature(target).parameters][: self.leading]
                if name in leading:
                    yield self._leading_keyword(name, value)
                else:
                    yield self._unknown_keyword(name, value, list(defaults))
        given = {*self.keywords, *filled}
        for name, default in defaults.items():
            if default is Parameter.empty and name not in given and not self.is_partial:
                yield f"{self.key}.{name} is needed by {self.path}. {self._addition(name)}"

    def _leading_keyword(self, name: str, value: Any) -> str:
        """Return the message for a keyword that the runner passes itself."""
        text = f"{self.key}.{name}={value}: the runner passes {name} of {self.path} itself"
        if self.key != "data.sampler":
            return f"{text}. Leave it out."
        return (
            f"{text}, the training set. Name a function of your own that takes the training set "
            "and returns the sampler (docs/own-code.md)."
        )

    def _unknown_keyword(self, name: str, value: Any, known: Sequence[str]) -> str:
        """Return the message for a keyword that the target does not take."""
        text = f"{self.key}.{name}={value}: {self.path} takes no {name}."
        # In a short list the similar name is seen without help.
        similar = get_close_matches(name, known, n=1, cutoff=0.8) if len(known) > 10 else []
        hint = f" Write {similar[0]} in place of {name}." if similar else ""
        return f"{text} It takes: {', '.join(known)}.{hint}"

    def _addition(self, name: str) -> str:
        """Return how to add a keyword to the node."""
        # Hydra's overrides reach into mappings, not into lists.
        if "[" in self.key:
            return f"Add {name}: <value> to that item in the yaml."
        return f"Type +{self.key}.{name}=<value>."

    def _type_problems(
        self, target: Any, parameters: Sequence[Parameter], filled: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message for each value that does not fit the target's annotation.

        Args:
            target: that is called.
            parameters: of the target, without those that the runner fills.
            filled: names that `_args_` fills, with their values.
        """
        hints = _type_hints(target)
        defaults = {parameter.name: parameter.default for parameter in parameters}
        for name, value in {**filled, **self.keywords}.items():
            # Users write `width: int = None`: a null that is the default fits whatever is
            # annotated. The runner puts the run's length in place of a scheduler's null.
            is_default = value is None and defaults.get(name) is None
            is_length = value is None and self.key.startswith("scheduler")
            if name not in hints or is_default or is_length:
                continue
            if not fits_type(_with_built(value), hints[name]):
                is_text = " is text" if isinstance(value, str) else " does not fit"
                allowed = annotation_words(hints[name])
                yield f"{self.key}.{name}={typed_value(value)}{is_text}. Allowed: {allowed}."


def _takes_any(parameters: Sequence[Parameter], stars: str) -> bool:
    """Return whether a target takes any number of items (`*`) or keywords (`**`)."""
    kind = {"*": Parameter.VAR_POSITIONAL, "**": Parameter.VAR_KEYWORD}[stars]
    return any(parameter.kind is kind for parameter in parameters)


def _is_config_keyword(target: Any, name: str) -> bool:
    """Return whether a config class of transformers takes a keyword that its signature lacks."""
    # These classes keep any other keyword as an attribute that no model reads: a typing error
    # would train another model than the one that was asked for.
    aliases = getattr(target, "attribute_map", None)
    if not isinstance(aliases, Mapping):
        return False
    return name in aliases or name in _TRANSFORMERS_KEYWORDS or hasattr(target, name)


def _type_hints(target: Any) -> dict[str, Any]:
    """Return the annotations of a target's parameters, as far as they can be evaluated."""
    called = target.__init__ if isinstance(target, type) else target
    try:
        return get_type_hints(called)
    except Exception:
        # One annotation that cannot be evaluated, as a name imported under TYPE_CHECKING, makes
        # get_type_hints raise for all of them. Those that are no text need no evaluation; values
        # of the others are judged by the target's own call.
        hints = getattr(called, "__annotations__", {})
        return {name: hint for name, hint in hints.items() if not isinstance(hint, str)}


def _with_built(value: Any) -> Any:
    """Return a value with BUILT in place of each node that is built before it is passed."""
    if is_target_node(value):
        return BUILT
    if isinstance(value, Mapping):
        return {name: _with_built(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_built(item) for item in value]
    return value
