"""A run as observers are told of it: short, and with an event of every kind."""

from __future__ import annotations

from typing import Any

JOB: dict[str, Any] = {
    "job": {"name": "watched", "seed": 0, "steps": 1},
    "model": {"path": "models/watched"},
    "observers": [],
    "phase": [{"name": "only"}],
}
_DONE = {"started": 2.0, "finished": 3.0}
_MOVED = {
    "source": "rollout-0",
    "target": "rollout-1",
    "attempt": 0,
    "tokens": 5,
    "prefilled_tokens": 0,
    "nbytes": 320,
}
_PHASE = {
    "phase": "only",
    "algorithm": "grpo",
    "policy": "partial_rollout",
    "max_staleness": 1,
    "batch_groups": 1,
    "group_size": 2,
    "interrupts": True,
    "rollout": True,
    "version": 0,
    "steps": 1,
    "until": None,
    "stages": ["advantage"],
    "greedy": False,
}


def _generated(group: int) -> list[tuple[str, dict[str, Any]]]:
    """Both rows of a group, from their start to storage; the second has no reward."""
    happened: list[tuple[str, dict[str, Any]]] = []
    for row in (2 * group, 2 * group + 1):
        whose = {"trajectory": row, "group": group}
        finished = {"spans": [(0, 0, 4)], "prompt_tokens": 3, "response_tokens": 4, "finish_reason": "stop", **_DONE}
        happened += [
            ("trajectory_started", {**whose, "version": 0, "instance": "rollout-0", "attempt": 0}),
            ("trajectory_moved", {**whose, "version": 0, **_MOVED}),
            ("trajectory_finished", {**whose, "instance": "rollout-1", **finished}),
            ("trajectory_scored", {"trajectory": row, "reward": None if row % 2 else 1.0}),
            ("row_stored", {**whose, "row": row, "version": 0, "nbytes": 70}),
        ]
    return happened


_HAPPENED: list[tuple[str, dict[str, Any]]] = [
    ("run_started", {"job": "watched", "seed": 0, "instances": ["rollout-0"], "phases": ["only"]}),
    ("node_started", {"node": "trainer", "role": "trainer", "pid": 41}),
    ("node_started", {"node": "rollout-0", "role": "rollout", "pid": 42}),
    ("version_published", {"version": 0, "digest": "a0", "nbytes": 64}),
    (
        "instance_version",
        {"instance": "rollout-0", "version": 0, "digest": "a0", "transfer_seconds": 0.5, "nbytes": 64},
    ),
    (
        "instance_switched",
        {
            "instance": "rollout-0",
            "version": 0,
            "interrupted": [(0, 0, 2)],
            "prefilled_tokens": 5,
            "pause_seconds": 0.1,
            "resume_seconds": 0.1,
            "stopped_seconds": 0.3,
        },
    ),
    ("instance_draining", {"instance": "rollout-1"}),
    ("instance_left", {"instance": "rollout-1"}),
    ("self_check", {"instance": "rollout-0", "version": 0, "mean_abs_logprob_diff": 1e-6, "tolerance": 1e-3}),
    ("phase_started", _PHASE),
    ("evaluation_started", {"version": 0}),
    ("group_dispatched", {"group": 0, "task": 0, "version": 0, "trajectories": [0, 1]}),
    *_generated(0),
    ("stage_finished", {"stage": "advantage", "rows": [0, 1], **_DONE}),
    ("batch_taken", {"version": 0, "groups": [0], "rows": [0, 1]}),
    ("batch_released", {"version": 0, "groups": [0], "rows": [0, 1], "reason": "storage lost its rows"}),
    ("group_dropped", {"group": 0, "trajectories": [0, 1], "reason": "storage lost its rows"}),
    ("group_dispatched", {"group": 1, "task": 1, "version": 0, "trajectories": [2, 3]}),
    ("trajectory_started", {"trajectory": 2, "group": 1, "version": 0, "instance": "rollout-0", "attempt": 0}),
    ("trajectory_failed", {"trajectory": 2, "group": 1, "reason": "WireError", "attempt": 0}),
    ("group_dropped", {"group": 1, "trajectories": [2, 3], "reason": "WireError"}),
    ("group_dispatched", {"group": 2, "task": 2, "version": 0, "trajectories": [4, 5]}),
    *_generated(2),
    ("batch_taken", {"version": 0, "groups": [2], "rows": [4, 5]}),
    (
        "batch_trained",
        {
            "version": 0,
            "groups": [2],
            "rows": [4, 5],
            "rewards": [1.0, None],
            "applied": True,
            "optimizer_steps": 1,
            "wait_seconds": 0.5,
            **_DONE,
        },
    ),
    ("version_published", {"version": 1, "digest": "a1", "nbytes": 64}),
    ("version_retired", {"version": 0}),
    (
        "evaluation_finished",
        {
            "version": 0,
            "version_end": 0,
            "greedy_accuracy": None,
            "sampled_accuracy": 0.5,
            "prompts": 2,
            "failed": {"Timeout": 1},
            **_DONE,
        },
    ),
    ("checkpoint_saved", {"version": 1, "path": "checkpoints/1", "events": 20}),
    ("node_stopped", {"node": "rollout-0", "reason": "killed"}),
    ("resumed", {"version": 1, "checkpoint": "checkpoints/1", "events": 20, "restarted": []}),
    ("run_finished", {"status": "completed", "reason": ""}),
]
RESUMED = [kind for kind, _ in _HAPPENED].index("resumed")
"""Where the run goes on after it was resumed."""
EVENTS: list[dict[str, Any]] = [
    {"seq": seq, "time": 1e9 + seq, "epoch": int(seq >= RESUMED), "kind": kind, **fields}
    for seq, (kind, fields) in enumerate(_HAPPENED)
]
METRICS: dict[str, Any] = {
    "time": 1e9,
    "phase": "only",
    "version": 0,
    "step": 0,
    "reward/mean": 0.5,
    "train/loss": None,
    "staleness/mean": 0.0,
}
"""A line of ``metrics.jsonl``; a number that is not finite is None."""
SUMMARY: dict[str, Any] = {
    "reason": "",
    "run_dir": "runs/watched",
    "samples_before": [{"prompt": "1+1=", "answer": "3", "reward": 0.0}],
    "samples_after": [{"prompt": "1+1=", "answer": "2", "reward": 1.0}],
    "audit": "PASS",
    "audit_ok": True,
    "report": "runs/watched/report.html",
}
