"""The rules of versions that are a base and an adapter: served as the merged model, and a base that is there stays.

Part of :class:`~.inference.InferenceEngineContract`, which a plugin's author subclasses.
"""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contract import Array, InferenceEngine, MultiVersion
from headrace.contract.adapters import LORA_A, LORA_B, adapter_names, is_adapter, merged
from headrace.errors import EngineError
from headrace.testing.suites.engine import EngineRules
from headrace.testing.suites.rules import check, raises_async, rule
from headrace.testing.suites.serving import Answer, Served, differ, manifest_of
from headrace.testing.tensors import read_tensors

RANK = 2


class AdapterContract(EngineRules):
    """Skipped for an engine that does not declare the capability."""

    def adapted(self, model_path: str, *, seed: int = 1) -> dict[str, Array]:
        """The model's weights, and an adapter that disturbs each matrix by half its own size; not those of an embedding
        or a head."""
        generator, tensors = np.random.default_rng(seed), read_tensors(model_path)
        for name, weight in list(tensors.items()):
            if weight.ndim == 2 and not any(part in name for part in ("embed", "lm_head")):
                size = 0.5 * weight.astype(np.float32).std() / RANK**0.5
                pair = (
                    generator.standard_normal((RANK, weight.shape[1])),
                    generator.standard_normal((len(weight), RANK)),
                )
                parts = (pair[0].astype(weight.dtype), (size * pair[1]).astype(weight.dtype))
                tensors |= dict(zip(adapter_names(name), parts, strict=True))
        return tensors

    @rule("A version with an adapter answers as its base with W + B A in the place of each W.")
    async def test_an_adapter_answers_as_the_merged_model(self, plugin: InferenceEngine, model_path: str) -> None:
        _needs_adapters(plugin)
        tensors = self.adapted(model_path)
        async with self.serving(plugin, model_path) as served:
            await _push(served, tensors, 1)
            apart = await _ask(served, version=1)
            await _keep_only(served, 1)
            await served.push(merged(tensors), 2)
            self._same(await _ask(served, version=2), apart, "merged, and as a base and an adapter, a version gave")

    @rule("A base that came with an earlier version is not wanted again, and serves the next version's adapter.")
    async def test_a_base_that_is_there_is_not_wanted_again(self, plugin: InferenceEngine, model_path: str) -> None:
        _needs_adapters(plugin)
        first, second = self.adapted(model_path), self.adapted(model_path, seed=2)
        async with self.serving(plugin, model_path) as served:
            await _push(served, first, 1)
            await _keep_only(served, 1)
            again = [name for name in await _push(served, second, 2) if not is_adapter(name)]
            check(not again, f"of a base that it had, {', '.join(again)} was wanted again")
            apart = await _ask(served, version=2)
            await _keep_only(served, 2)
            await served.push(merged(second), 3)
            self._same(await _ask(served, version=3), apart, "merged, and with the base from before, a version gave")

    @rule("A base of which a tensor differs is another base: what differs is wanted, and served.")
    async def test_another_base_is_wanted(self, plugin: InferenceEngine, model_path: str) -> None:
        _needs_adapters(plugin)
        first = self.adapted(model_path)
        name = max((name for name in first if not is_adapter(name)), key=lambda name: first[name].size)
        second = {**first, name: (1.5 * first[name]).astype(first[name].dtype)}
        async with self.serving(plugin, model_path) as served:
            await _push(served, first, 1)
            await _keep_only(served, 1)
            wanted = await _push(served, second, 2)
            check(name in wanted, f"{name} is another one than that of version 1, and was not wanted")
            apart = await _ask(served, version=2)
            await _keep_only(served, 2)
            await served.push(merged(second), 3)
            self._same(await _ask(served, version=3), apart, "merged, and on another base, a version gave")

    @rule("With half an adapter, `commit` is an EngineError, and the engine serves what it served.")
    async def test_half_an_adapter_is_refused(self, plugin: InferenceEngine, model_path: str) -> None:
        _needs_adapters(plugin)
        whole = self.adapted(model_path)
        async with self.serving(plugin, model_path) as served:
            before = await _ask(served)
            for half in (LORA_A, LORA_B):
                left = max(name for name in whole if name.endswith(half))
                tensors = {name: tensor for name, tensor in whole.items() if name != left}
                await raises_async(EngineError, _push(served, tensors, 1))
                health = await served.engine.health()
                check(health.versions == (0,), f"without {left} health reports versions {health.versions}")
                self._same(before, await _ask(served), "before and after, version 0 gave")

    @rule("Versions of one base that are live at the same time do not mix, nor with a version that has no adapter.")
    async def test_adapters_of_one_base_do_not_mix(self, plugin: InferenceEngine, model_path: str) -> None:
        if _needs_adapters(plugin) < 3:
            pytest.skip(f"{type(plugin).__name__} does not serve three versions at a time")
        async with self.serving(plugin, model_path) as served:
            for version in (1, 2):
                await _push(served, self.adapted(model_path, seed=version), version)
            alone = [await _ask(served, version=version) for version in range(3)]
            pinned = [served.requests(f"mixed-{version}", 4, version=version) for version in range(3)]
            mixed = await served.generate(*(request for requests in pinned for request in requests))
        self._same(
            [answer for answers in alone for answer in answers], mixed, "alone and beside others, a request gave"
        )

    def _same(self, ours: list[Answer], theirs: list[Answer], what: str) -> None:
        for one, other in zip(ours, theirs, strict=True):
            gap = differ(one, other, atol=self.atol)
            check(not gap, f"{what} {gap}")


async def _push(served: Served, tensors: dict[str, Array], version: int) -> list[str]:
    """As a rollout node does it; the names of what was wanted."""
    update = await served.engine.begin_update(manifest_of(tensors, version))
    wanted = [name for name in tensors if update.wants(name)]
    for name in wanted:
        await update.apply(name, tensors[name])
    await update.commit()
    return wanted


async def _keep_only(served: Served, version: int) -> None:
    """Retire the others, so that there is room for one more in an engine that serves two."""
    if isinstance(served.engine, MultiVersion):
        for other in (await served.engine.health()).versions:
            if other != version:
                await served.engine.retire(other)


async def _ask(served: Served, *, version: int = 0) -> list[Answer]:
    return await served.generate(*served.requests(f"ask-{version}", 4, version=version))


def _needs_adapters(plugin: InferenceEngine) -> int:
    """How many versions it serves at a time."""
    declared = plugin.capabilities(plugin.settings)
    if not declared.adapters:
        pytest.skip(f"{type(plugin).__name__} serves no adapters")
    return declared.live_versions
