"""Whole runs whose rollout is vLLM, in an environment of its own. Run by ``make test-engines``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from headrace_torch.training import TorchTrainingEngine
from support.small_job import SmallJob
from support.vllm_served import server
from support.whole_runs import alive, descendants, events, follow, pid_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Start = Callable[..., Any]
PYTHON = Path(__file__).parents[2] / "build" / "vllm" / "bin" / "python"
VLLM = (
    "rollout.use=vllm",
    f"rollout.python={PYTHON}",
    "rollout.kv_bytes=67108864",
    "model.scratch.hidden_size=64",  # two heads of 32 numbers, the smallest that vLLM computes on a CPU
)
INTERRUPTED = (
    "staleness.policy=partial_rollout",
    "rollout.instances=1",
    "rollout.max_new_tokens=200",
    "model.scratch.max_length=256",
    "phase.rl.steps=8",
)
SECONDS = 500.0


def checks(run: Any) -> list[float]:
    return [event["mean_abs_logprob_diff"] for event in events(run, "self_check")]


def metrics(run: Any, name: str) -> list[float]:
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [record[name] for record in map(json.loads, lines) if record.get(name) is not None]


def test_two_instances_serve_pinned_trajectories_and_the_audit_passes(start: Start) -> None:
    run = start(*VLLM, "phase.rl.steps=8")
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    assert len(events(run, "batch_trained")) == 12
    assert max(checks(run)) < 1e-4
    versions = {(event["instance"], event["version"]) for event in events(run, "instance_version")}
    assert len({version for _, version in versions}) > 4
    assert {instance for instance, _ in versions} == {"rollout-0", "rollout-1"}


@pytest.mark.parametrize("transport", ["shared_memory", "zmq", "disk"])
def test_weights_come_by_every_transport_of_one_machine(start: Start, transport: str) -> None:
    run = start(*VLLM, "rollout.instances=1", f"weights.use={transport}", "phase.rl.steps=3")
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    assert audit_run(run.directory).ok
    assert max(checks(run)) < 1e-4


def test_without_staleness_what_was_sampled_is_what_the_trainer_computes(start: Start) -> None:
    run = start(*VLLM, "rollout.instances=1", "staleness.policy=synchronous", "staleness.max_staleness=0")
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    assert audit_run(run.directory).ok
    found = metrics(run, "mismatch/abs_logprob_diff_mean")
    assert len(found) == 5
    assert max(found) < 1e-5


TELLING = '''"""vLLM's own word of which weights sampled the tokens of each piece of an answer, kept beside the run."""

import json
from pathlib import Path

from headrace_vllm import inference
from headrace_vllm.tokens import Answer


class Noted(Answer):
    def output(self, reply, *, served=None):
        (completion,) = reply.outputs
        if completion.finish_reason is not None:
            spans = [[int(span.version), span.start, span.end] for span in completion.weight_versions]
            with Path(__file__).with_name("told.jsonl").open("a") as file:
                file.write(json.dumps([self.request.request_id, spans]) + "\\n")
        return super().output(reply, served=served)


inference.Answer = Noted


class Telling(inference.VllmInferenceEngine):
    """As it is."""
