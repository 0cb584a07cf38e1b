"""Errors across the wire: a HeadraceError arrives as the same class, with message, origin and fix."""

from __future__ import annotations

from headrace import errors
from headrace.errors import HeadraceError, RunError
from headrace.wire.messages import Failure

_CLASSES: dict[str, type[HeadraceError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HeadraceError)
}


def to_failure(call: int, error: HeadraceError) -> Failure:
    """A subclass that headrace.errors does not know travels as its nearest base there."""
    kind = next(base.__name__ for base in type(error).__mro__ if _CLASSES.get(base.__name__) is base)
    return Failure(call, kind, error.message, error.origin, error.fix)


def unexpected(method: str, error: Exception, *, log: str = "") -> RunError:
    """What the caller sees of an exception that is not a HeadraceError. ``log``: the file that has its traceback."""
    return RunError(
        f"{method} raised {type(error).__name__}: {error}",
        origin=log,
        fix="read the traceback in this log" if log else "the node's log has the traceback",
    )


def from_failure(failure: Failure) -> HeadraceError:
    """The error to raise at the caller."""
    return _CLASSES.get(failure.kind, RunError)(failure.message, origin=failure.origin, fix=failure.fix)
