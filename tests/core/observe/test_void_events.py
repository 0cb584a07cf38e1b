"""Which events are void, and which are in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import RunError
from headrace.observe.epochs import VoidEvents, standing_checkpoints, standing_events, void_events
from headrace.observe.events import Resumed
from support.story import Story


def resumed(seq: int, events: int) -> Resumed:
    return Resumed(seq=seq, time=0.0, epoch=1, version=0, checkpoint="", events=events, restarted=[])


@pytest.mark.parametrize(
    ("resumes", "ranges"),
    [
        ([], []),
        ([(9, 5)], [range(5, 9)]),
        ([(9, 5), (20, 14)], [range(5, 9), range(14, 20)]),
        ([(9, 5), (20, 5)], [range(5, 20)]),
        ([(9, 5), (20, 7)], [range(7, 20)]),
        ([(9, 5), (20, 14), (30, 10)], [range(5, 9), range(10, 30)]),
        ([(9, 12)], [range(9, 9)]),
    ],
    ids=["none", "one", "two", "one of the same state", "one that brings back", "one of two", "a state to come"],
)
def test_a_resume_voids_what_came_after_its_state_and_with_it_earlier_resumes(
    resumes: list[tuple[int, int]], ranges: list[range]
) -> None:
    void = VoidEvents(resumed(*numbers) for numbers in resumes)
    assert list(void.ranges) == ranges
    assert [seq for seq in range(40) if seq in void] == [seq for part in ranges for seq in part]


def test_the_events_in_force_are_those_of_a_run_without_a_mishap(mishaps: Any, tmp_path: Path) -> None:
    run = mishaps.write(tmp_path / "run")
    void = void_events(run)
    standing = list(standing_events(run))
    assert [e.seq for e in standing] == [e["seq"] for e in mishaps.events if e["seq"] not in void]
    trained = [e.version for e in standing if type(e).__name__ == "BatchTrained"]
    assert trained == list(range(15))


def test_a_word_in_a_reason_makes_no_resume(simulate: Any, tmp_path: Path) -> None:
    run = simulate(steps=1)
    run.events[-2] |= {"reason": "resumed"}
    assert void_events(run.write(tmp_path / "run")).ranges == ()


def test_an_absent_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read"):
        void_events(tmp_path)


def test_checkpoints_in_force_are_those_whose_states_no_resume_made_void(tmp_path: Path) -> None:
    story = Story(tmp_path)
    saved = []
    for _ in range(3):
        story.step()
        saved.append(story.checkpoint())
    first, second, third = (Path(name["checkpoint"]).name for name in saved)
    assert standing_checkpoints(tmp_path) == [first, second, third]
    story.resume(saved[1])
    assert standing_checkpoints(tmp_path) == [first, second], "the report of the second is void, its state is not"
    story.step()
    story.step()
    again = Path(story.checkpoint()["checkpoint"]).name
    assert standing_checkpoints(tmp_path) == [first, second, again]
    story.resume(saved[0])
    assert standing_checkpoints(tmp_path) == [first]
    assert story.end("stopped").ok
