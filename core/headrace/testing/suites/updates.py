"""The rules of weight updates: a policy version reaches an engine whole, or not at all.

Part of the suite of :mod:`~.inference`, which a plugin's author subclasses.
"""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contract import InferenceEngine, MultiVersion
from headrace.errors import EngineError
from headrace.testing.suites.engine import EngineRules
from headrace.testing.suites.rules import check, raises_async, rule
from headrace.testing.suites.serving import Answer, Served, differ, manifest_of, other_policy


class WeightUpdateRules(EngineRules):
    """See :class:`~.inference.InferenceEngineContract`."""

    @rule("A committed version is served, with its own weights, and `health` reports it with the manifest's digest.")
    async def test_a_committed_version_is_served_and_reported(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            before, tensors = await _ask(served), self.other(model_path)
            await served.push(tensors, 1)
            after, health = await _ask(served, version=1), await served.engine.health()
        check(1 in health.versions, f"health reports versions {health.versions} after version 1 was committed")
        digest = manifest_of(tensors, 1).digest
        check(health.digests.get(1) == digest, f"health reports digests {health.digests}, not {digest} for version 1")
        check(any(differ(a, b, atol=0) for a, b in zip(before, after, strict=True)), "it answers as version 0 does")

    @rule("Without one of the manifest's tensors, `commit` is an EngineError, and the engine serves what it served.")
    async def test_an_incomplete_update_is_refused(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            before, tensors = await _ask(served), self.other(model_path)
            update = await served.engine.begin_update(manifest_of(tensors, 1))
            for name in sorted(tensors)[1:]:
                await update.apply(name, tensors[name])
            await raises_async(EngineError, update.commit())
            await self._unchanged(served, before)

    @rule("With a tensor of another shape, `commit` is an EngineError, and the engine serves what it served.")
    async def test_an_update_of_another_shape_is_refused(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            before, tensors = await _ask(served), self.other(model_path)
            update = await served.stage(tensors, 1)
            name = max(tensors, key=lambda name: tensors[name].size)
            await update.apply(name, tensors[name][:-1])
            await raises_async(EngineError, update.commit())
            await self._unchanged(served, before)

    @rule("An aborted update leaves the old weights and no trace; the version can be begun again.")
    async def test_an_aborted_update_leaves_no_trace(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            before, tensors = await _ask(served), self.other(model_path)
            update = await served.stage(tensors, 1)
            await update.abort()
            await update.abort()
            await self._unchanged(served, before)
            await served.push(tensors, 1)
            health = await served.engine.health()
        check(1 in health.versions, f"begun again and committed, version 1 is not among {health.versions}")

    @rule("A begun, uncommitted update is replaced by another one of the same version.")
    async def test_a_begun_update_is_replaced_by_another(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            tensors = self.other(model_path)
            stale = await served.engine.begin_update(manifest_of(tensors, 1))
            name = next(iter(tensors))
            await stale.apply(name, np.zeros_like(tensors[name]))
            await served.push(tensors, 1)
            health = await served.engine.health()
        check(1 in health.versions, f"health reports versions {health.versions} after the second update was committed")

    @rule("An update of a version that is live already does nothing.")
    async def test_an_update_of_a_live_version_does_nothing(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            await served.push(self.other(model_path), 1)
            before = await _ask(served, version=1)
            await served.push(other_policy(model_path, seed=2), 1)
            after = await _ask(served, version=1)
        _same(before, after, atol=self.atol, what="before and after the second update, version 1 gave")

    @rule("Every call of an update may be repeated, and a repeat changes nothing.")
    async def test_repeating_a_call_of_an_update_changes_nothing(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        async with self.serving(plugin, model_path) as served:
            tensors = self.other(model_path)
            update = await served.stage(tensors, 1)
            for name, tensor in tensors.items():
                await update.apply(name, tensor)
            await update.commit()
            before = await _ask(served, version=1)
            await update.commit()
            await update.abort()
            after, health = await _ask(served, version=1), await served.engine.health()
        check(1 in health.versions, f"after commit, commit and abort health reports versions {health.versions}")
        _same(before, after, atol=self.atol, what="after the first and after the second commit, version 1 gave")

    @rule("Staging an update does not disturb what is being served.")
    async def test_staging_does_not_disturb_serving(self, plugin: InferenceEngine, model_path: str) -> None:
        async with self.serving(plugin, model_path) as served:
            requests = served.requests("a", 4, max_new_tokens=24)
            undisturbed = await served.generate(*requests)
            await served.engine.submit(requests)
            await served.stage(self.other(model_path), 1)
            during = await served.finish([r.request_id for r in requests])
        _same(undisturbed, during, atol=self.atol, what="without and with an update beside it, a request gave")

    @rule("Versions that are live at the same time do not mix: each answers as it does alone.")
    async def test_live_versions_do_not_mix(self, plugin: InferenceEngine, model_path: str) -> None:
        _needs_several(plugin)
        async with self.serving(plugin, model_path) as served:
            await served.push(self.other(model_path), 1)
            alone = [await _ask(served, version=version) for version in (0, 1)]
            pinned = [served.requests("mixed", 4, version=version) for version in (0, 1)]
            mixed = await served.generate(*(pinned[n % 2][n] for n in range(4)))
        expected = [alone[n % 2][n] for n in range(4)]
        _same(expected, mixed, atol=self.atol, what="alone and beside another version, a request gave")

    @rule("`retire` forgets a version; an unknown one is ignored.")
    async def test_retire_forgets_a_version_and_ignores_unknown_ones(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        engine = _needs_several(plugin)
        async with self.serving(plugin, model_path) as served:
            await served.push(self.other(model_path), 1)
            for version in (0, 0, 77):
                await engine.retire(version)
            health = await served.engine.health()
            check(health.versions == (1,), f"after version 0 was retired health reports versions {health.versions}")
            await raises_async(EngineError, served.engine.submit(served.requests("late", 1)))

    @rule("A version can be loaded when every other one is retired.")
    async def test_a_version_follows_the_last_one_that_was_retired(
        self, plugin: InferenceEngine, model_path: str
    ) -> None:
        engine = _needs_several(plugin)
        async with self.serving(plugin, model_path) as served:
            await engine.retire(0)
            await served.push(self.other(model_path), 1)
            (answer, *_) = await _ask(served, version=1)
        check(answer.reason == "length", f"a request for it ended by {answer.reason!r}")

    async def _unchanged(self, served: Served, before: list[Answer]) -> None:
        health = await served.engine.health()
        check(health.versions == (0,), f"health reports versions {health.versions}, (0,) is what it served")
        _same(before, await _ask(served), atol=self.atol, what="before and after, version 0 gave")


async def _ask(served: Served, *, version: int = 0) -> list[Answer]:
    return await served.generate(*served.requests("ask", 4, version=version))


def _same(ours: list[Answer], theirs: list[Answer], *, atol: float, what: str) -> None:
    for one, other in zip(ours, theirs, strict=True):
        gap = differ(one, other, atol=atol)
        check(not gap, f"{what} {gap}")


def _needs_several(plugin: InferenceEngine) -> MultiVersion:
    if not isinstance(plugin, MultiVersion) or plugin.capabilities(plugin.settings).live_versions == 1:
        pytest.skip(f"{type(plugin).__name__} serves one version at a time")
    return plugin
