"""A run told event by event, for what the simulated ones do not do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.observe.audit import AuditResult, audit_run
from headrace.observe.event_log import EventLog

INSTANCE = "rollout-0"
MEMBERS = 2


class Story:
    """A run told event by event: groups of two, batches of one group unless said otherwise."""

    def __init__(
        self,
        directory: Path,
        *,
        max_staleness: int = 2,
        batch_groups: int = 1,
        stages: Sequence[str] = (),
        interrupts: bool = False,
    ) -> None:
        self._directory = directory
        self._log = EventLog(directory / "events.jsonl")
        self._version = -1
        self._groups = 0
        self._rewards: dict[int, float | None] = {}
        self._version_of: dict[int, int] = {}
        self.tell("run_started", job="story", seed=0, instances=[INSTANCE], phases=[])
        self._start()
        self.tell(
            "phase_started",
            phase="rl",
            algorithm="grpo",
            policy="partial_rollout" if interrupts else "multi_version",
            max_staleness=max_staleness,
            batch_groups=batch_groups,
            group_size=MEMBERS,
            interrupts=interrupts,
            greedy=False,
            rollout=True,
            version=0,
            steps=100,
            until=None,
            stages=list(stages),
        )

    def tell(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._log.emit(kind, **fields)

    def publish(self) -> None:
        """The next version, on the instance at once."""
        self._version += 1
        self.tell("version_published", version=self._version, digest=f"d{self._version}", nbytes=1)
        self.commit()

    def commit(self) -> None:
        """The instance has the newest version."""
        self.tell(
            "instance_version",
            instance=INSTANCE,
            version=self._version,
            digest=f"d{self._version}",
            transfer_seconds=0.1,
            nbytes=1,
        )

    def _start(self) -> None:
        """The instance is there, has the version and agrees with the trainer about it."""
        self.tell("node_started", node=INSTANCE, role="rollout", pid=1)
        self.publish()
        self.tell("self_check", instance=INSTANCE, version=self._version, mean_abs_logprob_diff=0.0, tolerance=1e-3)

    def checkpoint(self) -> dict[str, Any]:
        """What a resume from here says."""
        events, version = self._log.count, self._version
        path = f"checkpoints/version-{version:08d}-event-{events:08d}"
        self.tell("checkpoint_saved", version=version, path=path, events=events)
        return {"version": version, "checkpoint": path, "events": events}

    def resume(self, saved: dict[str, Any], *restarted: int) -> None:
        """The process is gone without a word; another goes on from what was saved."""
        self._log.close()
        self._log = EventLog.reopen(self._directory / "events.jsonl")
        self.tell("resumed", **saved, restarted=list(restarted))
        self._version = saved["version"] - 1
        self._start()

    def dispatch(self, group: int | None = None) -> int:
        """A group under the newest version, started: the next one, or one that begins anew."""
        if group is None:
            group, self._groups = self._groups, self._groups + 1
        self._version_of[group] = self._version
        members = self.members(group)
        self.tell("group_dispatched", group=group, task=group, version=self._version, trajectories=members)
        for t in members:
            self.tell(
                "trajectory_started", trajectory=t, group=group, version=self._version, instance=INSTANCE, attempt=0
            )
        return group

    def members(self, group: int) -> list[int]:
        return [group * MEMBERS + i for i in range(MEMBERS)]

    def finish(
        self, group: int, *, tokens: int = 4, rewards: Sequence[float | None] = (0.0, 1.0), **changed: Any
    ) -> None:
        """Finished, scored and stored. ``changed``: other fields of trajectory_finished."""
        version = self._version_of[group]
        for t, reward in zip(self.members(group), rewards, strict=True):
            told = {
                "trajectory": t,
                "group": group,
                "instance": INSTANCE,
                "spans": [(version, 0, tokens)],
                "prompt_tokens": 3,
                "response_tokens": tokens,
                "finish_reason": "stop",
                "started": 0.0,
                "finished": 1.0,
            }
            self.tell("trajectory_finished", **(told | changed))
            self._rewards[t] = reward
            self.tell("trajectory_scored", trajectory=t, reward=reward)
            self.tell("row_stored", row=t, trajectory=t, group=group, version=version, nbytes=64)

    def train(self, *groups: int, version: int | None = None) -> None:
        """Taken, trained and published as the next version."""
        at = self._version if version is None else version
        batch = {"version": at, "groups": list(groups), "rows": [t for g in groups for t in self.members(g)]}
        self.tell("batch_taken", **batch)
        done = {"applied": True, "optimizer_steps": 1, "started": 1.0, "finished": 4.0, "wait_seconds": 1.0}
        self.tell("batch_trained", **batch, rewards=[self._rewards.get(row) for row in batch["rows"]], **done)
        self.publish()

    def step(self) -> None:
        """One on-policy batch."""
        group = self.dispatch()
        self.finish(group)
        self.train(group)

    def end(self, status: str = "completed") -> AuditResult:
        """The verdict."""
        self.tell("run_finished", status=status, reason="")
        self._log.close()
        return audit_run(self._directory)
