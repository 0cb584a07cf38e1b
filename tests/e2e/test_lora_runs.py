"""Runs that train an adapter: after its base, a version is the adapter alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from headrace.observe.audit import audit_run
from headrace.observe.epochs import standing_events
from headrace.observe.events import VersionPublished
from support.whole_runs import PHASE_TWO, events, follow, pid_of

Start = Callable[..., Any]
LORA = "phase.rl.trainer={lora={rank=4,alpha=8.0},learning_rate=1e-2}"


def loads(run: Any, instance: str) -> dict[int, list[int]]:
    """Version → bytes fetched of it, each time."""
    found: dict[int, list[int]] = {}
    for event in events(run, "instance_version"):
        if event["instance"] == instance:
            found.setdefault(event["version"], []).append(event["nbytes"])
    return found


def published(run: Any) -> dict[int, Any]:
    return {e.version: e for e in standing_events(run.directory) if isinstance(e, VersionPublished)}


def test_instances_fetch_the_base_once_and_a_restarted_one_fetches_it_again(start: Start) -> None:
    run = start(LORA, "phase.rl.steps=100000")
    follow(run, "instance_version", after=PHASE_TWO, of='"instance":"rollout-1","version":6')
    os.kill(pid_of(run, "rollout-1"), signal.SIGKILL)
    again = follow(run, "instance_version", after='"kind":"node_stopped"', of='"instance":"rollout-1"')
    then = follow(run, "instance_version", after=f'"seq":{again["seq"]},', of='"instance":"rollout-1"')
    run.interrupt()
    assert run.wait() == 130, run.stderr
    assert audit_run(run.directory).ok
    whole = {version: event.nbytes for version, event in published(run).items()}
    adapter = whole[5] - whole[4]
    assert 0 < adapter * 4 < whole[4]
    kept = loads(run, "rollout-0")
    assert kept[4] == [whole[4]], "of the warm-up, which trains all weights"
    assert kept[5] == [whole[5]]
    assert {version: kept[version] for version in kept if version > 5} == {v: [adapter] for v in kept if v > 5}
    assert (again["nbytes"], then["nbytes"]) == (whole[5], adapter)


def test_a_resumed_run_with_an_adapter_equals_the_uninterrupted_one(start: Start, resume: Start) -> None:
    settings = (LORA, "phase.rl.steps=8", "checkpoint.every=3", "staleness.max_staleness=0")
    whole, killed = start(*settings), start(*settings)
    follow(killed, "checkpoint_saved", after=PHASE_TWO)
    killed.process.send_signal(signal.SIGKILL)
    killed.wait()
    resumed = resume(killed)
    assert resumed.wait() == whole.wait() == 0, resumed.stderr
    found, expected = (
        {version: (event.digest, event.nbytes) for version, event in published(run).items()} for run in (resumed, whole)
    )
    assert found == expected
    assert len({digest for digest, _ in found.values()}) == len(found), "every batch must change the weights"
    assert audit_run(resumed.directory).ok
