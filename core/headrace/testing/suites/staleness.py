"""The rules of the ``staleness`` role, on the real flow with a virtual clock.

class TestMyPolicy(StalenessContract):
    @pytest.fixture
    def plugin(self) -> StalenessPolicy:
        return MyPolicy(MyPolicy.Settings(max_staleness=2))
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from headrace.contract import FlowView, StalenessPolicy
from headrace.errors import StalenessError
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, rule
from headrace.testing.suites.simulation import Lengths, Outcome, Simulation, even, long_tailed

BATCHES = 25
LIVELY: tuple[dict[str, object], ...] = (
    {"batch_groups": 4},
    {"batch_groups": 1},
    {"batch_groups": 6, "slots": 2},
    {"batch_groups": 4, "lost": 0.05},
    {"batch_groups": 4, "released": 3},
)
LENGTHS: tuple[Lengths, ...] = (even, long_tailed)


class StalenessContract(PluginContract):
    """Subclass it and override :meth:`plugin`; settings must suit batches of one group and more."""

    @pytest.fixture
    def plugin(self) -> StalenessPolicy:
        """A policy. It is pure, so every rule may use the same one."""
        override("plugin", "a staleness policy")

    @rule("`check` accepts settings that the policy works with, for any number of groups in a batch.")
    def test_check_accepts_settings_that_work(self, plugin: StalenessPolicy) -> None:
        for batch_groups in (1, 4, 6, 128):
            plugin.check(batch_groups=batch_groups)

    @rule("No row is trained more than `max_staleness` versions after its oldest token was sampled.")
    def test_no_trained_row_is_too_stale(self, plugin: StalenessPolicy) -> None:
        for words, simulation in _simulations(plugin):
            try:
                worst = max(simulation.run(batches=BATCHES).staleness, default=0)
            except StalenessError as error:
                check(False, f"with {words} the flow refused: {error.message}")
            else:
                check(worst <= plugin.max_staleness, f"with {words} a row was {worst} versions old")

    @rule("A run never comes to a halt: with nothing in flight something may start, be taken or be published.")
    def test_a_run_never_comes_to_a_halt(self, plugin: StalenessPolicy) -> None:
        for words, simulation in _simulations(plugin):
            stuck = _outcome(simulation).stuck
            check(not stuck, f"with {words} nothing happens any more at {stuck}")

    @rule("A policy is pure: asked again about the same counts, it answers the same.")
    def test_the_same_view_gets_the_same_answer(self, plugin: StalenessPolicy) -> None:
        for view in _views(plugin.max_staleness):
            answers = [_ask(plugin, view) for _ in range(3)]
            check(len(set(answers)) == 1, f"asked three times about {view} it answered {answers}")

    @rule("`max_staleness` = 0 is the synchronous run, which is lockstep: reproducible to the bit.")
    def test_a_bound_of_0_is_lockstep(self, plugin: StalenessPolicy) -> None:
        if plugin.max_staleness > 0:
            pytest.skip(f"max_staleness is {plugin.max_staleness}")
        check(plugin.lockstep, "max_staleness is 0 and lockstep is False")

    @rule("Where trajectories are interrupted, at whatever moment weights arrive, no run is reproducible to the bit.")
    def test_a_policy_that_interrupts_is_not_lockstep(self, plugin: StalenessPolicy) -> None:
        if plugin.interruption is None:
            pytest.skip("nothing is interrupted")
        check(not plugin.lockstep, "it interrupts trajectories, and lockstep is True")


def _simulations(plugin: StalenessPolicy) -> Iterator[tuple[str, Simulation]]:
    """Every kind of flow, with words for it."""
    for lengths, options in product(LENGTHS, LIVELY):
        words = f"{lengths.__name__} lengths and {', '.join(f'{k} = {v}' for k, v in options.items())}"
        yield words, Simulation(plugin, lengths=lengths, **options)  # type: ignore[arg-type]  # options are Simulation's


def _outcome(simulation: Simulation) -> Outcome:
    """A run up to where the flow refuses it, which is another rule's matter."""
    try:
        return simulation.run(batches=BATCHES)
    except StalenessError:
        return Outcome()


def _views(max_staleness: int) -> Iterator[FlowView]:
    version = max_staleness + 3
    for taken, flying, ready in product((False, True), range(4), range(4)):
        yield FlowView(
            batch_groups=4,
            version=version,
            batch_taken=taken,
            in_flight={version: flying} if flying else {},
            ready={version - max_staleness: ready} if ready else {},
        )


def _ask(plugin: StalenessPolicy, view: FlowView) -> tuple[object, ...]:
    chosen = {view.version: view.batch_groups}
    return plugin.admit(view), plugin.may_take(view, chosen), plugin.may_publish(view), plugin.interruption
