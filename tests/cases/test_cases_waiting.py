"""Cases H04 and H06: nothing holds an event loop up unseen, and nobody works for who has gone away."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from headrace.contract import Array, Completion, EnvironmentContext, Episode, VersionSpan
from headrace.registry import PluginSpec
from headrace.services import node
from headrace.services.controller import LAG_ALARM, Controller
from headrace.services.messages import CancelGroups, Member, Report, WorkerSetup, WorkItem, WorkRequest
from headrace.services.node_messages import Heartbeat, NodeSpec
from headrace.services.worker import WorkerService
from headrace.wire import Network, rpc
from headrace_environments.jsonl import Jsonl, JsonlSettings
from headrace_environments.text import LONG_TEXT
from support.desk import Desk, turns

DEADLINE = 30.0


@pytest.fixture
def environment(tmp_path: Path) -> Jsonl:
    """A data set with a prompt of 128k tokens and a short one."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "<eos>": 2}, []))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    records = [{"prompt": prompt, "answer": "b"} for prompt in ("a" * (128 << 10), "ab")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    environment = Jsonl(JsonlSettings(path="data.jsonl", evaluation_share=0.0))
    environment.start(EnvironmentContext(model_path=str(tmp_path), seed=0, directory=str(tmp_path)))
    environment._prompts.clear()
    return environment


class Session:
    """Answers with one token, or with very many."""

    def __init__(self, tokens: int = 1) -> None:
        self.asked: list[int] = []
        self._tokens = tokens

    async def generate(self, prompt: Array, **limits: Any) -> Completion:
        self.asked.append(len(prompt))
        ones = np.ones(self._tokens, dtype=np.int32)
        spans = (VersionSpan(version=0, start=0, stop=len(ones)),)
        return Completion(token_ids=ones, logprobs=-ones.astype(np.float32), spans=spans, finish_reason="length")


# ---------------------------------------------------------------- H04


@pytest.mark.parametrize("text", ["prompt", "answer"])
async def test_H04_a_text_of_128k_tokens_is_worked_on_beside_the_event_loop(
    environment: Jsonl, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer waits for the event loop, which is free to let it go."""
    name, task = ("prompt", 0) if text == "prompt" else ("decode", 1)
    original, let_go, began = getattr(environment.tokenizer, name), threading.Event(), threading.Event()

    def held(*arguments: Any, **options: Any) -> Any:
        began.set()
        assert let_go.wait(DEADLINE), "the event loop stood still"
        return original(*arguments, **options)

    monkeypatch.setattr(environment.tokenizer, name, held)
    session = Session(tokens=LONG_TEXT if text == "answer" else 1)
    playing = asyncio.ensure_future(environment.run(environment.task(task, split="train"), session))
    assert await asyncio.to_thread(began.wait, DEADLINE)
    assert not playing.done()
    let_go.set()
    assert isinstance(await playing, Episode)
    assert session.asked == [128 << 10 if text == "prompt" else 2]


async def test_H04_the_members_of_a_group_share_the_tokens_of_their_long_prompt(
    environment: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    original = environment._encoded

    def counted(text: str) -> Array:
        encoded.append(len(text))
        return original(text)

    monkeypatch.setattr(environment, "_encoded", counted)
    task = environment.task(0, split="train")
    await asyncio.gather(*(environment.run(task, Session()) for _ in range(8)))
    assert encoded == [128 << 10]


async def test_H04_a_loop_that_was_blocked_between_two_heartbeats_says_for_how_long(tmp_path: Path) -> None:
    """Also when it was free again by the time of the second one."""
    beats: list[Heartbeat] = []
    loop = asyncio.get_running_loop()

    class Controller:
        async def call(self, method: str, beat: Heartbeat, **_: Any) -> None:
            beats.append(beat)
            if len(beats) == 1:
                loop.call_soon(block)
            else:
                raise EOFError

    def block() -> None:
        until = loop.time() + 0.5
        while loop.time() < until:
            pass

    network = Network.create(str(tmp_path), host=None)
    spec = NodeSpec(name="environment-0", role="environment", start=0, controller="", network=network, setup=b"")
    service = SimpleNamespace(spec=spec, kv_used=None, parked=0)
    with pytest.raises(EOFError):
        await node._beat(service, Controller())  # type: ignore[arg-type]  # what it reads, and calls only
    assert beats[0].loop_lag == 0
    assert beats[1].loop_lag > 0.3


async def test_H04_the_longest_lag_is_measured_and_a_long_one_is_told_once() -> None:
    told: list[str] = []
    desk = Desk()
    controller = Controller(emit=desk.emit, fleet=desk.fleet, ledger=desk.ledger, notice=told.append)
    controller.supervisor = Heard()  # type: ignore[assignment]  # heartbeats only
    for process, lag in [("a.0", 0.1), ("a.0", LAG_ALARM + 1), ("b.0", 0.2), ("a.0", LAG_ALARM + 2), ("b.0", 0.0)]:
        await controller.heartbeat(Heartbeat(node=process, loop_lag=lag))
    assert controller.tally.loop_lag == LAG_ALARM + 2
    (line,) = told
    assert "a.0" in line
    assert "3.0 s" in line


class Heard:
    def heartbeat(self, beat: Heartbeat) -> None:
        return


# ---------------------------------------------------------------- H06


class GivesOneItem:
    """A controller with one group of four to play, as soon as :attr:`ready` is set."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.asked = asyncio.Event()
        self.entries: list[str] = []

    @rpc
    async def next_work(self, request: WorkRequest) -> WorkItem | None:
        self.asked.set()
        await self.ready.wait()
        self.ready.clear()
        self.asked.clear()
        members = [Member(trajectory=n, task=0, instance="", seed=n) for n in range(4)]
        return WorkItem(
            kind="demonstration",
            group=0,
            version=0,
            split="train",
            members=members,
            max_new_tokens=1,
            temperature=1.0,
        )

    @rpc
    async def report(self, report: Report) -> None:
        self.entries += [type(entry).__name__ for entry in report.entries]


def tasks() -> Counter[str]:
    """Of this loop, by what they run."""
    return Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]  # a coroutine


