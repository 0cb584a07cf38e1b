"""The half of the façade that is about instances: which versions are live, who serves them, what is played where."""

from __future__ import annotations

from collections.abc import Callable, Collection

from headrace.errors import StalenessError
from headrace.flow.fleet import Fleet
from headrace.flow.interrupted import InterruptedFleet
from headrace.flow.rebalancing import Rebalancing
from headrace.flow.records import Move, Switch
from headrace.flow.switching import Switching
from headrace.flow.versions import Versions


class Serving:
    """See :class:`headrace.flow.Flow`, which adds groups, rows and batches. ``top_up``: how many trajectories may start
    now. ``interrupts``: of the policy."""

    def __init__(
        self,
        *,
        version: int,
        lookahead: float,
        kv_threshold: float,
        lockstep: bool,
        interrupts: bool,
        top_up: Callable[[], int],
    ) -> None:
        self._versions = Versions(version, interrupts=interrupts)
        self._fleet = (InterruptedFleet if interrupts else Fleet)(lookahead=lookahead)
        self._switching = Switching(self._fleet, self._versions)
        self._rebalancing = Rebalancing(self._fleet, self._versions, top_up=top_up, kv_threshold=kv_threshold)
        self._may_move = not (lockstep or interrupts)

    # ------------------------------------------------------------ instances

    def join(
        self, instance: str, *, slots: int, live_versions: int, versions: Collection[int], migrates: bool = False
    ) -> None:
        """An instance is there. ``migrates``: it can hand over, and take, the state of a request, KV cache and sampler.
        ValueError when its name is in use: a restarted one must :meth:`leave` first."""
        for version in versions:
            self._check_published(version, f"instance {instance!r}")
        self._fleet.join(instance, slots=slots, live_versions=live_versions, versions=versions, migrates=migrates)

    def leave(self, instance: str) -> tuple[int, ...]:
        """An instance is gone. Returns its unfinished trajectories, now :meth:`unplaced`."""
        return self._fleet.leave(instance)

    def drain(self, instance: str) -> None:
        """An instance is to leave: it gets no new groups and no versions, finishes or hands over what it has, and is
        :meth:`drained` then. In lockstep it still gets its share of the cohort that has begun."""
        self._fleet.drain(instance)

    def drained(self) -> tuple[str, ...]:
        """Draining instances that may :meth:`leave`, by name: nothing is lost by it, and nobody reads from them."""
        return tuple(self._fleet.drained(self._versions.pinned))

    def committed(self, instance: str, version: int) -> tuple[int, ...]:
        """An instance now serves ``version``; one with a single live version has dropped the other by that. Returns
        the trajectories that this left without their version, now :meth:`unplaced` (none, unless the instance switched
        after the flow stopped asking for it). Where the policy interrupts, all that is unfinished there under older
        versions goes on under this one."""
        self._check_published(version, f"instance {instance!r}")
        return self._fleet.commit(instance, version)

    def retired_on(self, instance: str, version: int) -> tuple[int, ...]:
        """An instance no longer serves ``version``. Returns as :meth:`committed` does."""
        return self._fleet.retire(instance, version)

    def hosting(self, version: int) -> tuple[str, ...]:
        """Instances that serve ``version``, by name."""
        return tuple(instance.name for instance in self._fleet.hosting(version))

    def switches(self) -> tuple[Switch, ...]:
        """What instances should load and retire now, by name. A query: it repeats an answer until the instance's
        :meth:`committed` and :meth:`retired_on` have been told, as the very same tuple while nothing changes; of an
        instance whose switch is carried out it says nothing."""
        return self._switching.switches()

    def switch_begun(self, instance: str) -> None:
        """The caller carries the switch of an instance out, which takes its time, until :meth:`switch_ended`."""
        self._fleet.switch(instance, True)

    def switch_ended(self, instance: str) -> None:
        """A switch is done, or came to nothing; what came of it has been told. Once too often is fine."""
        self._fleet.switch(instance, False)

    # ------------------------------------------------------------ moves

    def moves(self, held: Callable[[int], int] = lambda trajectory: 1) -> tuple[Move, ...]:
        """Which unfinished trajectories should go on elsewhere, by id; :mod:`headrace.flow.rebalancing` says why. A
        query: it repeats an answer until :meth:`moved` or :meth:`stays` has been told, or the move came to nothing, as
        the very same tuple while nothing changes. Cheap when nothing is due. ``held``: tokens in a trajectory's context
        now, which a move may have to compute again; by default all are taken to be equally long. Lockstep, or
        where the policy interrupts: nothing moves."""
        return self._rebalancing.moves(held) if self._may_move else ()

    def moved(self, trajectory: int) -> bool:
        """A trajectory is on the target of its move. False: it has none any more (it finished, or an instance was lost
        meanwhile), and is where :meth:`instance_of` says."""
        return self._fleet.arrive(trajectory)

    def stays(self, trajectory: int) -> None:
        """The move of a trajectory came to nothing: it is where it was. A later one may be decided."""
        self._fleet.release(trajectory)

    def rebalance(self) -> None:
        """The caller's timer: let :meth:`moves` decide anew. That also happens at each publication and batch, when an
        instance comes or goes, and when one comes under pressure."""
        self._rebalancing.due = True

    def kv_used(self, instance: str, share: float) -> None:
        """An instance's KV memory is in use by ``share``. At the threshold it gets nothing more, until told otherwise,
        and :meth:`moves` takes some of its trajectories away."""
        self._rebalancing.kv_used(instance, share)

    # ------------------------------------------------------------ trajectories

    def instance_of(self, trajectory: int) -> str:
        """Where an unfinished trajectory is placed; "" for nowhere."""
        instance = self._fleet.instance_of(trajectory)
        return instance.name if instance else ""

    def unplaced(self) -> tuple[int, ...]:
        """Unfinished trajectories that are on no instance, ascending: each needs :meth:`place_again`."""
        return tuple(sorted(t for waiting in self._fleet.unplaced.values() for t in waiting))

    # ------------------------------------------------------------ versions

    def live_versions(self) -> tuple[int, ...]:
        """Published and not retired, ascending."""
        return self._versions.live

    def retirable(self) -> tuple[int, ...]:
        """Live versions older than the newest with nothing in flight and no pin, ascending. Where the policy
        interrupts, nothing in flight is of a version that no instance generates under any more."""
        return tuple(version for version in self._versions.retirable() if not self._fleet.is_busy(version))

    def retired(self, version: int) -> None:
        """``version`` is gone from the weight store. ValueError unless it is :meth:`retirable`."""
        if self._fleet.is_busy(version):
            raise ValueError(f"version {version} is not retirable; retirable: {self.retirable()}")
        self._versions.retire(version)

    def pin(self, version: int) -> None:
        """Keep a live version live, and hosted, until as many :meth:`unpin`: evaluation reads it."""
        self._versions.pin(version)

    def unpin(self, version: int) -> None:
        """Undo one :meth:`pin`."""
        self._versions.unpin(version)

    # ------------------------------------------------------------ inside

    def _check_published(self, version: int, who: str) -> None:
        if version > self._versions.newest:
            raise StalenessError(
                f"{who} reports version {version}, and the newest published version is {self._versions.newest}: "
                f"staleness would be negative",
                fix="after a failover or resume, continue from the highest version ever published",
            )
