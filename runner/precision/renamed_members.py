"""Keep precision classes working that users wrote against the member names of version 0.1."""

from collections.abc import Mapping

RENAMED_MEMBERS: Mapping[str, str] = {
    "building": "init_context",
    "computes": "compute_format",
    "evaluating": "eval_context",
    "stores": "storage_format",
    "unrepeatable": "no_recompute_reason",
    "whole": "unshardable_reason",
}
"""Old name to new name of a member of runner.precision.contract.Precision."""

_OTHER_NAME = {**RENAMED_MEMBERS, **{new: old for old, new in RENAMED_MEMBERS.items()}}


def other_name(member: str) -> str:
    """Return the second name of a renamed member, old or new; empty for any other member."""
    return _OTHER_NAME.get(member, "")


def alias_members(cls: type) -> None:
    """Give each renamed member of a class its second name, too.

    The runner calls the new name, and a user's class may define the old one. The reverse holds for
    code that calls the old one, such as `super().stores` in a user's class.

    Args:
        cls: changed in place. Of a member that it defines under both names, the new one is used. A
            member that is set after the class was created has one name only.
    """
    for old, new in RENAMED_MEMBERS.items():
        # The first class in the order of inheritance that has either name: a user's class may take
        # a member from a class that is not a Precision.
        for owner in cls.__mro__:
            members = vars(owner)
            if old in members or new in members:
                member = members[new] if new in members else members[old]
                setattr(cls, old, member)
                setattr(cls, new, member)
                break
