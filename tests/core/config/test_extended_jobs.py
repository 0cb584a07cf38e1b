"""Job files that extend another: what is laid over what, and where each value then comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import JobErrors, load_job
from headrace.errors import ConfigError

WriteJob = Callable[..., Path]

PHASES = """
[[phase]]
name = "warm-up"
steps = 5
algorithm = { clip = 0.1 }
[[phase]]
name = "reinforce"
steps = 7
batch = { groups = 2 }
"""
WITHOUT_STEPS = ("steps = 10\n", "")


@pytest.fixture
def extend(write_job: WriteJob) -> Callable[..., Path]:
    """A job file that extends the small job with its two phases."""

    def write(text: str, *replacements: tuple[str, str], name: str = "mine.toml", other: str = "small.toml") -> Path:
        small = write_job(WITHOUT_STEPS, *replacements, extra=PHASES)
        path = small.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'extends = "{other}"\n{text}')
        return path

    return write


def test_tables_are_laid_over_key_by_key_and_phases_by_name(extend: Callable[..., Path]) -> None:
    more = '[[phase]]\nname = "last"\nsteps = 9\n'
    job = load_job(extend(f'[batch]\ngroups = 4\n[[phase]]\nname = "reinforce"\nalgorithm = {{ clip = 0.3 }}\n{more}'))
    assert [(phase.name, phase.steps, phase.batch.groups) for phase in job.phases] == [
        ("warm-up", 5, 4),
        ("reinforce", 7, 2),
        ("last", 9, 4),
    ]
    assert [phase.algorithm.settings for phase in job.phases] == [{"clip": 0.1}, {"clip": 0.3}, {}]
    assert {phase.batch.group_size for phase in job.phases} == {4}


def test_values_and_lists_are_replaced(extend: Callable[..., Path]) -> None:
    job = load_job(extend('observers = ["console"]\n[job]\nname = "mine"\n'))
    assert job.job.name == "mine"
    assert [observer.use for observer in job.observers] == ["console"]


def test_another_plugin_takes_the_place_of_the_whole_table(extend: Callable[..., Path]) -> None:
    job = load_job(extend('[environment]\nuse = "other.py:Task"\n[staleness]\npolicy = "synchronous"\n'))
    assert job.environment.spec.settings == {}
    assert {phase.staleness.settings["max_staleness"] for phase in job.phases} == {0}
    again = load_job(extend("[environment]\nlargest = 3\n"))
    assert again.environment.spec.settings == {"largest": 3}


@pytest.mark.parametrize("model", ['path = "folder"', "scratch = { layers = 2 }"])
def test_a_model_of_another_kind_takes_the_place_of_the_first(extend: Callable[..., Path], model: str) -> None:
    job = load_job(extend(f"[model]\n{model}\n"))
    assert (job.model.path is None) == ("scratch" in model)
    assert (job.model.scratch is None) == ("path" in model)


def test_files_extend_files_and_folders_of_their_own_name_them(extend: Callable[..., Path], tmp_path: Path) -> None:
    extend("[batch]\ngroups = 4\n")
    job = load_job(extend("[batch]\ngroup_size = 8\n", name="inner/last.toml", other="../mine.toml"))
    assert (job.phases[0].batch.groups, job.phases[0].batch.group_size) == (4, 8)
    assert job.directory == str(tmp_path / "inner")


def test_every_value_comes_from_the_line_where_it_is_written(
    extend: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = extend(
        '[batch]\ngroups = 4\n[[phase]]\nname = "reinforce"\nbatch = { groups = 3 }\n[[phase]]\nname = "n"\nsteps=1'
    )
    monkeypatch.chdir(tmp_path)
    job = load_job(path.name)
    assert job.origin(("batch", "groups")) == "mine.toml:3  [batch] groups = 4"
    assert job.origin(("phase", 1, "batch", "groups")) == "mine.toml:6  [phase.batch] groups = 3"
    assert job.origin(("phase", 2, "steps")) == "mine.toml:9  [phase] steps = 1"
    steps = (tmp_path / "small.toml").read_text().split("\n").index("steps = 7") + 1
    assert job.origin(("phase", 1, "steps")) == f"small.toml:{steps}  [phase] steps = 7"
    assert not job.written(("extends",))


def test_a_replaced_table_has_no_place_in_the_other_file(extend: Callable[..., Path]) -> None:
    job = load_job(extend('[environment]\nuse = "other.py:Task"\n'))
    assert not job.written(("environment", "largest"))


def test_overrides_come_last(extend: Callable[..., Path]) -> None:
    job = load_job(extend("[batch]\ngroups = 4\n"), ["batch.groups=6", "phase.warm-up.steps=1"])
    assert [(phase.steps, phase.batch.groups) for phase in job.phases] == [(1, 6), (7, 2)]


@pytest.mark.parametrize("other", ["nowhere.toml", "."])
def test_what_cannot_be_extended_is_named_with_its_line(extend: Callable[..., Path], other: str) -> None:
    with pytest.raises(ConfigError, match="extends names no file") as refused:
        load_job(extend("", other=other))
    assert f'mine.toml:1  extends = "{other}"' in str(refused.value)
    assert "from the folder of this one" in str(refused.value)


def test_files_that_extend_one_another_are_refused(extend: Callable[..., Path]) -> None:
    extend("", name="other.toml", other="mine.toml")
    with pytest.raises(ConfigError, match=r"extends names 'mine.toml', which extends this file"):
        load_job(extend("", other="other.toml"))
    with pytest.raises(ConfigError, match="which extends this file"):
        load_job(extend("", other="mine.toml"))


def test_a_mistake_is_found_in_the_file_that_has_it(extend: Callable[..., Path]) -> None:
    with pytest.raises(JobErrors) as refused:
        load_job(extend("[batch]\ngroup = 4\n", ("group_size = 4", "group_sise = 4")))
    said = sorted(str(error).partition("\n")[2].split("\n")[0].strip() for error in refused.value.errors)
    assert "mine.toml:3  [batch] group = 4" in said[0]
    assert "small.toml" in said[1]
    assert "group_sise = 4" in said[1]


def test_a_phase_without_a_name_is_over_none(extend: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="name is missing"):
        load_job(extend("[[phase]]\nsteps = 1\n"))
