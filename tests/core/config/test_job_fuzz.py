"""Whatever a job file says, a person reads an error and never a traceback."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.config import check_job, dumps, load_job
from headrace.errors import ConfigError

ROOT = Path(__file__).parents[3]
JOB = """
observers = [{ use = "FILE:Diary", pages = 2 }]
[job]
name = "small"
[model.scratch]
layers = 1
[environment]
use = "FILE:Sums"
largest = 9
[rollout]
use = "FILE:Engine"
max_new_tokens = 8
[trainer]
use = "FILE:Trainer"
learning_rate = 0.1
betas = [0.9, 0.99]
[algorithm]
use = "FILE:Relative"
[batch]
groups = 8
group_size = 4
[staleness]
policy = "FILE:Bounded"
[storage]
use = "FILE:Dictionary"
[weights]
use = "FILE:Transport"
[launcher]
use = "FILE:Starter"
[evaluation]
every = 2
[[phase]]
name = "one"
steps = 3
until = { metric = "evaluation/sampled_accuracy", at_least = 0.5 }
[[phase]]
name = "two"
steps = 3
[phase.algorithm]
use = "FILE:Imitation"
[phase.trainer]
learning_rate = 0.2
""".replace("FILE", str(ROOT / "tests" / "small_plugins.py"))
SOUND: dict[str, Any] = tomllib.loads(JOB)

VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-3, 3), st.floats(), st.sampled_from(["", "x", "a:b", "./x.py:A", "é\n"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["use", "a"]), inner)),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and list position below ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        yield (*path, step)
        yield from places(inner, (*path, step))


def test_the_job_that_is_mutated_is_sound(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert [str(f) for f in check_job(load_job(tmp_path / "job.toml")) if f.severity == "error"] == []


@given(st.sampled_from(sorted(places(SOUND), key=str)), st.sampled_from(["replace", "remove", "rename"]), VALUES)
def test_a_mutated_job_loads_or_is_refused_in_words(
    tmp_path_factory: Any, place: tuple[Any, ...], change: str, value: Any
) -> None:
    job = copy.deepcopy(SOUND)
    parent: Any = job
    for step in place[:-1]:
        parent = parent[step]
    if change == "replace":
        parent[place[-1]] = value
    else:
        old = parent.pop(place[-1])
        if change == "rename" and isinstance(parent, dict):
            parent[f"{place[-1]}s"] = old
    path = tmp_path_factory.getbasetemp() / "mutated.toml"
    path.write_text(dumps(job))
    try:
        errors = [finding.error for finding in check_job(load_job(path))]
    except ConfigError as error:
        errors = [*getattr(error, "errors", (error,))]
    assert all(path.name in error.origin and error.fix for error in errors), [str(error) for error in errors]