async def test_H06_a_group_that_is_cancelled_leaves_no_task_behind_its_judge_and_no_score_in_the_queue(
    environment: Jsonl, tmp_path: Path
) -> None:
    """One judge that is never done, three that wait for it; cancelling does not wait for any of them."""
    os.mkfifo(tmp_path / "begun")
    (tmp_path / "judge.py").write_text(
        "import os, time\n"
        "def reward(answer):\n"
        f"    open({str(tmp_path / 'judged')!r}, 'a').write('x')\n"
        f"    open({str(tmp_path / 'begun')!r}, 'w').close()\n"
        "    time.sleep(600)\n"
    )
    settings = {"path": "data.jsonl", "evaluation_share": 0.0, "reward": "./judge.py:reward"}
    network = Network.create(str(tmp_path), host=None)
    desk = GivesOneItem()
    server = network.server(desk, name="controller")
    setup = WorkerSetup(
        environment=PluginSpec(role="environment", use="jsonl", settings=settings, directory=str(tmp_path)),
        model_path=str(tmp_path),
        seed=0,
        ledger=await server.start(),
        episode_deadline=600.0,
        scoring_workers=1,
        scoring_deadline=600.0,
        python=sys.executable,
        log_path="",
    )
    spec = NodeSpec(
        name="environment-0",
        role="environment",
        start=0,
        controller=setup.ledger,
        network=network,
        setup=msgspec.msgpack.encode(setup),
    )
    service = WorkerService(spec)
    try:
        await service.start()
        async with asyncio.timeout(DEADLINE):
            await desk.asked.wait()
            before = tasks()
            desk.ready.set()
            await asyncio.to_thread((tmp_path / "begun").read_bytes)  # returns when the first is being judged
            await service.cancel(CancelGroups(groups=[0]))
            while tasks() != before:
                await turns()
        assert (tmp_path / "judged").read_text() == "x"
        assert "GroupFailed" not in desk.entries, "a group that nobody wants has not failed"
    finally:
        await service.cancel_background()
        await service.close()
        await server.close()
