"""Case G11: trainer and engine must agree on one prompt before anything is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.contract import Batch, Completion, Ragged, VersionSpan, WeightManifest
from headrace.errors import EngineError
from headrace.services.fleet import Fleet
from headrace.services.messages import Published, VersionLoaded
from headrace.services.request_messages import Generated

SAMPLED = np.array([3, 4, 5], dtype=np.int32)
DIGEST = "d"
LOGPROBS = np.array([-1.0, -2.0, -0.5], dtype=np.float32)


class Node:
    """Answers ``generate`` as an engine and ``logprobs`` as a trainer whose numbers are off by ``gap``."""

    def __init__(self, gap: float) -> None:
        self._gap = gap

    async def call(self, method: str, request: Any = None, **_: Any) -> Any:
        if method == "load_version":
            scored = None if request.probe is None else with_prompt(LOGPROBS + self._gap)
            return VersionLoaded(version=request.version, digest=DIGEST, transfer_seconds=0.0, logprobs=scored)
        if method == "generate":
            span = VersionSpan(version=0, start=0, stop=len(SAMPLED))
            completion = Completion(token_ids=SAMPLED, logprobs=LOGPROBS, spans=(span,), finish_reason="length")
            return Generated(completion=completion)
        if method == "retire_version":
            return None
        values = with_prompt(LOGPROBS + self._gap)
        return Batch(rows=request.rows, columns={"logprobs": Ragged.from_arrays([values])})


def with_prompt(logprobs: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], logprobs]).astype(np.float32)


def new_fleet(events: list[dict[str, Any]], gap: float) -> Fleet:
    return Fleet(
        emit=lambda kind, **fields: events.append(fields),
        spawn=lambda work, name: work.close(),
        connect=lambda address: Node(gap),  # type: ignore[arg-type,return-value]  # calls only
        temperature=1.0,
        tolerance=1e-3,
    )


async def self_check(gap: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    fleet = new_fleet(events, gap)
    fleet.join("rollout-0", "nowhere", slots=1, live_versions=2)
    fleet.published(published(0, logprobs=None))
    await fleet.load_everywhere(0)
    assert await fleet.self_check(Node(gap), 0)  # type: ignore[arg-type]  # calls only
    return [event for event in events if "tolerance" in event]


def published(version: int, *, logprobs: np.ndarray | None) -> Published:
    manifest = WeightManifest(version=version, digest=DIGEST, nbytes=1, tensors=())
    return Published(manifest=manifest, logprobs=logprobs)


async def test_G11_an_engine_that_disagrees_with_the_trainer_stops_the_run_with_the_gap() -> None:
    with pytest.raises(EngineError, match=r"rollout-0 disagree .* 0\.25"):
        await self_check(0.25)


async def test_G11_an_engine_that_is_not_finite_is_refused_too() -> None:
    with pytest.raises(EngineError):
        await self_check(float("nan"))


async def test_G11_agreement_is_logged_with_its_gap() -> None:
    (event,) = await self_check(1e-5)
    assert event["instance"] == "rollout-0"
    assert event["tolerance"] == 1e-3
    assert event["mean_abs_logprob_diff"] == pytest.approx(1e-5, rel=0.1)


async def test_G11_a_later_version_is_probed_with_what_the_model_sampled_and_its_disagreement_is_logged() -> None:
    events: list[dict[str, Any]] = []
    fleet = new_fleet(events, 0.0)
    fleet.join("rollout-0", "nowhere", slots=1, live_versions=2)
    fleet.published(published(0, logprobs=None))
    await fleet.load_everywhere(0)
    assert await fleet.self_check(Node(0.0), 0)  # type: ignore[arg-type]  # calls only
    assert fleet.probe is not None
    assert fleet.probe.tokens[1:].tolist() == SAMPLED.tolist()
    fleet.published(published(1, logprobs=with_prompt(LOGPROBS + 0.5)))
    with pytest.raises(EngineError, match=r"rollout-0 disagree .* 0\.5"):
        await fleet.load_everywhere(1)
    assert events[-1]["mean_abs_logprob_diff"] == pytest.approx(0.5)


async def test_G11_when_every_instance_is_lost_the_self_check_says_that_nothing_was_checked() -> None:
    assert not await new_fleet([], 0.0).self_check(Node(0.0), 0)  # type: ignore[arg-type]  # calls only


async def test_G11_an_instance_that_joins_during_the_self_check_is_checked_too() -> None:
    events: list[dict[str, Any]] = []
    fleet = new_fleet(events, 0.0)
    fleet.published(published(0, logprobs=None))
    fleet.join("rollout-0", "nowhere", slots=1, live_versions=2)
    await fleet.load_everywhere(0)

    class Trainer(Node):
        async def call(self, method: str, request: Any = None, **told: Any) -> Any:
            if len(fleet) == 1:
                fleet.join("rollout-1", "elsewhere", slots=1, live_versions=2)
                await fleet.load_everywhere(0)
            return await super().call(method, request, **told)

    assert await fleet.self_check(Trainer(0.0), 0)  # type: ignore[arg-type]  # calls only
    assert [event["instance"] for event in events if "tolerance" in event] == ["rollout-0", "rollout-1"]
