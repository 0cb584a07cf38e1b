"""The groups of one phase, between the flow that counts them and the workers that play them.

Turns tickets into work items, and what workers report into what the flow is told. Invariant: every change of the flow
is one event in the log, written before anybody can act on the change; a group that leaves is trained or dropped whole,
with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headrace.contract import Array
from headrace.errors import RunError
from headrace.flow import LATE, STORED, Flow, Ticket
from headrace.services.attempts import Attempts
from headrace.services.dynamic_sampling import UNINFORMATIVE, DynamicSampling
from headrace.services.fleet import Fleet
from headrace.services.messages import Member, PlaceCall, Placement, TrajectoryFinished, WorkItem
from headrace.services.rebalancer import Rebalancer
from headrace.services.tally import Tally

STORAGE_LOST = "storage_lost"
INSTANCE_LOST = "instance_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What turns a flow ticket into a work item."""

    partition: str
    """Of the data plane."""
    columns: tuple[str, ...]
    """What a row is stored with."""
    by_row: bool
    """Whether rows are stored one by one, as some stage can have them, or group by group."""
    rollout: bool
    max_new_tokens: int
    temperature: float
    task_index: Callable[[int], int]
    """Group id → index in the environment's stream."""
    next_task: Callable[[int], int]
    """The index to take instead of one in quarantine."""
    seed: Callable[[int], int]
    """Trajectory id → sampling seed."""
    mask_older: bool
    """Whether of a row only tokens of its newest version are trained."""
    max_failed_share: float
    """Of the trajectories of a batch, before the run stops."""
    max_generated: int | None = None
    """Groups per batch, with dynamic sampling; None without."""
    greedy: bool = False
    """Whether the last member of each group answers greedily."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """The first columns of rows that a storage unit is about to keep; parallel to ``trajectories``."""

    producer: str
    """Id of the worker's process."""
    trajectories: list[int]
    versions: list[int]
    """Of the oldest token."""
    tokens: list[int]
    nbytes: list[int]
    rewards: list[float]
    unit: int


