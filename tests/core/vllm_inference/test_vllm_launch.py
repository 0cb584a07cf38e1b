"""What is asked of vLLM before it is started."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any

import pytest

from headrace.errors import EngineError, PluginError
from headrace.validation import validate
from headrace_vllm import launch
from headrace_vllm.inference import VllmInferenceEngine

Settings = VllmInferenceEngine.Settings
Complete = type("Complete", (), dict.fromkeys(launch.METHODS))


@dataclasses.dataclass
class Arguments:
    model: str
    max_num_seqs: int


def test_names_that_are_all_there_are_accepted() -> None:
    launch.require_names(Complete, Arguments, {"model": "m"})


def test_every_missing_name_is_told_at_once() -> None:
    older = type("Older", (), dict.fromkeys(set(launch.METHODS) - {"start_weight_update", "pause_generation"}))
    with pytest.raises(EngineError) as raised:
        launch.require_names(older, Arguments, {"model": "m", "logprobs_mode": "processed_logprobs"})
    for name in ("AsyncLLM.pause_generation", "AsyncLLM.start_weight_update", "AsyncEngineArgs.logprobs_mode"):
        assert name in str(raised.value)
    assert launch.TESTED[-1] in str(raised.value)


def test_the_environment_that_a_person_set_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    launch.set_environment(threads=3)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"


def test_an_interpreter_without_vllm_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginError, match="needs vLLM") as raised:
        VllmInferenceEngine.preflight(Settings(), directory="", origin=str)
    assert "rollout.python" in str(raised.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"slots": 0}, "slots must be 1 to"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"kv_bytes": 0}, "kv_bytes must be at least 1"),
        ({"address": "127.0.0.1:8000"}, "address must be like http://127.0.0.1:8000, got '127.0.0.1:8000'"),
        ({"address": ["http://a:1", "http://a:1/"]}, "address names a server twice: http://a:1, http://a:1"),
        ({"address": "http://a:1", "eager": True, "engine": {"seed": 1}}, "eager, engine cannot be set with address"),
        ({"engine": {"max_num_seqs": 3, "tensor_parallel_size": 2}}, "engine must not set max_num_seqs:"),
    ],
)
def test_settings_that_cannot_work_are_refused(table: dict[str, Any], said: str) -> None:
    _, problems = validate(Settings, table)
    assert [problem.message for problem in problems if said in problem.message]


def test_it_declares_one_version_at_a_time() -> None:
    declared = VllmInferenceEngine.capabilities(Settings(slots=5, dtype="bfloat16", max_length=99))
    assert (declared.slots, declared.dtype, declared.max_length) == (5, "bfloat16", 99)
    assert (declared.live_versions, declared.kv_migration, declared.deterministic) == (1, False, False)


def test_there_are_as_many_instances_as_servers() -> None:
    for address, instances in (((), None), ("http://a:1", 1), (("http://a:1", "http://b:1"), 2)):
        assert VllmInferenceEngine.capabilities(Settings(address=address)).instances == instances


def test_what_reaches_a_server_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginError, match="needs aiohttp") as raised:
        VllmInferenceEngine.preflight(Settings(address="http://a:1"), directory="", origin="[rollout] {}".format)
    assert "[rollout] address" in str(raised.value)


def test_an_engine_that_was_not_started_serves_nothing_and_closes() -> None:
    async def unstarted() -> None:
        engine = VllmInferenceEngine(Settings())
        await engine.abort(["unknown"])
        with pytest.raises(EngineError, match="not serving"):
            await engine.health()
        await engine.close()
        assert [outputs async for outputs in engine.outputs()] == []

    asyncio.run(unstarted())
