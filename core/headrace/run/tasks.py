"""Which tasks a run is about, as far as a checkpoint must know: a stream's position means nothing in another stream."""

from __future__ import annotations

import hashlib

import msgspec

from headrace.contract import Environment, Split
from headrace.errors import RunError

LOOKED_AT = 256
"""Tasks per split, evenly spaced or the first of an endless stream: some are costly to make."""

SPLITS: tuple[Split, ...] = ("train", "evaluation")


class TasksIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Equal for equal streams of tasks."""

    sizes: dict[Split, int | None]
    """None: endless."""
    digest: str
    """Of some of the tasks, id and data."""


def identify(environment: Environment) -> TasksIdentity:
    """The tasks of a started environment."""
    digest = hashlib.blake2b(digest_size=16)
    sizes = {split: environment.size(split) for split in SPLITS}
    for split, size in sizes.items():
        for index in range(LOOKED_AT) if size is None else range(0, size, -(-size // LOOKED_AT) or 1):
            task = environment.task(index, split=split)
            digest.update(msgspec.msgpack.encode([split, index, task.id, task.data]))
    return TasksIdentity(sizes=sizes, digest=digest.hexdigest())


def require_same(began: TasksIdentity, found: TasksIdentity) -> None:
    """RunError unless a run that ``began`` with its tasks finds the same: it would skip some and repeat others."""
    if began == found:
        return
    changed = [
        f"{split} had {_count(size)} and has {_count(found.sizes.get(split))}"
        for split, size in began.sizes.items()
        if size != found.sizes.get(split)
    ]
    raise RunError(
        "the environment's tasks are not those that the run began with: "
        + (", ".join(changed) or "as many as before, and some of them differ"),
        origin="[environment]",
        fix="put the data back as it was, or start the job anew with the other data",
    )


def _count(size: int | None) -> str:
    return "an endless stream" if size is None else f"{size} tasks"
