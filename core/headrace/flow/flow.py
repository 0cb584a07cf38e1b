"""The façade of the flow room: one object per phase that says what may happen next.

It knows ids, counts and versions; the caller tells it what happened and asks what may. Nothing here waits, reads a
clock or sends anything.

Ids: trajectory = row = ``group * group_size + member``. Invariants, at every moment: every trajectory is pinned to the
version its group started under, unless the policy interrupts: then no token is older than that;
``dispatched = trained + buffered + in_flight + dropped``; every batch is made of whole groups, oldest version first,
and no row in it is staler than the policy's ``max_staleness``.

What the caller owes for liveness: carry out :meth:`Flow.switches`, call :meth:`Flow.place_again` for
:meth:`Flow.unplaced`, and tell of everything that finished, failed or left. Then an unplaced trajectory is placed in
the end, because ``switches`` brings its version back onto an instance when none hosts it (see
:mod:`headrace.flow.switching`), and the policy's gates never wait for anything but trajectories in flight and tickets.
:meth:`Flow.moves` only makes it faster: whoever cannot carry moves out need not ask for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from headrace.contract import Array, FlowView, StalenessPolicy
from headrace.errors import StalenessError
from headrace.flow.admission import Admission
from headrace.flow.batch import OpenBatch
from headrace.flow.dispatch import Dispatch
from headrace.flow.group_table import STORED, WRITTEN
from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger
from headrace.flow.order import LongestFirst
from headrace.flow.records import ROW, BatchLease, Counts, FlowColumns, FlowState, Ticket
from headrace.flow.serving import Serving


class Flow(Serving):
    """``batches``: how many will be trained; no group starts that none of them could hold. ``version``: the newest
    policy version, which the trainer works on. ``first_group``: the first group id; a phase
    with another ``group_size`` must start above every earlier trajectory id. ``state``: of an earlier flow with the
    same sizes, which this one continues; it has its own version and ids. ``rollout=False``: rows come from
    elsewhere (demonstrations), and nothing is placed on instances. ``lookahead``: an instance is given new work while
    it has fewer than ``slots * lookahead`` trajectories, so that its queue hides the round trip; a group's members all
    start, so that the last group may pass this by ``group_size - 1``. ``kv_threshold``: the share of its KV memory in
    use at which an instance is full, whatever slots are idle. ``prompt``: group → its prompt, where those that will
    take long are to start first (:mod:`headrace.flow.order`); None, and always in lockstep: groups start as they come.
    """

    def __init__(
        self,
        *,
        policy: StalenessPolicy,
        batch_groups: int,
        group_size: int,
        batches: float = math.inf,
        rollout: bool = True,
        version: int = 0,
        first_group: int = 0,
        lookahead: float = 1.25,
        kv_threshold: float = 0.9,
        prompt: Callable[[int], int] | None = None,
        state: FlowState | None = None,
        columns: FlowColumns = ROW,
    ) -> None:
        if min(batch_groups, group_size) < 1 or first_group < 0:
            raise ValueError(
                f"batch_groups = {batch_groups} and group_size = {group_size} are at least 1, "
                f"first_group = {first_group} at least 0"
            )
        self.batch_groups = batch_groups
        self.group_size = group_size
        self._rollout = rollout
        self._batches = batches
        self._admission = Admission(policy, batch_groups=batch_groups, room=self._room)
        if state is not None:
            version, first_group = state.version, state.first_group
        super().__init__(
            version=version,
            lookahead=lookahead,
            kv_threshold=kv_threshold,
            lockstep=policy.lockstep,
            interrupts=rollout and policy.interruption is not None,
            top_up=self._top_up,
        )
        self.interruption = policy.interruption if rollout else None
        self._lockstep = policy.lockstep
        self._columns = columns
        self._ledger = Ledger(
            group_size=group_size,
            columns=columns.all,
            consumers=columns.consumers,
            writes=columns.writes,
            by_row=columns.by_row,
            first_group=first_group,
        )
        self._dispatch = Dispatch(
            self._fleet,
            group_size=group_size,
            lockstep=policy.lockstep,
        )
        self._batch = OpenBatch(self._ledger, groups=batch_groups)
        self._batch_trained = False
        self._dispatched = self._trained = self._in_flight = 0
        self._dropped: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        if state is not None:
            self._restore(state)
        self._order: LongestFirst | None = None
        if prompt is not None and rollout and not policy.lockstep:
            self._order = LongestFirst(self._ledger, prompt=prompt, groups=batch_groups)

    def _restore(self, state: FlowState) -> None:
        self._ledger.restore(state.ledger(group_size=self.group_size, columns=self._columns))
        for group in state.stored:
            if not self._ledger.is_complete(group.group):
                self._versions.reopened(group.version)
        self._trained = state.trained
        self._dropped.update(state.dropped)
        self._dispatched = self._trained + self._ledger.buffered + sum(self._dropped.values())

    # ------------------------------------------------------------ where things stand

    def view(self) -> FlowView:
        """What the policy sees."""
        taken = self._batch_trained or self._batch.whole is not None
        return FlowView(
            batch_groups=self.batch_groups,
            version=self._versions.newest,
            batch_taken=taken,
            in_flight=self._versions.in_flight,
            ready=self._batch.ready(),
            last_part=self._batch.last_part if taken else 0,
        )

    def counts(self) -> Counts:
        """Conservation, in trajectories."""
        return Counts(
            dispatched=self._dispatched,
            trained=self._trained,
            buffered=self._ledger.buffered,
            in_flight=self._in_flight,
            dropped=dict(self._dropped),
            refused=dict(self._refused),
        )

    def state(self) -> FlowState:
        """What a checkpoint keeps. ValueError while a batch is in training or its version not yet published."""
        if self._batch.begun or self._batch_trained:
            raise ValueError("a flow can be kept between batches only: after published(), before take_batch()")
        stored = tuple(self._ledger.stored_groups())
        whole = {group.group for group in stored}
        return FlowState(
            version=self._versions.newest,
            next_group=self.next_group,
            stored=stored,
            unfinished=tuple(sorted({*self._ledger.open_groups(), *self._ledger.reserved} - whole)),
            trained=self._trained,
            dropped=dict(self._dropped),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are stored and neither trained nor dropped."""
        return self._ledger.nbytes

    @property
    def next_group(self) -> int:
        """No group with this id or a higher one was given out, or waits to be."""
        return self._ledger.next_group

    @property
    def end(self) -> int:
        """No group that started, or may start before the next batch is taken, has this id or a higher one: the same
        however many have started by now, unless some were dropped."""
        return self.next_group + max(0, self._admission.admitted(self.view()) - len(self._ledger.reserved))

    def in_training(self, group: int) -> bool:
        """Whether a group is in the batch in training, or in a part of it that was taken."""
        return self._batch.holds(group)

    @property
    def ledger(self) -> Ledger:
        """What is stored where, for the data plane's consumers: all else goes through the flow."""
        return self._ledger

    def knows(self, group: int) -> bool:
        """Whether a group is outstanding: dispatched, neither trained nor dropped."""
        return self._ledger.is_open(group)

    # ------------------------------------------------------------ trajectories

    def next_ticket(self) -> Ticket | None:
        """Another group may start now; None when the policy or the fleet says no. It starts under the newest version,
        unless that has no room and the policy lets an older one fill the slots that idle otherwise.

        Free-running: an instance that hosts the version has room; each member goes to the least loaded of those that
        have. Lockstep: every instance hosts the newest version when a cohort begins; there is no gate on room.
        """
        version = self._version_to_start()
        if version is None or self._must_have_a_slot(version):
            return None
        admitted = self._admission.admitted(self.view())
        self._versions.opened(version)
        late = self._batch_trained or self._batch.whole is not None
        group = self._ledger.open(version, None if self._order is None else self._order.next(late=late))
        trajectories = self._ledger.rows(group)
        self._dispatched += len(trajectories)
        self._in_flight += len(trajectories)
        cohort = self._dispatch.start(group, trajectories, version, admitted=admitted) if self._rollout else None
        return Ticket(
            group=group,
            version=version,
            trajectories=tuple(trajectories),
            instances=tuple(map(self.instance_of, trajectories)),
            cohort=cohort.groups.start if cohort else None,
            cohort_sizes=cohort.sizes if cohort else {},
        )

    def generated(self, trajectory: int) -> None:
        """The tokens are done: the trajectory's place is free, before it is scored. Late news change nothing."""
        if self._is_awaited(trajectory):
            self._fleet.remove(trajectory)

    def version_of(self, trajectory: int) -> int:
        """The version that an outstanding trajectory is generated under: its group's, or where the policy interrupts
        the newest of its instance."""
        under = self._fleet.version_of(trajectory)
        return self._ledger.version(trajectory // self.group_size) if under is None else under

    def place_again(self, trajectory: int) -> str | None:
        """Place a trajectory whose instance left, or that must be generated anew, on an instance that hosts its
        version, perhaps the same; where the policy interrupts, any newer live one will do. None: none hosts it or has
        room now, and it is :meth:`unplaced`; or its row is not awaited any more."""
        if trajectory // self.group_size >= self.next_group or not self._rollout:
            raise ValueError(f"trajectory {trajectory} was never placed")
        if not self._is_awaited(trajectory):
            return None
        version = self._ledger.version(trajectory // self.group_size)
        newer = (live for live in reversed(self._versions.live) if live >= version)
        versions = newer if self.interruption is not None else (version,)
        instance = self._dispatch.place_again(trajectory, version, versions=versions)
        return instance.name if instance else None

    def stored(self, trajectory: int, *, version: int, tokens: int, nbytes: int, unit: int = 0) -> bool:
        """A row's first columns are in storage ``unit``. ``version``: of its oldest token, as the engine reported it.
        False: the write was not wanted and was counted; storage should not keep it. StalenessError when the row is
        older than its group or newer than the newest version."""
        group = trajectory // self.group_size
        if self._is_awaited(trajectory):
            self._check_published(version, f"trajectory {trajectory}")
            if version < (pinned := self._ledger.version(group)):
                raise StalenessError(
                    f"trajectory {trajectory} has a token of version {version}, its group started under {pinned}",
                    fix="an engine must sample every token from the version its request names or goes on under",
                )
        first = self._columns.first
        written = self._ledger.write_row(trajectory, first, nbytes=nbytes, tokens=tokens, version=version, unit=unit)
        if written != STORED:
            self._refused[WRITTEN[written]] += 1
            return False
        self._in_flight -= 1
        self._fleet.remove(trajectory)
        self._completed(group)
        return True

    def added(self, rows: Array, columns: Collection[str], *, nbytes: Array, unit: int) -> Array:
        """Further columns of rows are in storage ``unit``: int8 [n], as :meth:`Ledger.write`."""
        outcome = self._ledger.write(rows, columns, nbytes=nbytes, unit=unit)
        for group in np.unique(rows[outcome == STORED] // self.group_size).tolist():
            self._completed(group)
        return outcome

    def _completed(self, group: int) -> None:
        if self._ledger.is_complete(group):  # nothing is left but training
            self._versions.closed(self._ledger.version(group))
            if self._order is not None:
                self._order.observed(group)

    def drop_group(self, group: int, reason: str) -> tuple[int, ...]:
        """Give a whole group up, stored members included. Returns its row ids, which storage may free; () when it is
        not outstanding any more. ValueError while it is in a batch, or when it was never dispatched."""
        if not self._ledger.is_open(group):
            if group >= self.next_group:
                raise ValueError(f"group {group} was never dispatched; the next one is {self.next_group}")
            return ()
        if self.in_training(group):
            raise ValueError(f"group {group} is in the batch in training; release it first")
        version, complete = self._ledger.version(group), self._ledger.is_complete(group)
        rows = self._ledger.rows(group)
        stored = self._ledger.drop(group)
        if not complete:
            self._in_flight -= self.group_size - stored
            for trajectory in rows:
                self._fleet.remove(trajectory)
            self._versions.closed(version)
        self._dropped[reason] += self.group_size
        return tuple(rows)

    def drop_all(self, reason: str) -> tuple[int, ...]:
        """The phase ends: give up everything outstanding, a batch in training included. Returns the groups."""
        self._batch.release_all()
        groups = tuple(self._ledger.open_groups())
        for group in groups:
            self.drop_group(group, reason)
        return groups

    # ------------------------------------------------------------ batches

    def take_batch(self, *, now: float, ttl: float) -> BatchLease | None:
        """The training batch of the newest version, its parts included, held until ``now + ttl``; None when the policy
        says to wait or this version's batch is taken."""
        view = self.view()
        if self._admission.batch(view) is None:
            return None
        self.rebalance()  # as many groups may start
        return self._batch.take(view.version, deadline=now + ttl)

    def take_part(self, *, now: float, ttl: float) -> BatchLease | None:
        """Groups that will be in the next batch, whatever else will be; None when there are none, or the batch of this
        version is taken. :meth:`take_batch` has them too."""
        view = self.view()
        return self._batch.take_part(view.version, self._admission.certain(view), deadline=now + ttl)

    def release(self, lease: int) -> None:
        """Give the batch back, or a part of it: its groups may be taken again, as the batch of the same version."""
        self._batch.release(lease)

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Release the leases whose deadline has come, the batch's among them; returns them."""
        return self._batch.expire(now)

    def trained(self, lease: int, *, applied: bool = True) -> tuple[int, ...]:
        """The batch is done with. Returns its rows, which storage may free. ``applied=False``: no optimiser step was
        (loss or gradient not finite), so the weights are those of the same version, and that version gets another
        batch. ValueError when the lease is not held any more: the rows are, or will be, in another one."""
        done = self._batch.finish(lease)
        self._batch_trained = applied
        self._batches -= 1
        self._trained += len(done.rows)
        return done.rows

    # ------------------------------------------------------------ versions

    def may_publish(self) -> bool:
        """Whether the batch of the newest version is trained and the policy lets the next version follow. Once True it
        stays True until :meth:`published`: no ticket is given that would take it back."""
        return self._batch_trained and self._admission.publishes(self.view())

    def published(self, version: int) -> None:
        """``version`` is in the weight store. StalenessError unless it is the newest + 1 and :meth:`may_publish`."""
        if version == self._versions.newest + 1 and not self.may_publish():
            raise StalenessError(
                f"version {version} was published before it may be: "
                + ("its batch is not trained" if not self._batch_trained else "older trajectories are in flight"),
                fix="publish when may_publish() says so",
            )
        self._versions.publish(version)
        self._batch_trained = False
        if self._order is not None:
            self._order.published()
        self.rebalance()

    # ------------------------------------------------------------ inside

    def _version_to_start(self) -> int | None:
        view, newest, trained = self.view(), self._versions.newest, self._batch_trained
        admits = self._admission.admits(view, newest, trained=trained)
        if not self._rollout:
            return newest if admits else None
        self._switching.settle()
        if admits and self._dispatch.can_start(self.next_group, newest, idle=not self._in_flight):
            return newest
        if self._lockstep:
            return None
        older = (version for version in sorted(view.in_flight, reverse=True) if version < newest)
        fillable = (v for v in older if self._admission.admits(view, v, trained=trained) and self._dispatch.can_fill(v))
        return next((v for v in fillable if not self._batch.is_settled(v)), None)

    def _must_have_a_slot(self, version: int) -> bool:
        """Whether the next group waits for an idle slot: it will take long, and may not queue behind others as long."""
        return self._order is not None and self._order.is_long_next and not self._dispatch.can_fill(version)

    def _room(self) -> float:
        return (self._batches - (self._batch.whole is not None)) * self.batch_groups

    def _top_up(self) -> int:
        return self.group_size * self._admission.admitted(self.view())

    def _is_awaited(self, trajectory: int) -> bool:
        return self._ledger.is_open(trajectory // self.group_size) and not self._ledger.is_written(trajectory)