class Groups:
    """``free`` is told of rows that storage may forget."""

    def __init__(
        self,
        flow: Flow,
        plan: GroupPlan,
        *,
        fleet: Fleet,
        attempts: Attempts,
        tally: Tally,
        emit: Callable[..., Any],
        free: Callable[[Iterable[int]], None],
    ) -> None:
        self.flow = flow
        self.plan = plan
        self._fleet = fleet
        self._attempts = attempts
        self._emit = emit
        self._free = free
        self._tally = tally
        self._unstarted: set[int] = set()
        """Trajectories whose present try waits for a place."""
        self._started_on: dict[int, str] = {}
        """Trajectory in flight → the instance of its newest try, also when that instance is lost by now."""
        self._left: dict[int, set[str]] = {}
        """Trajectory in flight → addresses that its present try has moved away from."""
        self._rebalancer = Rebalancer(flow, fleet=fleet, attempts=attempts, tally=tally, emit=emit, arrived=self._moved)
        self._sampling = None if plan.max_generated is None else DynamicSampling(limit=plan.max_generated)
        self._tasks: dict[int, int] = {}
        """Group in flight → its task; by now another one may be due to the group's id."""

    # ------------------------------------------------------------ work

    def next_item(self) -> WorkItem | None:
        """Another group, if one may start."""
        ticket = self.flow.next_ticket()
        if ticket is None:
            return None
        task = self._tasks[ticket.group] = self._task(ticket.group)
        self._emit(
            "group_dispatched",
            group=ticket.group,
            task=task,
            version=ticket.version,
            trajectories=ticket.trajectories,
        )
        return WorkItem(
            kind="rollout" if self.plan.rollout else "demonstration",
            group=ticket.group,
            version=ticket.version,
            split="train",
            partition=self.plan.partition,
            columns=self.plan.columns,
            by_row=self.plan.by_row,
            members=self._members(ticket, task),
            max_new_tokens=self.plan.max_new_tokens,
            temperature=self.plan.temperature,
            mask_older=self.plan.mask_older,
        )

    def _task(self, group: int) -> int:
        first = task = self.plan.task_index(group)
        while task in self._attempts.quarantine:
            task = self.plan.next_task(task)
            if task == first:  # nothing else is left: the failure share ends the run
                break
        return task

    def _members(self, ticket: Ticket, task: int) -> list[Member]:
        members = []
        for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
            self._started(trajectory, instance)
            members.append(
                Member(
                    trajectory=trajectory,
                    task=task,
                    instance=self._fleet.address(instance),
                    seed=self.plan.seed(trajectory),
                    cohort="" if ticket.cohort is None else f"rollout-{ticket.cohort}",
                    cohort_size=ticket.cohort_sizes.get(instance, 0),
                    greedy=self.plan.greedy and trajectory == ticket.trajectories[-1],
                )
            )
        return members

    def _started(self, trajectory: int, instance: str) -> None:
        """A trajectory without an instance, where it needs one, starts when it is placed."""
        if self.plan.rollout and not instance:
            self._unstarted.add(trajectory)
        else:
            self._unstarted.discard(trajectory)
            self._started_on[trajectory] = instance
            self._left.pop(trajectory, None)
            self._emit(
                "trajectory_started",
                trajectory=trajectory,
                group=trajectory // self.flow.group_size,
                version=self.flow.version_of(trajectory),
                instance=instance,
                attempt=self._attempts.current(trajectory),
            )

    def _moved(self, trajectory: int, left: str, instance: str) -> None:
        self._started_on[trajectory] = instance
        self._left.setdefault(trajectory, set()).add(left)

    def _has_left(self, trajectory: int, address: str) -> bool:
        """Whether its present try had moved on from there, as far as its worker has not been told. Said once: one that
        had come back there, and is sent to where it was before, has lost that."""
        left = self._left.get(trajectory, set())
        known = address in left
        left.discard(address)
        return known

    def begin_moves(self) -> None:
        """Have trajectories go on where the flow wants them."""
        self._rebalancer.begin_moves()

    # ------------------------------------------------------------ again

    def displaced(self, trajectories: Sequence[int]) -> None:
        """These lost their instance: they wait for another place, unless they were tried too often."""
        given_up: dict[int, None] = {}
        for trajectory in trajectories:
            if not self._try_again(trajectory, INSTANCE_LOST):
                given_up[trajectory // self.flow.group_size] = None
            self._unstarted.add(trajectory)
        for group in given_up:
            self._give_up(group)

    def _give_up(self, group: int) -> None:
        self._attempts.quarantine.add(self._tasks[group])
        self.drop(group, INSTANCE_LOST)

    def _try_again(self, trajectory: int, reason: str) -> bool:
        """The present try came to nothing; whether there is another one. A try that had not begun is no try."""
        if trajectory in self._unstarted:
            return True
        self._emit(
            "trajectory_failed",
            trajectory=trajectory,
            group=trajectory // self.flow.group_size,
            reason=reason,
            attempt=self._attempts.current(trajectory),
        )
        return self._attempts.failed(trajectory)

    def again(self, item: WorkItem, reason: str) -> WorkItem | None:
        """The item to play anew what is not stored of a group, in the places its members still have; None when it is
        not wanted any more, or was tried too often and is dropped: its task is then in quarantine."""
        if not self.flow.knows(item.group):
            return None
        members = [member for member in item.members if not self.flow.ledger.is_written(member.trajectory)]
        # Every member's failure is counted, also when the first has had its last try.
        if not all([self._try_again(member.trajectory, reason) for member in members]):
            self._attempts.quarantine.update(member.task for member in members)
            self.drop(item.group, reason)
            return None
        return msgspec.structs.replace(item, members=[self._member_again(member) for member in members])

    def _member_again(self, member: Member) -> Member:
        if not self.plan.rollout:
            self._started(member.trajectory, "")
            return msgspec.structs.replace(member, attempt=self._attempts.current(member.trajectory))
        if not self.flow.instance_of(member.trajectory):
            self.flow.place_again(member.trajectory)
        instance = self.flow.instance_of(member.trajectory)
        self._started(member.trajectory, instance)
        address = self._fleet.address(instance)
        stays = address == member.instance
        return msgspec.structs.replace(
            member,
            instance=address,
            attempt=self._attempts.current(member.trajectory),
            cohort=member.cohort if stays else "",
            cohort_size=member.cohort_size if stays else 0,
        )

    def placement(self, call: PlaceCall) -> Placement | None:
        """Where a trajectory goes on; None while no instance can take it. RunError when its group is not wanted."""
        trajectory = call.trajectory
        name = self.flow.instance_of(trajectory)
        if (
            name
            and call.attempt == self._attempts.current(trajectory)
            and not self._has_left(trajectory, call.instance)
        ):
            # It had moved on, and what it had moved to was lost before the flow heard of the move.
            if not self._try_again(trajectory, INSTANCE_LOST):
                self._give_up(call.group)
            else:
                self.flow.stays(trajectory)
                self._started(trajectory, name)
        if not self.flow.knows(call.group):
            raise RunError(f"group {call.group} is not wanted any more")
        if not name:
            name = self.flow.place_again(trajectory) or ""
            if not name:
                return None
            self._started(trajectory, name)
        return Placement(instance=self._fleet.address(name), attempt=self._attempts.current(call.trajectory))

    # ------------------------------------------------------------ reports

    def finished(self, entry: TrajectoryFinished) -> bool:
        """A trajectory's tokens are done; False when nobody waits for them."""
        flow = self.flow
        if not flow.knows(entry.group):
            return False
        flow.generated(entry.trajectory)
        self._tally.mixed += len({version for version, _, _ in entry.spans}) > 1
        self._unstarted.discard(entry.trajectory)  # it was done when its instance was lost
        self._emit(
            "trajectory_finished",
            trajectory=entry.trajectory,
            group=entry.group,
            instance=self._started_on[entry.trajectory],
            spans=entry.spans,
            prompt_tokens=entry.prompt_tokens,
            response_tokens=entry.response_tokens,
            finish_reason=entry.finish_reason,
            started=entry.started,
            finished=entry.finished,
        )
        return True

    def stored(self, rows: StoredRows) -> tuple[Array, list[int]]:
        """Rows are about to be kept. Returns int8 [n], 0 for those to keep, and the groups that have all theirs now."""
        outcome = np.full(len(rows.trajectories), LATE, dtype=np.int8)
        stored: dict[int, None] = {}
        for place, trajectory in enumerate(rows.trajectories):
            group = trajectory // self.flow.group_size
            if self._store(rows, place):
                outcome[place] = STORED
                stored[group] = None
        complete = [group for group in stored if self.flow.ledger.is_started(group)]
        for group in complete:
            if self._sampling is not None and self._sampling.rejects(group):
                self._tally.uninformative += 1
                self.drop(group, UNINFORMATIVE)
                outcome[[t // self.flow.group_size == group for t in rows.trajectories]] = LATE
            else:
                self._forget(group, range(group * self.flow.group_size, (group + 1) * self.flow.group_size))
        return outcome, complete

    def _store(self, rows: StoredRows, place: int) -> bool:
        trajectory, version, nbytes = rows.trajectories[place], rows.versions[place], rows.nbytes[place]
        # The ledger is told first: what it refuses was stored and logged before, or belongs to nobody.
        if not self.flow.stored(trajectory, version=version, tokens=rows.tokens[place], nbytes=nbytes, unit=rows.unit):
            return False
        self._emit("trajectory_scored", trajectory=trajectory, reward=rows.rewards[place])
        if self._sampling is not None:
            self._sampling.scored(trajectory // self.flow.group_size, rows.rewards[place])
        self._emit(
            "row_stored",
            row=trajectory,
            trajectory=trajectory,
            group=trajectory // self.flow.group_size,
            version=version,
            nbytes=nbytes,
        )
        return True

    def batch_taken(self) -> None:
        """What is stored from now on is for the next one."""
        if self._sampling is not None:
            self._sampling.taken()

    def lost_unit(self, unit: int) -> None:
        """A storage unit is gone with the rows it held."""
        self.lost(self.flow.ledger.at_unit(unit).tolist())

    def lost(self, groups: Iterable[int]) -> None:
        """Storage has lost rows of these groups, or could not keep them: those that are still wanted are dropped. Those
        that are in training were read already, or the trainer will say that they are missing."""
        for group in groups:
            if self.flow.knows(group) and not self.flow.in_training(group):
                self.drop(group, STORAGE_LOST)

    # ------------------------------------------------------------ drops

    def drop(self, group: int, reason: str) -> None:
        """Give a whole group up."""
        if rows := self.flow.drop_group(group, reason):
            self._dropped(group, rows, reason)

    def drop_all(self, reason: str) -> list[int]:
        """Give everything up; late reports about it change nothing. Returns the groups."""
        size = self.flow.group_size
        dropped = list(self.flow.drop_all(reason))
        for group in dropped:
            self._dropped(group, range(group * size, (group + 1) * size), reason)
        return dropped

    def _dropped(self, group: int, rows: Iterable[int], reason: str) -> None:
        rows = list(rows)
        self._emit("group_dropped", group=group, trajectories=rows, reason=reason)
        self._forget(group, rows)
        self._free(rows)

    def _forget(self, group: int, trajectories: Iterable[int]) -> None:
        self._tasks.pop(group, None)
        if self._sampling is not None:
            self._sampling.forget(group)
        self._attempts.forget(trajectories)
        self._unstarted.difference_update(trajectories)
        for trajectory in trajectories:
            self._started_on.pop(trajectory, None)
            self._left.pop(trajectory, None)
