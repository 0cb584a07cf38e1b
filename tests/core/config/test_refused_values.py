"""Wrong numbers, words, overrides and files: refused as every job that cannot work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.refusals import refused, teaches

WriteJob = Callable[..., Path]

WHOLE = "write a whole number, without quotes"
VALUES = [
    ("batch.groups=-4", "greater than or equal to 1; found -4", "at least 1"),
    ("batch.groups=100000000000001", "less than or equal to 1000000", "at most 1000000"),
    ("batch.groups=4.0", "should be a valid integer; found 4.0", WHOLE),
    ("batch.groups=[4]", "should be a valid integer; found [4]", WHOLE),
    ("batch.groups={ a = 1 }", "should be a valid integer", WHOLE),
    ("batch.groups=four", 'should be a valid integer; found "four"', WHOLE),
    ("batch.groups=2020-01-01", "should be a valid integer", WHOLE),
    ("batch.groups=inf", "should be a valid integer; found inf", WHOLE),
    ("job.steps=10000000000000000000000000", "less than or equal to 1000000000", "at most 1000000000"),
    ("job.seed=" + "9" * 5000, "seed should be a valid integer", WHOLE),
    ("job.seed=" + "[" * 5000, "seed should be a valid integer", WHOLE),
    ("job.seed=-1", "greater than or equal to 0", "at least 0"),
    ("job.seed=99999999999999999999", "less than 9223372036854775808", "below 9223372036854775808"),
    ("job.name=3", "name should be a valid string", "letters, digits"),
    ("job.name=sörtén", 'found "sörtén"', "letters, digits"),
    ("job.name=" + "a" * 2000, "at most 100 characters", "at most 100 letters"),
    ("job.runs=", "runs should have at least 1 character", "at least 1 character"),
    ("rollout.instances=100000", "less than or equal to 1024", "at most 1024"),
    ("rollout.autoscale={ min = 3, max = 2 }", "autoscale has min = 3 above max = 2", "not above it"),
    ("rollout.autoscale={ min = 1 }", "max is missing", "[rollout.autoscale]"),
    ("rollout.autoscale=true", "autoscale should be a table", "write a table"),
    ("rollout.threads=0", "greater than or equal to 1", "at least 1"),
    ("rollout.temperature=inf", "temperature should be a finite number; found inf", "above 0"),
    ("rollout.temperature=nan", "temperature is nan, which is no number", "above 0"),
    ("rollout.python=", "python should have at least 1 character", "at least 1 character"),
    ("trainer.learning_rate=nan", "learning_rate is nan, which is no number", "write a number"),
    ("trainer.betas=[0.9, nan]", "betas[1] is nan", "write a number"),
    ("trainer.betas=[0.9, 0.8, 0.7]", "betas should have at most 2 items", "at most 2 values"),
    ("trainer.betas=[0.9]", "betas[1] is missing", "give the list all of its values"),
    ("environment.scoring_deadline=inf", "should be a finite number", "with an end"),
    ("environment.max_failed_share=2", "less than or equal to 1", "at most 1"),
    ("environment.operator=3", "should be 'plus' or 'minus'; found 3", "one of plus, minus"),
    ("evaluation.greedy=yes", 'greedy should be a valid boolean; found "yes"', "true or false"),
    ("evaluation=3", "evaluation should be a table", "[evaluation]"),
    ("algorithm.use=3", "use should be text", 'write use = "NAME" in [algorithm]'),
    ("algorithm.use=a\tb", "'a\\tb' does not name a plugin", "write a name"),
    ("algorithm.use=" + "x" * 5000, "no algorithm named", "headrace plugins algorithm"),
    ("model.scratch=3", "scratch should be a table; found 3", "write a table"),
    ("job=1", "job should be a table", "[job]"),
    ("jobb.seed=1", "unknown key 'jobb'", "rename it to job"),
    ("seed=1", "known here: algorithm, batch, ", "remove it"),
    ("network.port=49689", "unknown key 'port'; known here: host, metrics, transport", "remove it"),
    ("job.steps.x=1", "job.steps is not a table", "set a key of a table"),
    ("job.seed", "is not of the form a.b=value", "for example --set rollout.instances=4"),
    ("job..seed=1", "is not of the form a.b=value", "for example"),
    ("phase.warm.steps=1", "phase should be a list of tables", "[[phase]]"),
    ("observers.0=console", "observers should be a list", 'observers = ["console"]'),
    ("observers.x=console", "observers should be a list", 'observers = ["console"]'),
]


@pytest.mark.parametrize(("override", "allowed", "fix"), VALUES, ids=[value[0][:40] for value in VALUES])
def test_a_wrong_value_is_refused_where_it_was_given(
    folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str], override: str, allowed: str, fix: str
) -> None:
    job = write_job(("observers = []\n", "")) if override.startswith("observers") else write_job()
    place = f"--set {override}"[:250].encode("unicode_escape").decode() if "\t" in override else f"--set {override}"
    teaches(refused(job, capsys, "--set", override), place[:250], allowed, fix)


FILES = [
    (b"", "job.toml", "the job file sets nothing", "start from a job that works"),
    (b"# nothing yet\n", "job.toml", "the job file sets nothing", "start from a job that works"),
    (bytes(range(256)), "job.toml", "not UTF-8 text", "save it as UTF-8"),
    ("[job]\n".encode("utf-16"), "job.toml", "not UTF-8 text", "save it as UTF-8"),
    (b"[job]\n\x1b[31m\n", "job.toml:2  \\x1b[31m", "not valid TOML", "write key = value, or [table]"),
    (b'{"job": {}}\n', 'job.toml:1  {"job": {}}', "not valid TOML", "write key = value, or [table]"),
    (b"job:\n  name: a\n", "job.toml:1  job:", "not valid TOML", "write key = value, or [table]"),
    (b"[job]\nname = small\n", "job.toml:2  name = small", "Invalid value", 'a value is "text", a number'),
    (b"[job]\nseed = 1\nseed = 2\n", "job.toml:3  seed = 2", "Cannot overwrite", "write every key once"),
    (b"[job]\n[batch]\n[job]\n", "job.toml:3  [job]", "Cannot declare", "write every table once"),
    (b"[phase]\n[[phase]]\n", "job.toml:2  [[phase]]", "Cannot", "once"),
    (b"[job\nseed = 1\n", "job.toml:1  [job", "Expected ']'", "close the bracket"),
    (b"[job]\nseed = 1 2\n", "job.toml:2  seed = 1 2", "Expected newline", "one key = value a line"),
    (b"x = " + b"9" * 5000, "job.toml:1  x = 999", "Exceeds the limit", "a number"),
    (b"x = " + b"[" * 5000, "job.toml:1  x = [[[", "not valid TOML", "[a list]"),
    (b"x = '" + b"y" * 5000, "job.toml:1  x = 'yyy", "not valid TOML", 'a value is "text"'),
]


@pytest.mark.parametrize(("content", "place", "allowed", "fix"), FILES)
def test_a_file_that_is_no_job_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, place: str, allowed: str, fix: str
) -> None:
    (tmp_path / "job.toml").write_bytes(content)
    teaches(refused(tmp_path / "job.toml", capsys), place, allowed, fix)


@pytest.mark.parametrize(("name", "reason"), [("absent.toml", "No such file"), ("bare", "it is a directory")])
def test_a_path_without_a_job_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    teaches(refused(folder / name, capsys), name, f"cannot read the job file: {reason}", "give the path of a TOML file")


def test_a_byte_order_mark_is_no_mistake(write_job: WriteJob, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli import main

    job = write_job()
    job.write_bytes(b"\xef\xbb\xbf" + job.read_bytes())
    assert main(["check", str(job)]) == 0


SHAPES = {
    "no_phases": (("steps = 10\n", ""), "[job]", "the job has no phases: steps is missing", "or a [[phase]]"),
    "empty_phases": (
        ('observers = []\n\n[job]\nname = "small"\nsteps = 10\n', 'phase = []\n[job]\nname = "small"\n'),
        "phase = []",
        "the job has no phases",
        "add steps = ... (training batches) to [job], or a [[phase]]",
    ),
    "phase_without_a_name": (
        ("steps = 10\n\n", '\n[[phase]]\nname = "a"\nsteps = 1\n[[phase]]\nsteps = 2\n'),
        "small.toml:9  [phase]",
        "name is missing",
        "add name = ... to [[phase]]",
    ),
    "table_in_another": (
        ("[rollout]", "[environment.rollout]"),
        "[environment.rollout]",
        "there is no [rollout]",
        "write [rollout]",
    ),
    "sizes_beside_scratch": (
        ("[model.scratch]", "[model]"),
        "[model]",
        "model has neither path nor scratch; layers may be of a fresh model",
        "write them in [model.scratch]",
    ),
    "missing_table": (
        ("[batch]\ngroups = 8\n", "[batch]\n"),
        "[batch]",
        "groups is missing",
        "add groups = ... to [batch]",
    ),
    "impossible_end": (
        (
            "steps = 10\n\n",
            '\n[[phase]]\nname = "a"\nsteps = 1\nuntil = { metric = "evaluation/sampled_accuracy", at_least = 2 }\n',
        ),
        "small.toml:9  [phase.until]",
        "at_least should be less than or equal to 1",
        "at most 1",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_job_of_the_wrong_shape_is_refused(
    folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    replacement, place, allowed, fix = SHAPES[name]
    teaches(refused(write_job(replacement), capsys), place, allowed, fix)


def test_more_mistakes_than_fit_a_screen_are_counted(
    folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(write_job(("groups = 8", "groups = 8\n" + "".join(f"k{i} = 1\n" for i in range(40)))), capsys)
    shown = text.count("Error: ")
    assert shown > 2
    assert f"... and {40 - shown} more errors, shown when these are mended" in text
