"""The audit of separate stages: each row that is trained went through each of them, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.story import Story

STAGES = ("reference", "advantage")


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path, stages=STAGES)


def staged(story: Story, group: int, *stages: str) -> None:
    for stage in stages:
        story.tell("stage_finished", stage=stage, rows=story.members(group), started=0.0, finished=1.0)


def test_groups_that_went_through_every_stage_may_be_trained(story: Story) -> None:
    group = story.dispatch()
    story.finish(group)
    staged(story, group, *STAGES)
    story.train(group)
    assert story.end("stopped").ok


def test_a_group_that_missed_a_stage_may_not(story: Story) -> None:
    group = story.dispatch()
    story.finish(group)
    staged(story, group, "reference")
    story.train(group)
    (violation, _) = story.end("stopped").violations
    assert violation.rule == "stages"
    assert "taken before it went through the stages ['advantage']" in violation.message


def test_a_row_that_goes_through_a_stage_twice_is_found(story: Story) -> None:
    group = story.dispatch()
    story.finish(group)
    staged(story, group, *STAGES, "reference")
    assert {violation.rule for violation in story.end("stopped").violations} == {"stages"}


def test_a_row_that_was_never_stored_goes_through_no_stage(story: Story) -> None:
    staged(story, story.dispatch(), "reference")
    assert {violation.rule for violation in story.end("stopped").violations} == {"stages"}


def test_after_a_resume_what_is_stored_goes_through_its_stages_again(story: Story) -> None:
    group = story.dispatch()
    story.finish(group)
    staged(story, group, *STAGES)
    saved = story.checkpoint()
    story.resume(saved)
    staged(story, group, *STAGES)
    story.train(group)
    assert story.end("stopped").ok
