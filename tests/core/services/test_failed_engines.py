"""An engine that fails is no answer to who asks its node: the node ends. What one raises that lives is an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.contract import EngineHealth, Interruption
from headrace.errors import EngineError, WireError
from headrace.services import rollout
from headrace.services.messages import LoadCall, VersionCall, VersionLoaded
from headrace.services.request_messages import SwitchCall, Switched
from headrace.wire import Network
from support.instances import Instance, asking, begun, until
from support.published import Published

GONE = EngineError("the engine's process is gone")


class Failing(Instance):
    """A node whose engine the test has fail."""

    def fail(self) -> None:
        """As an engine does whose process has ended."""
        self.engine._failure = GONE

    def fail_in(self, owner: object, method: str, patch: pytest.MonkeyPatch) -> None:
        """Fail in the middle of a method of the engine's."""

        def failing(*_: Any, **__: Any) -> None:
            self.fail()
            raise EngineError(f"{method}: the connection was reset")

        patch.setattr(owner, method, failing)

    async def ends(self, *asked: asyncio.Task[Any]) -> None:
        """The node has failed, and ends as it does then; none of these calls was answered."""
        await until(lambda: self.service.failed.done() or any(call.done() for call in asked))
        assert self.service.failed.done(), "a call was answered"
        await self.client.close()
        for call in asked:
            with pytest.raises(WireError, match="was closed during the call"):
                await call


@pytest.fixture
async def instance(tmp_path: Path) -> AsyncIterator[Failing]:
    """It serves version 0, and no other besides."""
    network = Network.create(str(tmp_path))
    instance = Failing("rollout-0", tmp_path, network, {"live_versions": 1}, publisher=Published(tmp_path).address)
    await instance.start(network)
    await instance.ask("load_version", LoadCall(version=0, probe=None), VersionLoaded)
    yield instance
    await instance.close()


def loading(instance: Instance, version: int, interruption: Interruption | None = None) -> asyncio.Task[Any]:
    call = LoadCall(version=version, probe=None, interruption=interruption)
    return asyncio.create_task(instance.ask("load_version", call, VersionLoaded))


async def test_an_engine_that_dies_while_a_version_is_loaded_ends_its_node(
    instance: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.fail_in(instance.engine, "_commit", monkeypatch)
    await instance.ends(loading(instance, 1))


async def test_weights_that_a_living_engine_refuses_are_told_to_who_asked(instance: Failing) -> None:
    with pytest.raises(EngineError, match="version 9 is incomplete"):
        await loading(instance, 9)
    assert not instance.service.failed.done()


async def test_an_engine_that_does_not_say_how_it_is_counts_as_failed(
    instance: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent() -> EngineHealth:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(rollout, "HEALTH_DEADLINE", 0.01)
    monkeypatch.setattr(instance.engine, "health", silent)
    await instance.ends(loading(instance, 9))


async def test_answers_that_a_dying_engine_has_begun_are_lost_with_its_node_and_not_failed(
    instance: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their trajectories are generated again elsewhere, and that is not one of their attempts."""
    answer = await begun(instance, asking(version=0))
    instance.fail_in(instance.engine, "_commit", monkeypatch)
    monkeypatch.setattr(instance.engine, "import_request", _raise)
    await instance.ends(loading(instance, 1, Interruption()), answer)


async def test_an_engine_that_dies_while_requests_are_taken_out_of_it_keeps_its_node_from_nothing(
    instance: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await begun(instance, asking(version=0))
    requests, aborted = instance.service._requests, asyncio.Event()
    requests.migration = None

    async def dying(request_ids: Any) -> None:
        """Their last outputs do not come."""
        aborted.set()

    monkeypatch.setattr(instance.engine, "abort", dying)
    load = loading(instance, 1, Interruption())
    await aborted.wait()
    instance.fail()
    instance.engine._outputs.put_nowait(None)
    await instance.ends(load, answer)
    await instance.close()


async def test_a_request_that_a_dead_engine_does_not_take_is_not_answered(
    instance: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance.engine, "submit", _raise)
    instance.fail()
    await instance.ends(asyncio.create_task(instance.ask("generate", asking(version=0))))


async def test_neither_a_switch_nor_a_retirement_is_answered_by_a_dead_engine(
    instance: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance.engine, "retire", _raise)
    monkeypatch.setattr(instance.service._interruptions, "switch", _raise)
    instance.fail()
    switch = SwitchCall(version=0, interruption=Interruption())
    await instance.ends(
        asyncio.create_task(instance.ask("retire_version", VersionCall(version=0), type(None))),
        asyncio.create_task(instance.ask("switch_version", switch, Switched)),
    )


async def _raise(*_: Any) -> None:
    raise GONE
