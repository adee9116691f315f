"""Watch the calls of one method of a foreign object, where a library has no hook for them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

Around = Callable[..., Any]
"""Called with the method and the call's arguments in place of the method; returns its result."""


def watch_method(owner: object, name: str, around: Around) -> Callable[[], None]:
    """Have each call of an object's method pass through a function; return what ends that.

    Only this object is changed, not its class.

    Args:
        owner: the object.
        name: of the method.
        around: takes the method and the arguments of the call, and returns the call's result.
    """
    method = getattr(owner, name)
    attribute = vars(owner).get(name)

    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    def end() -> None:
        # Another library may have replaced the method since; its function then stays.
        if vars(owner).get(name) is not watched:
            return
        if attribute is None:
            delattr(owner, name)
        else:
            setattr(owner, name, attribute)

    setattr(owner, name, watched)
    return end
