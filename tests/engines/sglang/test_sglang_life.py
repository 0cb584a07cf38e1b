"""Updates that cannot be, requests in their way, and the ends that SGLang and its owner may come to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Array
from headrace.errors import EngineError
from headrace.testing.suites.serving import Served, request
from headrace.testing.tensors import read_tensors
from support.reference_model import gap
from support.sglang_served import KV_TOKENS, engine_processes, started
from support.whole_runs import alive, descendants

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

PROMPT = np.arange(3, 9, dtype=np.int32)
CLOSE = 2e-5
Models = Callable[[str], tuple[str, str]]
Address = Callable[[str], str]

OWNER = """
import asyncio, sys
from headrace.contract import InferenceContext
from headrace_sglang.inference import SglangInferenceEngine


async def main():
    engine = SglangInferenceEngine(SglangInferenceEngine.Settings(slots=2, kv_tokens=int(sys.argv[2])))
    await engine.start(InferenceContext(name="rollout-0", model_path=sys.argv[1], version=0, threads=1))
    print("READY", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
"""


async def first_tokens(served: Served, name: str) -> None:
    """Wait until a streamed request has some."""
    while not (name in served.answers and served.answers[name].tokens):
        await served.next_outputs(f"the first token of {name}")


async def test_an_aborted_request_has_the_log_probs_of_what_it_got(models: Models, address: Address) -> None:
    """Also one that is not streamed: its tokens go on elsewhere, or under another version."""
    path, _ = models("qwen3")
    async with started(path, address=address("qwen3")) as served:
        await served.engine.submit([request("kept", PROMPT, max_new_tokens=240), request("seen", PROMPT, stream=True)])
        await first_tokens(served, "seen")
        await served.engine.abort(["kept", "seen"])
        kept, _ = await served.finish(["kept", "seen"])
        assert kept.reason == "aborted"
        assert 0 < len(kept.tokens) < 240
        assert gap(path, PROMPT, kept) < CLOSE
        assert [(span.version, span.start, span.stop) for span in kept.spans] == [(0, 0, len(kept.tokens))]


async def test_a_request_that_is_aborted_at_once_ends(models: Models, address: Address) -> None:
    """SGLang ignores an abort that overtakes its request."""
    path, _ = models("qwen3")
    async with started(path, address=address("qwen3")) as served:
        await served.engine.submit([request("gone", PROMPT, max_new_tokens=240)])
        await served.engine.abort(["gone"])
        (gone,) = await served.finish(["gone"])
        assert gone.reason == "aborted"
        assert len(gone.tokens) < 240


async def test_an_abort_ends_no_request_whose_name_begins_alike(models: Models, address: Address) -> None:
    path, _ = models("qwen3")
    async with started(path, address=address("qwen3")) as served:
        names = ["r", "r1", "r12"]
        await served.engine.submit([request(name, PROMPT, stream=True, max_new_tokens=100) for name in names])
        for name in names:
            await first_tokens(served, name)
        await served.engine.abort(["r1"])
        answers = await served.finish(names)
        assert [answer.reason for answer in answers] == ["length", "aborted", "length"]


async def test_a_version_waits_for_open_requests(models: Models, address: Address) -> None:
    first, second = models("qwen3")
    async with started(first, address=address("qwen3")) as served:
        update = await served.stage(read_tensors(second), 1)
        await served.engine.submit([request("open", PROMPT, stream=True, max_new_tokens=200)])
        await first_tokens(served, "open")
        with pytest.raises(EngineError, match="1 requests are open"):
            await update.commit()
        await served.engine.abort(["open"])
        await served.finish(["open"])
        await update.commit()
        (answer,) = await served.generate(request("next", PROMPT, version=1))
        assert gap(second, PROMPT, answer) < CLOSE


async def test_requests_that_come_while_weights_change_wait_and_are_refused(models: Models, address: Address) -> None:
    first, second = models("qwen3")
    async with started(first, address=address("qwen3")) as served:
        update = await served.stage(read_tensors(second), 1)
        committing = asyncio.create_task(update.commit())
        for _ in range(3):
            await asyncio.sleep(0)  # it has begun
        with pytest.raises(EngineError, match=r"asks for version 0; live are \[1\]"):
            await served.engine.submit([request("late", PROMPT)])
        await committing


async def test_an_update_that_is_no_longer_waited_for_is_finished(models: Models, address: Address) -> None:
    first, second = models("qwen3")
    async with started(first, address=address("qwen3")) as served:
        update = await served.stage(read_tensors(second), 1)
        committing = asyncio.create_task(update.commit())
        await asyncio.sleep(0)  # it has begun
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        await update.abort()
        (answer,) = await served.generate(request("next", PROMPT, version=1))
        assert gap(second, PROMPT, answer) < CLOSE


@pytest.mark.parametrize("change", ["renamed", "missing", "damaged"])
async def test_weights_that_are_not_the_models_are_refused_by_name(
    models: Models, address: Address, change: str
) -> None:
    first, second = models("qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors: dict[str, Array] = read_tensors(second)
    async with started(first, address=address("qwen3")) as served:
        if change == "damaged":
            update = await served.stage(tensors, 1)
            await update.apply(name, tensors[name] + 1)
        else:
            tensors = {(f"{n}_" if n == name else n): t for n, t in tensors.items() if change == "renamed" or n != name}
            update = await served.stage(tensors, 1)
        with pytest.raises(EngineError, match=name):
            await update.commit()
        (answer,) = await served.generate(request("still", PROMPT))
        assert gap(first, PROMPT, answer) < CLOSE


async def test_a_server_with_other_arguments_is_not_attached_to(models: Models, address: Address) -> None:
    path, _ = models("qwen3")
    with pytest.raises(EngineError, match="max_running_requests") as refused:
        async with started(path, address=address("qwen3"), slots=64):
            pass
    assert "--sampling-backend headrace" in refused.value.fix


async def test_two_servers_draw_the_same_and_one_that_dies_fails_its_instance_alone(models: Models) -> None:
    """Each is started by its instance, and ends with it."""
    path, _ = models("qwen3")
    before = set(engine_processes())
    async with started(path) as other, started(path) as served:
        answers = [await each.generate(request("same", PROMPT, seed=11)) for each in (other, served)]
        assert answers[0][0].tokens == answers[1][0].tokens
        await served.engine.submit([request("open", PROMPT, stream=True, max_new_tokens=200)])
        await first_tokens(served, "open")
        _kill_newest_server()
        with pytest.raises(EngineError, match="rollout-0"):
            await served.finish(["open"])
        with pytest.raises(EngineError):
            await served.engine.health()
        with pytest.raises(EngineError):
            await served.engine.submit([request("late", PROMPT)])
        (answer,) = await other.generate(request("here", PROMPT))
        assert gap(path, PROMPT, answer) < CLOSE
        mine = set(engine_processes()) - before
        assert mine
        await served.close()
        await other.close()
        assert alive(sorted(mine)) == []


def _kill_newest_server() -> None:
    children = set(engine_processes())
    own = [pid for pid in children if not any(pid in descendants(parent) for parent in children - {pid})]
    os.kill(max(own), signal.SIGKILL)


def test_sglang_ends_with_a_node_that_is_killed(models: Models, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    path, _ = models("qwen3")
    owner = subprocess.Popen([sys.executable, str(script), path, str(KV_TOKENS)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert any("READY" in line for line in owner.stdout), "the engine did not start"
    below = descendants(owner.pid)
    assert below
    owner.kill()
    owner.wait()
    owner.stdout.close()
    while alive(below):  # the kernel kills them; the test's own time limit is the deadline
        os.sched_yield()


async def test_an_argument_that_sglang_does_not_have_is_told_and_leaves_nothing(models: Models) -> None:
    path, _ = models("qwen3")
    before = set(engine_processes())
    with pytest.raises(EngineError, match="SGLang's server ended with status 1"):
        async with started(path, engine={"no_such_argument": 1}):
            pass
    assert set(engine_processes()) <= before
