"""Updates that cannot be, requests in their way, and the ends that vLLM and its owner may come to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Array
from headrace.errors import EngineError
from headrace.testing.suites.serving import Served, request
from headrace.testing.tensors import read_tensors
from support.reference_model import gap, write_model
from support.vllm_served import KV_BYTES, engine_processes, started
from support.whole_runs import alive, descendants

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

PROMPT = np.arange(3, 9, dtype=np.int32)
CLOSE = 2e-5

OWNER = """
import asyncio, sys
from headrace.contract import InferenceContext
from headrace_vllm.inference import VllmInferenceEngine


async def main():
    engine = VllmInferenceEngine(VllmInferenceEngine.Settings(slots=2, kv_bytes=int(sys.argv[2])))
    await engine.start(InferenceContext(name="rollout-0", model_path=sys.argv[1], version=0, threads=1))
    print("READY", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    first, second = (write_model(tmp_path / name, "qwen3", seed=n) for n, name in enumerate("ab"))
    return first, second


async def first_tokens(served: Served, name: str) -> None:
    """Wait until a streamed request has some."""
    while not (name in served.answers and served.answers[name].tokens):
        await served.next_outputs(f"the first token of {name}")


async def test_an_aborted_request_has_the_log_probs_of_what_it_got(models: tuple[str, str]) -> None:
    """Also one that is not streamed: its tokens go on elsewhere, or under another version."""
    async with started(models[0]) as served:
        await served.engine.submit([request("kept", PROMPT, max_new_tokens=240), request("seen", PROMPT, stream=True)])
        await first_tokens(served, "seen")
        await served.engine.abort(["kept", "seen"])
        kept, _ = await served.finish(["kept", "seen"])
        assert kept.reason == "aborted"
        assert 0 < len(kept.tokens) < 240
        assert gap(models[0], PROMPT, kept) < CLOSE
        assert [(span.version, span.start, span.stop) for span in kept.spans] == [(0, 0, len(kept.tokens))]


async def test_a_version_waits_for_open_requests(models: tuple[str, str]) -> None:
    async with started(models[0]) as served:
        update = await served.stage(read_tensors(models[1]), 1)
        await served.engine.submit([request("open", PROMPT, stream=True, max_new_tokens=200)])
        await first_tokens(served, "open")
        with pytest.raises(EngineError, match="1 requests are open"):
            await update.commit()
        await served.engine.abort(["open"])
        await served.finish(["open"])
        await update.commit()
        asked = request("next", PROMPT, version=1)
        (answer,) = await served.generate(asked)
        assert gap(models[1], PROMPT, answer) < CLOSE


async def test_requests_that_come_while_weights_change_wait_and_are_refused(models: tuple[str, str]) -> None:
    async with started(models[0]) as served:
        update = await served.stage(read_tensors(models[1]), 1)
        committing = asyncio.create_task(update.commit())
        for _ in range(3):
            await asyncio.sleep(0)  # it has begun
        with pytest.raises(EngineError, match=r"asks for version 0; live are \[1\]"):
            await served.engine.submit([request("late", PROMPT)])
        await committing


async def test_an_update_that_is_no_longer_waited_for_is_finished(models: tuple[str, str]) -> None:
    async with started(models[0]) as served:
        update = await served.stage(read_tensors(models[1]), 1)
        committing = asyncio.create_task(update.commit())
        await asyncio.sleep(0)  # it has begun
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        await update.abort()
        (answer,) = await served.generate(request("next", PROMPT, version=1))
        assert gap(models[1], PROMPT, answer) < CLOSE


@pytest.mark.parametrize("change", ["renamed", "missing", "damaged"])
async def test_weights_that_are_not_the_models_are_refused_by_name(models: tuple[str, str], change: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors: dict[str, Array] = read_tensors(models[1])
    async with started(models[0]) as served:
        if change == "damaged":
            update = await served.stage(tensors, 1)
            await update.apply(name, tensors[name] + 1)
        else:
            tensors = {(f"{n}_" if n == name else n): t for n, t in tensors.items() if change == "renamed" or n != name}
            update = await served.stage(tensors, 1)
        with pytest.raises(EngineError, match=name):
            await update.commit()
        (answer,) = await served.generate(request("still", PROMPT))
        assert gap(models[0], PROMPT, answer) < CLOSE


async def test_a_vllm_that_dies_fails_its_instance_and_not_in_silence(models: tuple[str, str]) -> None:
    async with started(models[0]) as served:
        await served.engine.submit([request("open", PROMPT, stream=True, max_new_tokens=200)])
        await first_tokens(served, "open")
        for pid in engine_processes():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="rollout-0"):
            await served.finish(["open"])
        with pytest.raises(EngineError):
            await served.engine.health()
        with pytest.raises(EngineError):
            await served.engine.submit([request("late", PROMPT)])


async def test_nothing_is_left_of_a_closed_engine(models: tuple[str, str]) -> None:
    async with started(models[0]) as served:
        mine = engine_processes()
        assert mine
        await served.close()
        assert alive(mine) == []


def test_vllm_ends_with_a_node_that_is_killed(models: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen([sys.executable, str(script), models[0], str(KV_BYTES)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert any("READY" in line for line in owner.stdout), "the engine did not start"
    below = descendants(owner.pid)
    assert below
    owner.kill()
    owner.wait()
    owner.stdout.close()
    while alive(below):  # the kernel kills them; the test's own time limit is the deadline
        os.sched_yield()
