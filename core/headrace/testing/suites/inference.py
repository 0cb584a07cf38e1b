"""The rules of the ``inference_engine`` role: generation here, weight updates in :mod:`~.updates`,
requests that move in :mod:`~.kv_migration`.

class TestMyEngine(InferenceEngineContract):
    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        return MyEngine(MyEngine.Settings(slots=4))

    @pytest.fixture
    def model_path(self) -> str:
        return "models/tiny"
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headrace.contract import InferenceEngine, KVMigration, MultiVersion, Scoring
from headrace.errors import EngineError
from headrace.testing.suites.adapters import AdapterContract
from headrace.testing.suites.kv_migration import KVMigrationContract
from headrace.testing.suites.rules import check, raises_async, rule
from headrace.testing.suites.serving import Answer, differ, request
from headrace.testing.suites.updates import WeightUpdateRules

HOT = 50.0
"""A temperature that makes any distribution flat."""


class InferenceEngineContract(WeightUpdateRules, KVMigrationContract, AdapterContract):
    """Subclass it and override :meth:`plugin` and :meth:`model_path`. ``deadline``: seconds in which an engine must
    give some output; ``atol``: nats by which log-probs of the same token may differ between batches."""

    @rule("An engine declares at least one slot and one live version, and is what its capabilities say.")
    def test_declared_capabilities_are_backed(self, plugin: InferenceEngine) -> None:
        declared = plugin.capabilities(plugin.settings)
        check(declared.slots >= 1 and declared.live_versions >= 1, f"it declares {declared}")
        backed = declared.live_versions == 1 or isinstance(plugin, MultiVersion)
        check(backed, f"it declares {declared.live_versions} live versions and is not MultiVersion")
        for said, capability in ((declared.scoring, Scoring), (declared.kv_migration, KVMigration)):
            check(
                not said or isinstance(plugin, capability), f"it declares {declared} and is not {capability.__name__}"
            )

    @rule("Every token comes with one log-prob: int32 and float32 arrays of the same length.")
    async def test_every_token_comes_with_a_log_prob(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            for answer in await served.generate(*served.requests("a", 6)):
                for output in answer.outputs:
                    tokens, logprobs = output.token_ids, output.logprobs
                    found = f"{tokens.dtype} {list(tokens.shape)} and {logprobs.dtype} {list(logprobs.shape)}"
                    right = (tokens.dtype.name, logprobs.dtype.name) == ("int32", "float32") and tokens.ndim == 1
                    check(right and tokens.shape == logprobs.shape, f"token ids and log-probs are {found}")

    @rule("Spans cover exactly a response's tokens, and name the version that its request is pinned to.")
    async def test_spans_cover_the_tokens_and_name_the_version(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            await served.push(self.other(model_path), 5)
            for answer in await served.generate(*served.requests("a", 4, version=5)):
                covered = [t for span in answer.spans for t in range(span.start, span.stop)]
                check(
                    covered == list(range(len(answer.tokens))), f"{len(answer.tokens)} tokens have spans {answer.spans}"
                )
                versions = {span.version for span in answer.spans}
                check(versions == {5}, f"a request pinned to version 5 reports versions {sorted(versions)}")

    @rule("Log-probs are finite and at most 0.")
    async def test_log_probs_are_finite_and_at_most_0(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            for answer in await served.generate(*served.requests("a", 8)):
                wrong = [value for value in answer.logprobs if not math.isfinite(value) or value > 0]
                check(not wrong, f"log-probs {wrong}")

    @rule("Log-probs are those of the distribution at the sampling temperature, not of the untempered one.")
    async def test_log_probs_are_at_the_sampling_temperature(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            spreads = {}
            for temperature in (1.0, HOT):
                answers = await served.generate(*served.requests("a", 16, temperature=temperature))
                found = [value for answer in answers for value in answer.logprobs]
                spreads[temperature] = max(found) - min(found)
        if spreads[1.0] < 0.05:
            pytest.skip(f"the model's distribution is flat ({spreads[1.0]:.2g} nats): give one with larger weights")
        check(
            spreads[HOT] < 0.2 * spreads[1.0],
            f"at temperature 1 log-probs spread over {spreads[1.0]:.3g} nats and at temperature {HOT:g}, where all "
            f"tokens are about as likely, over {spreads[HOT]:.3g}",
        )

    @rule("`greedy` takes the most likely token, whatever the seed.")
    async def test_greedy_takes_the_most_likely_token(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            (prompt,) = served.prompts(1)
            greedy = await served.generate(*(request(f"g{n}", prompt, greedy=True, seed=n) for n in range(3)))
            drawn = await served.generate(*(request(f"s{n}", prompt, seed=n, max_new_tokens=1) for n in range(16)))
        check(all(a.tokens == greedy[0].tokens for a in greedy), f"the answers are {[a.tokens for a in greedy]}")
        best = max(answer.logprobs[0] for answer in drawn)
        check(
            best <= greedy[0].logprobs[0] + self.atol,
            f"the greedy token has log-prob {greedy[0].logprobs[0]:.4f}, a sampled one {best:.4f}",
        )

    @rule("The same seed draws the same tokens, also in another instance.")
    async def test_the_same_seed_draws_the_same_tokens(self, plugin: InferenceEngine, model_path: str) -> None:
        runs: list[list[Answer]] = []
        for engine in (plugin, type(plugin)(plugin.settings)):
            async with self.serving(engine, model_path) as served:
                runs.append(await served.generate(*served.requests("a", 4)))
        for one, other in zip(*runs, strict=True):
            check(one.tokens == other.tokens, f"one seed drew {one.tokens} and then {other.tokens}")

    @rule("Another seed draws other tokens.")
    async def test_another_seed_draws_other_tokens(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            (prompt,) = served.prompts(1)
            answers = await served.generate(*(request(f"a{n}", prompt, seed=n, temperature=HOT) for n in range(8)))
        found = {tuple(answer.tokens) for answer in answers}
        check(len(found) > 4, f"8 seeds at temperature {HOT:g} drew {len(found)} different answers")

    @rule("A draw depends on seed, position and distribution alone, never on what else is decoded.")
    async def test_a_draw_does_not_depend_on_the_batch(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            requests = served.requests("a", 6)
            together = await served.generate(*requests)
            for asked, shared in zip(requests, together, strict=True):
                (alone,) = await served.generate(asked)
                gap = differ(alone, shared, atol=self.atol)
                check(not gap, f"alone and with five others, {asked.request_id} gave {gap}")

    @rule("A sampled stop token ends the response with `stop`, and is part of it.")
    async def test_a_stop_token_ends_the_response_and_is_part_of_it(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        async with self.serving(plugin, model_path) as served:
            (free,) = await served.generate(*served.requests("a", 1))
            stop = free.tokens[len(free.tokens) // 2]
            (ended,) = await served.generate(*served.requests("b", 1, stop_token_ids=(stop,)))
        expected = free.tokens[: free.tokens.index(stop) + 1]
        check(
            (ended.tokens, ended.reason) == (expected, "stop"),
            f"{free.tokens} with stop token {stop} became {ended.tokens}, ended by {ended.reason!r}",
        )

    @rule("The token budget ends a response with `length`.")
    async def test_the_budget_ends_a_response_with_length(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            for budget in (1, 7):
                (answer,) = await served.generate(*served.requests("a", 1, max_new_tokens=budget))
                found = (len(answer.tokens), answer.reason)
                check(
                    found == (budget, "length"), f"a budget of {budget} gave {found[0]} tokens, ended by {found[1]!r}"
                )

    @rule("The pieces of a streamed response join to the unstreamed one, spans in response coordinates.")
    async def test_streamed_pieces_join_to_the_whole(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            whole = await served.generate(*served.requests("a", 4))
            pieces = await served.generate(*served.requests("b", 4, stream=True))
        for one, other in zip(whole, pieces, strict=True):
            gap = differ(one, other, atol=self.atol)
            check(not gap, f"whole and in {len(other.outputs)} pieces, a response has {gap}")
            covered = [t for span in other.spans for t in range(span.start, span.stop)]
            check(covered == list(range(len(other.tokens))), f"{len(other.tokens)} tokens have spans {other.spans}")

    @rule("A request that is not streamed gives one output, at its end.")
    async def test_an_unstreamed_request_gives_one_output(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            for answer in await served.generate(*served.requests("a", 4)):
                check(len(answer.outputs) == 1, f"it gave {len(answer.outputs)} outputs")

    @rule("Requests are decoded at the same time, as many as there are slots.")
    async def test_requests_are_decoded_at_the_same_time(self, plugin: InferenceEngine, model_path: str) -> None:
        if plugin.capabilities(plugin.settings).slots == 1:
            pytest.skip("the engine has one slot")
        async with self.serving(plugin, model_path) as served:
            requests = served.requests("a", 2, stream=True, max_new_tokens=24)
            await served.engine.submit(requests)
            while len(served.answers) < 2:
                await served.next_outputs("the first tokens of a second request")
            ended = [name for name, answer in served.answers.items() if answer.reason]
            check(not ended, f"{ended[0] if ended else ''} had ended before the other request had its first token")

    @rule("`abort` ends a request with one last output, `aborted`, that brings what it has.")
    async def test_an_aborted_request_ends_with_aborted(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            last = await self._queue(plugin, served)
            await served.engine.abort(last)
            reasons = [answer.reason for answer in await served.finish(last)]
        # One that was quicker than the abort has ended by its budget, and that is fine.
        check("aborted" in reasons and set(reasons) <= {"aborted", "length"}, f"aborted requests ended by {reasons}")

    @rule("`abort` ends no other request.")
    async def test_abort_leaves_the_others(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            last = await self._queue(plugin, served)
            await served.engine.abort(last[1:])
            (kept,) = await served.finish(last[:1])
        found = (kept.reason, len(kept.tokens))
        check(found == ("length", 48), f"a request beside aborted ones ended by {found[0]!r} after {found[1]} tokens")

    @rule("`abort` of unknown or finished requests is ignored.")
    async def test_aborting_unknown_or_finished_requests_is_ignored(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        async with self.serving(plugin, model_path) as served:
            await served.generate(*served.requests("a", 1))
            await served.engine.abort(["a-0", "never seen"])
            (answer,) = await served.generate(*served.requests("b", 1))
        check(answer.reason == "length", f"the next request ended by {answer.reason!r}")

    @rule("A request whose version is not live is an EngineError, and nothing that came with it is accepted.")
    async def test_a_version_that_is_not_live_refuses_all_that_came_with_it(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        async with self.serving(plugin, model_path) as served:
            good, bad = served.requests("a", 1)[0], served.requests("b", 1, version=99)[0]
            await raises_async(EngineError, served.engine.submit([good, bad]))
            health = await served.engine.health()
        check(health.running + health.waiting == 0, f"{health.running} requests run and {health.waiting} wait")

    @rule("A prompt that leaves no room for a token is answered by no token and `length`, and holds no other up.")
    async def test_a_prompt_that_leaves_no_room_ends_with_length(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        async with self.serving(plugin, model_path) as served:
            full, longer = (
                request(f"a-{more}", np.full(served.context + more, served.vocabulary - 1, dtype=np.int32))
                for more in (0, 17)
            )
            *over, other = await served.generate(full, longer, *served.requests("b", 1))
        check(len(other.tokens) == 12, f"the request that came with them has {len(other.tokens)} of 12 tokens")
        for answer in over:
            found = (answer.reason, len(answer.tokens), answer.spans)
            check(found == ("length", 0, []), f"finish reason, tokens and spans are {found}")

    @rule("`health` tells the requests that are open, the tokens generated since start, and the share of KV in use.")
    async def test_health_counts_what_the_engine_does(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            requests = served.requests("a", 5)
            await served.engine.submit(requests)
            during = await served.engine.health()
            await served.finish([r.request_id for r in requests])
            after = await served.engine.health()
        check(1 <= during.running + during.waiting <= 5, f"of 5 requests {during.running + during.waiting} are open")
        check(0 <= during.kv_used <= 1, f"the share of KV capacity in use is {during.kv_used}")
        found: Any = (after.running, after.waiting, after.generated_tokens)
        check(found == (0, 0, 60), f"after 5 answers of 12 tokens: running, waiting, generated tokens are {found}")

    @rule("`close` may be called at any time, before `start` and twice.")
    async def test_close_may_come_at_any_time_and_twice(self, plugin: InferenceEngine, model_path: str) -> None:
        await type(plugin)(plugin.settings).close()
        async with self.serving(plugin, model_path) as served:
            await served.engine.submit(served.requests("a", 4))
            await served.engine.close()
            await served.close()

    @rule("The outputs end after `close`; requests still open end as `aborted` or without an output.")
    async def test_outputs_end_after_close(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            await served.engine.submit(served.requests("a", 8, max_new_tokens=48))
            await served.close()
            while await served.next_outputs("the end of the outputs after close") is not None:
                pass

    async def _queue(self, plugin: InferenceEngine, served: Any) -> list[str]:
        """Submit more requests of 48 tokens than there are slots; the names of the last four."""
        count = 2 * plugin.capabilities(plugin.settings).slots + 4
        requests = served.requests("a", count, max_new_tokens=48)
        await served.engine.submit(requests)
        return [r.request_id for r in requests[-4:]]
