"""The flow on a virtual clock, under policies that let several versions be in flight."""

from __future__ import annotations

import pytest

from headrace_staleness.multi_version import MultiVersion
from support.virtual_fleet import BIMODAL, LOG_NORMAL, Lengths, Simulation


def multi_version(max_staleness: int, outstanding_batches: float | None = None) -> MultiVersion:
    return MultiVersion(MultiVersion.Settings(max_staleness=max_staleness, outstanding_batches=outstanding_batches))


@pytest.mark.parametrize("lengths", [BIMODAL, LOG_NORMAL], ids=["bimodal", "log-normal"])
@pytest.mark.parametrize(
    ("max_staleness", "outstanding_batches"), [(0, None), (1, None), (2, 1.3), (2, None), (3, 3), (5, 4.5)]
)
@pytest.mark.parametrize("live_versions", [1, 3])
def test_the_bound_holds_and_the_run_goes_on_for_any_lengths(
    max_staleness: int, outstanding_batches: float | None, lengths: Lengths, live_versions: int
) -> None:
    simulation = Simulation(
        policy=multi_version(max_staleness, outstanding_batches),
        lengths=lengths,
        live_versions=live_versions,
        drop_share=0.02,
    )
    simulation.run(batches=15)
    assert min(simulation.staleness) >= 0
    assert max(simulation.staleness) <= max_staleness
    rows = [row for batch in simulation.trained for row in batch]
    assert len(rows) == len(set(rows)) == 15 * 16


def test_a_wider_window_hides_longer_tails() -> None:
    times = [Simulation(policy=multi_version(bound), lengths=BIMODAL, seed=3).run(batches=25) for bound in (0, 1, 2, 3)]
    assert times == sorted(times, reverse=True)
    assert times[3] < 0.5 * times[0]
