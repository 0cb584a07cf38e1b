"""Case G11: trainer and engine must agree on one prompt before anything is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.contract import Batch, Completion, Ragged, VersionSpan
from headrace.errors import EngineError
from headrace.services.fleet import Fleet

SAMPLED = np.array([3, 4, 5], dtype=np.int32)
LOGPROBS = np.array([-1.0, -2.0, -0.5], dtype=np.float32)


class Node:
    """Answers ``generate`` as an engine and ``logprobs`` as a trainer whose numbers are off by ``gap``."""

    def __init__(self, gap: float) -> None:
        self._gap = gap

    async def call(self, method: str, request: Any = None, **_: Any) -> Any:
        if method == "generate":
            span = VersionSpan(version=0, start=0, stop=len(SAMPLED))
            return Completion(token_ids=SAMPLED, logprobs=LOGPROBS, spans=(span,), finish_reason="length")
        prompt = len(request.ragged("tokens")[0]) - len(SAMPLED)
        values = np.concatenate([np.zeros(prompt), LOGPROBS + self._gap]).astype(np.float32)
        return Batch(rows=request.rows, columns={"logprobs": Ragged.from_arrays([values])})


async def self_check(gap: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    fleet = Fleet(
        emit=lambda kind, **fields: events.append(fields),
        spawn=lambda work, name: None,
        connect=lambda address: Node(gap),  # type: ignore[arg-type,return-value]  # calls only
        temperature=1.0,
        tolerance=1e-3,
    )
    fleet.join("rollout-0", "nowhere", slots=1, live_versions=1)
    await fleet.self_check(Node(gap), 0)  # type: ignore[arg-type]  # calls only
    return events


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
    assert event["max_abs_logprob_diff"] == pytest.approx(1e-5, rel=0.1)
