"""Whole runs, with real processes and real engines, on a model that trains in seconds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from support.whole_runs import alive, descendants, events, follow

Start = Callable[..., Any]


def keys_in_use(run: Any) -> set[str]:
    """The secret keys that a living run has handed to its nodes, in files only their owner may read."""
    secrets: set[str] = set()
    for event in events(run, "node_started"):
        spec = Path(Path(f"/proc/{event['pid']}/cmdline").read_text().split("\0")[-2])
        assert spec.stat().st_mode & 0o077 == 0
        keys = json.loads(spec.read_bytes())["network"]["keys"]
        secrets |= {keys["server_secret"], keys["client_secret"]}
    assert secrets
    return secrets


def trained_rows(run: Any) -> list[list[int]]:
    return [event["rows"] for event in events(run, "batch_trained")]


def digests(run: Any) -> list[str]:
    return [event["digest"] for event in events(run, "version_published")]


def test_a_run_leaves_everything_a_person_needs_and_its_audit_passes(start: Start) -> None:
    transformers = pytest.importorskip("transformers")
    run = start()
    assert run.wait() == 0, run.stderr
    for name in ("job.json", "events.jsonl", "metrics.jsonl", "evaluation.jsonl", "report.html"):
        assert (run.directory / name).is_file(), name
    assert list((run.directory / "checkpoints").iterdir())
    assert audit_run(run.directory).ok
    model = transformers.AutoModelForCausalLM.from_pretrained(run.directory / "model" / "final")
    assert model.config.model_type == "llama"
    assert "audit" in run.stdout.lower()
    assert "report.html" in run.stdout


def test_policies_without_staleness_train_the_same_rows_to_the_same_weights(start: Start) -> None:
    runs = []
    for policy in ("synchronous", "multi_version", "windowed"):
        runs.append(start(f"staleness.policy={policy}", "staleness.max_staleness=0", "phase.warm-up.steps=1"))
        assert runs[-1].wait() == 0, runs[-1].stderr
    first, *others = runs
    assert len(set(digests(first))) == len(digests(first)), "every batch must change the weights"
    for other in others:
        assert trained_rows(first) == trained_rows(other)
        assert digests(first) == digests(other)


def test_a_phase_that_its_accuracy_ends_before_its_last_batch_passes_the_audit(start: Start) -> None:
    run = start('phase.warm-up.until={ metric = "evaluation/sampled_accuracy", at_least = 0.0, every = 2 }')
    assert run.wait() == 0, run.stderr
    assert len(trained_rows(run)) == 2 + 5
    audit = audit_run(run.directory)
    assert audit.ok, audit.violations
    assert audit.checked["phases"] == 6, "each phase began when it was due and ended, and the run for no reason"


def test_a_run_under_a_window_of_iterations_passes_its_audit(start: Start) -> None:
    run = start("staleness.policy=windowed", "phase.warm-up.steps=1")
    assert run.wait() == 0, run.stderr
    audit = audit_run(run.directory)
    assert audit.ok
    assert set(audit.summary["staleness"]["rl"]) <= {0, 1, 2}


def test_a_run_under_the_delayed_update_trains_every_batch_but_the_first_one_version_late(start: Start) -> None:
    run = start("staleness.policy=delayed_update", "staleness.max_staleness=1", "phase.warm-up.steps=1")
    assert run.wait() == 0, run.stderr
    audit = audit_run(run.directory)
    assert audit.ok
    assert audit.summary["staleness"]["rl"] == {0: 32, 1: 4 * 32}


@pytest.mark.parametrize("policy", ["synchronous", "multi_version"])
def test_a_run_that_trains_on_groups_as_they_come_trains_the_rows_that_it_would_train_otherwise(
    start: Start, policy: str
) -> None:
    staleness = 0 if policy == "synchronous" else 2
    run = start(
        "batch.streaming=true",
        f"staleness.policy={policy}",
        f"staleness.max_staleness={staleness}",
        "phase.warm-up.steps=1",
    )
    assert run.wait() == 0, run.stderr
    audit = audit_run(run.directory)
    assert audit.ok
    assert sum(audit.summary["staleness"]["rl"].values()) == 5 * 32
    trained = [event["optimizer_steps"] for event in events(run, "batch_trained")]
    assert trained[1:] == [2] * 5, "one step per mini-batch, as otherwise"
    if policy == "synchronous":
        assert [sorted({row // 4 for row in rows}) for rows in trained_rows(run)[1:]] == [
            list(range(8 * step + first, 8 * step + first + 8))
            for first in [min(trained_rows(run)[1]) // 4]
            for step in range(5)
        ]


def test_a_run_with_a_critic_passes_its_audit_and_its_critic_learns(start: Start) -> None:
    run = start("algorithm.use=ppo", "batch.group_size=1", "batch.groups=32", "phase.warm-up.steps=1")
    assert run.wait() == 0, run.stderr
    assert audit_run(run.directory).ok
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    values = [record["value/mean"] for record in map(json.loads, lines) if "value/mean" in record]
    assert len(values) == 5
    assert values[-1] > values[0], "rewards are above 0, and it begins at 0"


def test_a_run_over_tcp_passes_its_audit_and_writes_no_key_anywhere(start: Start) -> None:
    run = start("network.transport=tcp", "phase.warm-up.steps=1", "phase.rl.steps=2")
    follow(run, "batch_trained")
    secrets = keys_in_use(run)
    assert run.wait() == 0, run.stderr
    assert audit_run(run.directory).ok
    written = [path.read_bytes() for path in run.directory.rglob("*") if path.is_file()]
    written += [run.stdout.encode(), run.stderr.encode()]
    assert not any(secret.encode() in content for secret in secrets for content in written)


def test_another_seed_gives_another_run(start: Start) -> None:
    first, second = (
        start("staleness.policy=synchronous", "staleness.max_staleness=0", s) for s in ("job.seed=1", "job.seed=2")
    )
    assert (first.wait(), second.wait()) == (0, 0)
    assert digests(first)[-1] != digests(second)[-1]


def test_ctrl_c_ends_every_process_and_leaves_an_auditable_log(start: Start) -> None:
    run = start("phase.rl.steps=100000")
    follow(run, "batch_trained")
    below = descendants(run.process.pid)
    assert below
    run.interrupt()
    assert run.wait(seconds=30) == 130, run.stderr
    assert alive(below) == []
    assert events(run, "run_finished")[0]["status"] == "stopped"
    assert audit_run(run.directory).ok


def test_a_killed_controller_takes_every_process_with_it(start: Start) -> None:
    run = start("phase.rl.steps=100000")
    follow(run, "batch_trained")
    below = descendants(run.process.pid)
    handles = [os.pidfd_open(pid) for pid in below]
    run.process.send_signal(signal.SIGKILL)
    run.wait()
    for handle in handles:  # a pidfd is readable once its process has ended
        os.set_blocking(handle, True)
        assert _ended_within(handle, 10.0)
        os.close(handle)


def _ended_within(handle: int, seconds: float) -> bool:
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
