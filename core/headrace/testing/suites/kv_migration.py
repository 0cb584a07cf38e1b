"""The rules of the capability ``KVMigration``: a request goes on elsewhere as if it had not moved.

Part of :class:`~.inference.InferenceEngineContract`, which a plugin's author subclasses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from headrace.contract import Array, GenerationRequest, InferenceEngine, KVMigration, RequestState
from headrace.errors import EngineError
from headrace.testing.suites.engine import EngineRules
from headrace.testing.suites.rules import check, raises_async, rule
from headrace.testing.suites.serving import Answer, Served, differ

TRIES = 50
"""A request may end before it can be taken out."""


@dataclass(frozen=True, slots=True)
class _Side:
    """A started engine that has the capability."""

    served: Served
    engine: KVMigration

    async def take(self, *, version: int = 0, stream: bool = False, greedy: bool = False) -> RequestState:
        """A request in the middle of its answer, taken out of this engine."""
        for number in range(TRIES):
            asked = self.long(f"moves-{number}", version=version, stream=stream, greedy=greedy)
            beside = replace(asked, request_id=f"beside-{number}", stream=True)
            await self.served.engine.submit([asked, beside])
            await self.served.next_outputs("the first token of a request")
            state = await self.engine.export_request(asked.request_id)
            await self.served.engine.abort([beside.request_id])
            await self.served.finish([beside.request_id])
            if state is not None and len(state.token_ids):
                return state
        raise AssertionError(f"{TRIES} requests had ended, or not begun, before one could be taken out")

    def long(self, name: str, **changes: Any) -> GenerationRequest:
        """A request with as many tokens as there is room for."""
        (asked,) = self.served.requests(name, 1, max_new_tokens=self.served.context - 8, **changes)
        return replace(asked, request_id=name)

    async def resume(self, state: RequestState) -> Answer:
        """Its answer, with what had been reported before."""
        await self.engine.import_request(state)
        (rest,) = await self.served.finish([state.request.request_id])
        told = state.reported
        whole = Answer(state.token_ids[:told].tolist(), state.logprobs[:told].tolist(), [], rest.outputs, rest.reason)
        whole.tokens += rest.tokens
        whole.logprobs += rest.logprobs
        whole.spans += rest.spans
        return whole


class KVMigrationContract(EngineRules):
    """Skipped for an engine that does not declare the capability."""

    @rule("A request goes on in another engine token for token as if it had not moved, spans in response coordinates.")
    async def test_a_moved_request_goes_on_as_if_it_had_not_moved(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        async with self._two(plugin, model_path) as (source, target):
            (unmoved,) = await source.served.generate(source.long("unmoved"))
            for stream in (False, True):
                state = await source.take(stream=stream)
                moved = await target.resume(state)
                gap = differ(unmoved, moved, atol=self.atol)
                check(not gap, f"unmoved, and moved after {len(state.token_ids)} tokens, a request gave {gap}")
                check(
                    moved.reason == unmoved.reason, f"unmoved it ended by {unmoved.reason!r}, moved by {moved.reason!r}"
                )
                covered = [t for span in moved.spans for t in range(span.start, span.stop)]
                expected = list(range(state.reported, len(moved.tokens)))
                check(covered == expected, f"tokens {state.reported} to {len(moved.tokens)} have spans {moved.spans}")

    @rule("What a request brings with it is not computed again: `prefilled_tokens` stays as it was.")
    async def test_nothing_is_prefilled_again(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, target):
            await target.served.generate(*target.served.requests("a", 1))
            before = (await target.served.engine.health()).prefilled_tokens
            state = await source.take()
            await target.resume(state)
            after = (await target.served.engine.health()).prefilled_tokens
        known = len(state.request.prompt) + len(state.token_ids)
        check(before > 0, "`prefilled_tokens` is 0 after a request was answered")
        check(after == before, f"of {known} tokens that a request came with, {after - before} were prefilled again")

    @rule("A request without its keys and values goes on as well: they are computed again.")
    async def test_a_request_without_its_keys_and_values_goes_on(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        async with self._two(plugin, model_path) as (source, target):
            (unmoved,) = await source.served.generate(source.long("unmoved"))
            moved = await target.resume(replace(await source.take(), kv=(), fingerprint=""))
        gap = differ(unmoved, moved, atol=self.atol)
        check(not gap, f"unmoved, and moved without keys and values, a request gave {gap}")

    @rule("Under another version, what follows is that version's, as if it had been asked to continue; spans say so.")
    async def test_a_request_goes_on_under_another_version(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, target):
            await target.served.push(self.other(model_path), 5)
            state = await source.take(greedy=True)
            known = len(state.token_ids)
            asked = replace(state.request, version=5)
            prompt = np.concatenate([asked.prompt, state.token_ids])
            sampling = replace(asked.sampling, max_new_tokens=asked.sampling.max_new_tokens - known)
            again = replace(asked, request_id="again", prompt=prompt, sampling=sampling)
            (expected,) = await target.served.generate(again)
            mixed = await target.resume(replace(state, request=asked, kv=(), fingerprint=""))
        following = Answer(mixed.tokens[known:], mixed.logprobs[known:])
        gap = differ(expected, following, atol=self.atol)
        check(not gap, f"asked to continue an answer of version 0, and going on with it, version 5 gave {gap}")
        own = {(span.version, t) for span in mixed.spans for t in range(span.start, span.stop)}
        right = {(0, t) for t in range(state.reported, known)} | {(5, t) for t in range(known, len(mixed.tokens))}
        check(own == right, f"{known} tokens are of version 0 and the others of 5, and spans are {mixed.spans}")

    @rule("Under another version, keys and values that are to be taken for that version's are used as they are.")
    async def test_keys_and_values_stay_under_another_version(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, target):
            await target.served.push(self.other(model_path), 5)
            state = await source.take()
            before = (await target.served.engine.health()).prefilled_tokens
            asked = replace(state.request, version=5)
            await target.resume(replace(state, request=asked, fingerprint=target.engine.fingerprint(5)))
            after = (await target.served.engine.health()).prefilled_tokens
        check(after == before, f"{after - before} tokens were prefilled again")

    @rule("A state holds the answer so far: int32 tokens, float32 log-probs, spans that cover them.")
    async def test_a_state_holds_the_answer_so_far(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, _):
            (unmoved,) = await source.served.generate(source.long("unmoved"))
            state = await source.take(version=0)
        count = len(state.token_ids)
        found = f"{state.token_ids.dtype} {list(state.token_ids.shape)}, {state.logprobs.dtype} {state.logprobs.shape}"
        right = (state.token_ids.dtype.name, state.logprobs.dtype.name) == ("int32", "float32")
        check(right and state.logprobs.shape == (count,), f"token ids and log-probs are {found}")
        check(state.token_ids.tolist() == unmoved.tokens[:count], f"{state.token_ids.tolist()}, not {unmoved.tokens}")
        covered = [t for span in state.spans for t in range(span.start, span.stop)]
        check(covered == list(range(count)), f"{count} tokens have spans {state.spans}")

    @rule("A request that waits for a slot can be taken out too.")
    async def test_a_waiting_request_moves(self, plugin: InferenceEngine, model_path: str) -> None:
        slots = plugin.capabilities(plugin.settings).slots
        async with self._two(plugin, model_path) as (source, target):
            (unmoved,) = await source.served.generate(source.long("unmoved"))
            await source.served.engine.submit([source.long(f"runs-{n}") for n in range(slots)] + [source.long("waits")])
            state = await source.engine.export_request("waits")
            check(state is not None, f"behind {slots} requests in {slots} slots, a request could not be taken out")
            assert state is not None
            moved = await target.resume(state)
        gap = differ(unmoved, moved, atol=self.atol)
        check(not gap, f"unmoved, and moved while it waited, a request gave {gap}")

    @rule("An engine forgets a request that was taken out, and reports no more of it.")
    async def test_a_request_that_was_taken_out_is_gone(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, _):
            state = await source.take(stream=True)
            health = await source.served.engine.health()
            await source.served.generate(*source.served.requests("after", 1, max_new_tokens=24))
        name = state.request.request_id
        check(health.running + health.waiting == 0, f"{health.running} requests run and {health.waiting} wait")
        told = len(source.served.answers[name].tokens) if name in source.served.answers else 0
        check(told == state.reported, f"{told} tokens of it were reported, and {state.reported} by its state")

    @rule("Requests beside one that is taken out, or put in, are not disturbed.")
    async def test_requests_beside_it_are_not_disturbed(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, _):
            (unmoved,) = await source.served.generate(source.long("unmoved"))
            await source.served.engine.submit([source.long("stays"), source.long("goes")])
            state = await source.engine.export_request("goes")
            check(state is not None, "it could not be taken out at once")
            assert state is not None
            await source.engine.import_request(state)
            for answer in await source.served.finish(["stays", "goes"]):
                gap = differ(unmoved, answer, atol=self.atol)
                check(not gap, f"alone, and with another that was taken out and put in again, a request gave {gap}")

    @rule("`export_request` of an unknown or finished request gives None.")
    async def test_an_unknown_or_finished_request_is_none(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, _):
            await source.served.generate(*source.served.requests("a", 1))
            for name in ("a-0", "never seen"):
                found = await source.engine.export_request(name)
                check(found is None, f"the state of {name!r} is {found}")

    @rule("A request whose version is not live is an EngineError, and is not accepted.")
    async def test_a_version_that_is_not_live_is_refused(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, target):
            state = await source.take()
            await self._refused(target, replace(state, request=replace(state.request, version=9)), naming=("9",))

    @rule("Keys and values of another fingerprint are an EngineError, and the request is not accepted.")
    async def test_another_fingerprint_is_refused(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, target):
            state = await source.take()
            await self._refused(target, replace(state, fingerprint=f"not {state.fingerprint}"))

    @rule("Keys and values, or log-probs, of another shape or dtype are an EngineError, and nothing is accepted.")
    async def test_another_shape_is_refused(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, target):
            state = await source.take()
            cut: list[Array] = [np.ascontiguousarray(array[..., :-1]) for array in state.kv]
            for changed in (
                replace(state, kv=tuple(cut)),
                replace(state, kv=tuple(array.astype(np.float64) for array in state.kv)),
                replace(state, logprobs=state.logprobs[:-1]),
            ):
                await self._refused(target, changed)

    @rule("`fingerprint` is the same in two engines with the same weights, and another one for other weights.")
    async def test_the_fingerprint_tells_weights_apart(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self._two(plugin, model_path) as (source, target):
            found = []
            for side in (source, target):
                await side.served.push(self.other(model_path), 5)
                found.append(side.engine.fingerprint(5))
            await target.served.push({name: 2 * tensor for name, tensor in self.other(model_path).items()}, 6)
            other = target.engine.fingerprint(6)
        check(found[0] == found[1], f"the same weights have the fingerprints {found[0]} and {found[1]}")
        check(other != found[0], f"other weights have the fingerprint {other} too")

    async def _refused(self, target: _Side, state: RequestState, *, naming: tuple[str, ...] = ()) -> None:
        await raises_async(EngineError, target.engine.import_request(state), naming=naming)
        health = await target.served.engine.health()
        check(health.running + health.waiting == 0, f"{health.running} requests run and {health.waiting} wait")

    @asynccontextmanager
    async def _two(self, plugin: InferenceEngine, model_path: str) -> AsyncIterator[tuple[_Side, _Side]]:
        """The engine and another one like it, or a skip."""
        if not plugin.capabilities(plugin.settings).kv_migration:
            pytest.skip(f"{type(plugin).__name__} does not declare kv_migration")
        other = type(plugin)(plugin.settings)
        assert isinstance(plugin, KVMigration)
        assert isinstance(other, KVMigration)
        async with self.serving(plugin, model_path) as one, self.serving(other, model_path) as two:
            yield _Side(one, plugin), _Side(two, other)