'''


def told_spans(path: Path) -> dict[int, list[list[int]]]:
    """Of each trajectory, from the pieces that the engine gave its answer in: adjacent ones of one version are one."""
    found: dict[int, list[list[int]]] = {}
    for request_id, pieces in map(json.loads, path.read_text().splitlines()):
        if not request_id.startswith("rollout-"):
            continue
        spans = found.setdefault(int(request_id.split("-")[2]), [])
        before = spans[-1][2] if spans else 0
        for version, start, stop in pieces:
            if start == stop:
                continue
            if spans and spans[-1][0] == version:
                spans[-1][2] = before + stop
            else:
                spans.append([version, before + start, before + stop])
    return found


def test_recorded_versions_of_interrupted_answers_are_those_that_vllm_itself_reports(
    job: SmallJob, tmp_path: Path
) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    run = job.start(*VLLM, "rollout.use='./telling.py:Telling'", *INTERRUPTED)
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    told = told_spans(tmp_path / "told.jsonl")
    recorded = {event["trajectory"]: event["spans"] for event in events(run, "trajectory_finished") if event["spans"]}
    assert recorded == {trajectory: told[trajectory] for trajectory in recorded}
    assert sum(len(spans) > 1 for spans in recorded.values()) > 0


def test_an_instance_that_is_killed_is_started_again_and_its_vllm_ends_with_it(start: Start) -> None:
    run = start(*VLLM, "rollout.instances=1", "phase.rl.steps=20")
    follow(run, "batch_trained", of='"version":5')
    node = pid_of(run, "rollout-0")
    below = descendants(node)
    os.kill(node, signal.SIGKILL)
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    assert audit_run(run.directory).ok
    assert len([event for event in events(run, "node_started") if event["node"] == "rollout-0"]) == 2
    assert alive(below) == []


DYING = '''"""vLLM's processes are killed while version 5 is loaded, the first time that anybody does."""

import multiprocessing
from pathlib import Path

from headrace_vllm.inference import VllmInferenceEngine


class Dying(VllmInferenceEngine):
    async def _take_up(self, manifest, staged):
        if manifest.version == 5:
            try:
                Path(__file__).with_name("died").mkdir()
                for process in multiprocessing.active_children():
                    process.kill()
            except FileExistsError:
                pass
        await super()._take_up(manifest, staged)
'''


@pytest.mark.parametrize("policy", ["multi_version", "partial_rollout"])
def test_a_vllm_that_dies_while_a_version_is_loaded_costs_its_instance_alone(
    job: SmallJob, tmp_path: Path, policy: str
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    run = job.start(
        *VLLM,
        "rollout.use='./dying.py:Dying'",
        "rollout.instances=1",
        "phase.rl.steps=20",
        f"staleness.policy={policy}",
    )
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    assert audit_run(run.directory).ok
    stopped = events(run, "node_stopped")[0]
    assert (stopped["node"], stopped["reason"]) == ("rollout-0", "ended with status 1")
    assert len([event for event in events(run, "node_started") if event["node"] == "rollout-0"]) == 2
    assert "EngineDeadError" in (run.directory / "logs" / "rollout-0.log").read_text()


def test_nothing_of_vllm_outlives_a_run_that_is_killed(start: Start) -> None:
    run = start(*VLLM)
    follow(run, "batch_trained", of='"version":4')
    below = descendants(run.process.pid)
    run.process.kill()
    run.process.communicate()
    while alive(below):  # the kernel kills them; the test's own time limit is the deadline
        os.sched_yield()


SCRATCH = {
    "architecture": "llama",
    "alphabet": "0123456789abcdefghijklmnopqrstuvwxyz=",
    "hidden_size": 64,
    "layers": 1,
    "heads": 2,
    "intermediate_size": 64,
    "max_length": 64,
}
"""The small job's model, as wide as vLLM needs it."""


def test_a_job_trains_on_a_server_that_runs_already_and_leaves_it_running(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    TorchTrainingEngine.create_model(str(model), settings=SCRATCH, seed=1)
    with server(str(model), tmp_path / "server.log", python=str(PYTHON)) as (address, process):
        for steps in (5, 2):  # the second job finds the first one's weights
            run = start(
                "rollout.use=vllm",
                f"rollout.python={PYTHON}",
                f"rollout.address={address}",
                "rollout.instances=1",
                "rollout.slots=8",
                "model.scratch.hidden_size=64",
                f"phase.rl.steps={steps}",
            )
            assert run.wait(seconds=SECONDS) == 0, run.stderr
            assert audit_run(run.directory).ok
            assert max(checks(run)) < 1e-4
            assert process.poll() is None
