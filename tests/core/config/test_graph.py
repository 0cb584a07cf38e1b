"""What is shown of a phase's stages, as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.cli import main

WriteJob = Callable[..., Path]
SVG = "{http://www.w3.org/2000/svg}"
REFERENCE = ("--set", "algorithm.reference_weight=0.1")
TWO_PHASES = '\n[[phase]]\nname = "a <& b"\nsteps = 1\n[[phase]]\nname = "last"\nsteps = 1\n'


def shown(job: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["graph", str(job), *options]) == 0
    return capsys.readouterr().out


def picture(job: Path, capsys: pytest.CaptureFixture[str], *options: str) -> ElementTree.Element:
    file = job.parent / "graph.svg"
    assert shown(job, capsys, "--svg", str(file), *options) == f"{file}\n"
    return ElementTree.parse(file).getroot()


def texts(root: ElementTree.Element, kind: str) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text") if element.get("class") == kind]


def test_a_phase_shows_its_stages_with_the_columns_between_them(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(write_job(), capsys, *REFERENCE)
    _, _, edges = text.partition("stages, and the columns that go from one to the next\n")
    assert edges == (
        "      generate    -> score      tokens, loss_mask, truncated\n"
        "      generate    -> reference  tokens, loss_mask, group\n"
        "      generate    -> advantage  tokens, loss_mask, behaviour_logprobs, group, version, truncated\n"
        "      generate    -> train      tokens, loss_mask, behaviour_logprobs, group, version, truncated\n"
        "      score       -> advantage  reward\n"
        "      score       -> train      reward\n"
        "      reference   -> train      reference_logprobs\n"
        "      advantage   -> train      loss_weights, denominator, advantages, trained\n"
    )


def test_the_picture_has_a_box_for_each_stage_and_an_arrow_for_each_edge(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    root = picture(write_job(), capsys, *REFERENCE)
    assert texts(root, "name") == ["generate", "score", "reference", "advantage", "train"]
    assert sum(line.get("class") == "arrow" for line in root.iter(f"{SVG}line")) == 8
    columns = " ".join(texts(root, "label")).replace(",", "").split()
    assert columns.count("tokens") == 4
    assert columns.count("reference_logprobs") == 1


def test_everything_lies_within_the_picture_and_no_arrow_on_another(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    root = picture(write_job(("steps = 10\n", ""), extra=TWO_PHASES), capsys)
    width, height = int(root.get("width", "")), int(root.get("height", ""))
    lines = [[int(line.get(name, "")) for name in ("x1", "y1", "x2", "y2")] for line in root.iter(f"{SVG}line")]
    assert all(0 < x < width and 0 < y < height for x1, y1, x2, y2 in lines for x, y in ((x1, y1), (x2, y2)))
    heights = [y1 for x1, y1, x2, y2 in lines if y1 == y2]
    assert len(set(heights)) == len(heights)


def test_the_picture_has_every_phase_under_its_name(write_job: WriteJob, capsys: pytest.CaptureFixture[str]) -> None:
    root = picture(write_job(("steps = 10\n", ""), extra=TWO_PHASES), capsys)
    assert [heading.partition(":")[0] for heading in texts(root, "heading")] == ["a <& b", "last"]


def test_a_picture_that_cannot_be_written_is_one_error(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["graph", str(write_job()), "--svg", str(tmp_path / "gone" / "graph.svg")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("RunError: the picture cannot be written: No such file or directory\n  from: --svg ")
