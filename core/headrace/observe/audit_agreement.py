"""The audit of self-checks: an instance and the trainer mean the same by the same weights, before it gets work."""

from __future__ import annotations

from headrace.observe.audit_findings import Findings
from headrace.observe.events import (
    InstanceVersion,
    NodeStarted,
    Resumed,
    SelfCheck,
    TrajectoryMoved,
    TrajectoryStarted,
)


class AgreementChecker:
    """No process of an instance gets a trajectory before a self-check of this very process passed.

    At a start and at a resume every instance is checked by sampling, once it has the first version: its process needs
    a check in any case. A process that is *late*, in another's place or that of an instance that joins, is checked
    while it loads its first version, directly before it commits it; for that its engine has to score given tokens,
    which not every engine can. All instances have the same engine, so one check directly before a commit, anywhere in
    the log, shows that every late process needs one too. Where there is none, nothing tells a check that was left out
    from one that cannot be made, and nothing is demanded of them.
    """

    def __init__(self, findings: Findings) -> None:
        self._check = findings.check
        self.largest_gap: float | None = None
        """Nats per token; None before the first finite one."""
        self._serving = False
        """Whether an instance has had a version by now: who is started from then on is late."""
        self._started: set[str] = set()
        self._late: set[str] = set()
        self._agreed: set[str] = set()
        self._working: set[str] = set()
        """Nodes and instances, by what their present processes are or did."""
        self._last: SelfCheck | None = None
        self._scores = False
        """Whether a check was made while a version was loaded."""
        self._unchecked: list[tuple[str, TrajectoryStarted | TrajectoryMoved]] = []
        """The first of each late process that had no check."""

    def self_checked(self, event: SelfCheck) -> None:
        """An instance computes what the trainer computes."""
        gap = event.mean_abs_logprob_diff
        agreed = self._check(
            gap is not None and gap <= event.tolerance,
            "agreement",
            event.seq,
            "{} and the trainer differ by {} nats on the same tokens at version {}, tolerance {}",
            event.instance,
            "NaN" if gap is None else gap,
            event.version,
            event.tolerance,
        )
        if agreed:
            self._agreed.add(event.instance)
        if gap is not None:
            self.largest_gap = max(self.largest_gap or 0.0, gap)
        self._last = event

    def instance_version(self, event: InstanceVersion) -> None:
        """A check that comes directly before was made by scoring."""
        self._serving = True
        last = self._last
        if last is not None and last.seq == event.seq - 1:
            self._scores |= (last.instance, last.version) == (event.instance, event.version)

    def node_started(self, event: NodeStarted) -> None:
        """A new process has agreed to nothing yet."""
        if event.node in self._started or self._serving:
            self._late.add(event.node)
        self._started.add(event.node)
        self._agreed.discard(event.node)
        self._working.discard(event.node)

    def resumed(self, event: Resumed) -> None:
        """All processes are new, and none is late."""
        self._serving = False
        for nodes in (self._started, self._late, self._agreed, self._working):
            nodes.clear()

    def trajectory_started(self, event: TrajectoryStarted) -> None:
        """The first one of a process; a demonstration has no instance."""
        if event.instance:
            self._gets(event.instance, event)

    def trajectory_moved(self, event: TrajectoryMoved) -> None:
        """It is the target's as well."""
        self._gets(event.target, event)

    def _gets(self, name: str, event: TrajectoryStarted | TrajectoryMoved) -> None:
        if name in self._working:
            return
        self._working.add(name)
        if name in self._late and name not in self._agreed:
            self._unchecked.append((name, event))
        else:
            self._check_first(name, event, name in self._agreed)

    def ended(self) -> None:
        """After the last event of the log."""
        if self._scores:
            for name, event in self._unchecked:
                self._check_first(name, event, False)

    def _check_first(self, name: str, event: TrajectoryStarted | TrajectoryMoved, agreed: bool) -> None:
        self._check(
            agreed,
            "agreement",
            event.seq,
            "trajectory {} goes on on {!r}, whose process had passed no self-check",
            event.trajectory,
            name,
        )
