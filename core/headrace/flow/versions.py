"""Policy versions: which are live, what is in flight under each, and which may be retired.

Invariant: versions only rise, by one; a version with a group in flight or a pin is never retired, nor is the newest.
Where a policy *interrupts*, groups in flight keep no version: they go on under newer ones.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.errors import StalenessError


class Versions:
    """``revision`` changes whenever the set of versions that somebody still needs may have changed."""

    def __init__(self, newest: int, *, interrupts: bool = False) -> None:
        if newest < 0:
            raise ValueError(f"a policy version is at least 0, got {newest}")
        self.newest = newest
        self._interrupts = interrupts
        self.revision = 0
        self._live = {newest}
        self._in_flight: dict[int, int] = {}
        self._pins: dict[int, int] = {}

    @property
    def live(self) -> tuple[int, ...]:
        """Published and not retired, ascending."""
        return tuple(sorted(self._live))

    @property
    def in_flight(self) -> dict[int, int]:
        """Groups with an unfinished member, by version; a copy."""
        return dict(self._in_flight)

    @property
    def pinned(self) -> Collection[int]:
        """Versions that something outside the flow still reads."""
        return self._pins.keys()

    def is_needed(self, version: int) -> bool:
        """Whether a version may not be retired."""
        in_flight = not self._interrupts and version in self._in_flight
        return in_flight or version == self.newest or version in self._pins

    def opened(self, version: int) -> None:
        """A group of ``version``, the newest or one that is in flight, starts."""
        count = self._in_flight.get(version, 0)
        self._in_flight[version] = count + 1
        self.revision += count == 0

    def reopened(self, version: int) -> None:
        """A group that started under ``version`` in an earlier run is not complete yet."""
        self._in_flight[version] = self._in_flight.get(version, 0) + 1
        self.revision += 1

    def closed(self, version: int) -> None:
        """A group of ``version`` is complete or dropped."""
        self._in_flight[version] -= 1
        if self._in_flight[version] == 0:
            del self._in_flight[version]
            self.revision += 1

    def publish(self, version: int) -> None:
        """``version`` is now the newest."""
        if version != self.newest + 1:
            raise StalenessError(
                f"version {version} was published after version {self.newest}; versions rise by exactly one",
                fix="after a failover or resume, continue from the highest version ever published",
            )
        self.newest = version
        self._live.add(version)
        self.revision += 1

    def retirable(self) -> tuple[int, ...]:
        """Live versions that nobody needs, ascending."""
        return tuple(v for v in self.live if not self.is_needed(v))

    def retire(self, version: int) -> None:
        """``version`` is gone from the weight store."""
        if version not in self._live or self.is_needed(version):
            raise ValueError(f"version {version} is not retirable; retirable: {self.retirable()}")
        self._live.remove(version)
        self.revision += 1

    def pin(self, version: int) -> None:
        """Keep ``version`` live until as many :meth:`unpin`."""
        if version not in self._live:
            raise ValueError(f"version {version} is not live; live: {self.live}")
        self._pins[version] = self._pins.get(version, 0) + 1
        self.revision += 1

    def unpin(self, version: int) -> None:
        """Undo one :meth:`pin`."""
        if version not in self._pins:
            raise ValueError(f"version {version} is not pinned; pinned: {sorted(self._pins)}")
        self._pins[version] -= 1
        if self._pins[version] == 0:
            del self._pins[version]
            self.revision += 1
