"""Job files: shapes, merging, overrides, origins."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.config import JobErrors, check_job, dumps, load_job, load_resolved
from headrace.config.sources import key_lines
from headrace.errors import ConfigError, RunError

WriteJob = Callable[..., Path]

PHASES = """
[[phase]]
name = "warm-up"
steps = 5
until = { metric = "evaluation/sampled_accuracy", at_least = 0.2 }
[phase.algorithm]
use = "small_plugins.py:Imitation"
[phase.batch]
group_size = 1

[[phase]]
name = "reinforce"
steps = 7
[phase.trainer]
learning_rate = 0.01
[phase.algorithm]
clip = 0.3
"""
WITHOUT_STEPS = ("steps = 10\n", "")
EVALUATED = "\n[evaluation]\nevery = 2\n"


def test_a_job_without_phases_is_one_phase_named_main(write_job: WriteJob) -> None:
    job = load_job(write_job())
    (phase,) = job.phases
    assert (phase.name, phase.steps, phase.until) == ("main", 10, None)
    assert phase.staleness.settings == {"max_staleness": 1}
    assert phase.trainer.settings == {"learning_rate": 0.1}
    assert phase.batch.micro_batch_tokens == 8192


def test_cores_keys_and_the_plugins_keys_are_parted(write_job: WriteJob) -> None:
    job = load_job(write_job(("max_new_tokens = 8", "max_new_tokens = 8\ninstances = 3\nslots = 2")))
    assert (job.rollout.instances, job.rollout.max_new_tokens, job.rollout.temperature) == (3, 8, 1.0)
    assert job.rollout.spec.settings == {"slots": 2}
    assert job.rollout.spec.role == "inference_engine"
    assert job.environment.spec.settings == {"largest": 9}


def test_defaults_are_memory_a_transport_that_fits_local_ipc_console_and_the_synchronous_policy(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\nname = "a"\nsteps = 1\n[model]\npath = "m"\n[environment]\nuse = "e"\n'
        '[rollout]\nuse = "r"\nmax_new_tokens = 1\n[trainer]\nuse = "t"\n[algorithm]\nuse = "a"\n'
        "[batch]\ngroups = 1\ngroup_size = 1\n"
    )
    job = load_job(path)
    assert (job.storage.spec.use, job.weights.spec.use, job.launcher.spec.use) == ("memory", "auto", "local")
    assert (job.network.transport, job.network.host) == ("ipc", "127.0.0.1")
    assert [spec.use for spec in job.observers] == ["console"]
    assert job.phases[0].staleness.use == "synchronous"
    assert job.phases[0].staleness.settings == {"max_staleness": 0}
    assert job.storage.spec.origin == f'{path}, which names no storage: "memory" is the default'


def test_a_phase_merges_per_key_and_another_plugin_replaces_the_table(write_job: WriteJob) -> None:
    job = load_job(write_job(WITHOUT_STEPS, ('Relative"', 'Relative"\nreference_weight = 0.1'), extra=PHASES))
    warm_up, reinforce = job.phases
    assert warm_up.algorithm.settings == {}
    assert (warm_up.batch.groups, warm_up.batch.group_size) == (8, 1)
    assert warm_up.until is not None
    assert warm_up.until.at_least == 0.2
    assert reinforce.algorithm.settings == {"reference_weight": 0.1, "clip": 0.3}
    assert (warm_up.trainer.settings, reinforce.trainer.settings) == ({"learning_rate": 0.1}, {"learning_rate": 0.01})
    assert reinforce.batch.group_size == 4


def test_paths_are_relative_to_the_job_file(write_job: WriteJob, tmp_path: Path) -> None:
    file = write_job(
        ("[model.scratch]\nlayers = 1", '[model]\npath = "../model"'), ("learning_rate", 'python = "v/python"\nbetas')
    )
    job = load_job(file)
    assert job.directory == str(tmp_path)
    assert job.model.path == str(tmp_path.parent / "model")
    assert job.trainer.python == str(tmp_path / "v/python")


def test_observers_are_names_or_tables(write_job: WriteJob) -> None:
    job = load_job(write_job(("observers = []", 'observers = ["console", { use = "o.py:Diary", pages = 3 }]')))
    assert [(spec.use, spec.settings) for spec in job.observers] == [("console", {}), ("o.py:Diary", {"pages": 3})]


def test_a_job_cannot_be_changed_after_loading(write_job: WriteJob) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_job(write_job()).rollout.temperature = 2.0


def test_a_resolved_job_is_the_same_job_again(write_job: WriteJob, tmp_path: Path) -> None:
    job = load_job(write_job(WITHOUT_STEPS, extra=PHASES.replace("small_plugins", "./small_plugins") + EVALUATED))
    elsewhere = tmp_path / "elsewhere" / "job.toml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(dumps(job.resolved()))
    assert load_job(elsewhere).resolved() == job.resolved()
    assert job.resolved()["phase"][0]["algorithm"]["use"] == f"{tmp_path}/small_plugins.py:Imitation"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("job.seed=7", ("job", "seed"), 7),
        ("job.name=other", ("job", "name"), "other"),
        ("rollout.temperature = 0.5", ("rollout", "temperature"), 0.5),
        ("batch.groups=16", ("phases", 0, "batch", "groups"), 16),
        ("evaluation.greedy=false", ("evaluation", "greedy"), False),
    ],
)
def test_an_override_replaces_a_value(
    write_job: WriteJob, override: str, path: tuple[str | int, ...], value: Any
) -> None:
    found: Any = load_job(write_job(), [override])
    for step in path:
        found = found[step] if isinstance(step, int) else getattr(found, step)
    assert found == value


@pytest.mark.parametrize("phase", ["1", "reinforce"])
def test_an_override_finds_a_phase_by_position_or_name(write_job: WriteJob, phase: str) -> None:
    job = load_job(write_job(WITHOUT_STEPS, extra=PHASES), [f"phase.{phase}.trainer.learning_rate=0.5"])
    assert [p.trainer.settings["learning_rate"] for p in job.phases] == [0.1, 0.5]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("job.seed", "not of the form a.b=value"),
        ("=3", "not of the form a.b=value"),
        ("job.name.first=x", "is not a table"),
        ("phase.reinforse.steps=1", "phase has no entry 'reinforse'"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused(write_job: WriteJob, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_job(write_job(WITHOUT_STEPS, extra=PHASES), [override])
    assert caught.value.origin == f"--set {override}"


def test_a_value_remembers_the_line_it_was_written_on(write_job: WriteJob) -> None:
    file = write_job(WITHOUT_STEPS, extra=PHASES)
    job = load_job(file, ["rollout.instances=2"])
    lines = file.read_text().splitlines()
    assert job.origin(("batch", "groups")) == f"{file}:{lines.index('groups = 8') + 1}  [batch] groups = 8"
    assert job.origin(("phase", 1, "algorithm", "clip")).endswith("[phase.algorithm] clip = 0.3")
    assert job.origin(("phase", 0, "until", "metric")).startswith(
        f"{file}:{lines.index('steps = 5') + 2}  [phase.until]"
    )
    assert job.origin(("rollout", "instances")) == "--set rollout.instances=2"
    assert job.origin(("trainer", "threads")).endswith("  [trainer]")
    assert job.origin(("checkpoint", "every")) == str(file)


INLINE = """
[[phase]]
name = "only"
steps = 2
algorithm = { use = "./small_plugins.py:Relativ", clip = 0.3 }
trainer = { learning_rte = 0.01 }
"""


def test_a_mistake_in_an_inline_table_of_a_phase_is_placed_there_with_its_key(errors_of: Callable[..., Any]) -> None:
    use, key = errors_of(WITHOUT_STEPS, extra=INLINE)
    assert '[phase.algorithm] use = "./small_plugins.py:Relativ"\n' in use, "nor is it a default"
    assert "[phase.trainer] learning_rte = 0.01\n" in key


def test_a_mistake_in_an_inline_table_of_an_override_is_placed_there(errors_of: Callable[..., Any]) -> None:
    override = 'phase.only.algorithm={ use = "./small_plugins.py:Relativ" }'
    (error,) = errors_of(WITHOUT_STEPS, extra=INLINE.replace("rte", "rate"), overrides=[override])
    assert f"  from: --set {override}\n" in error


def test_an_override_of_a_table_forgets_those_of_its_keys(write_job: WriteJob) -> None:
    last = "batch={ groups = 8, group_size = 4 }"
    job = load_job(write_job(), ["batch.groups=16", "batch.mini_batches=4", last])
    assert job.origin(("batch", "groups")) == job.origin(("batch", "mini_batches")) == f"--set {last}"
    assert job.written(("batch", "groups"))
    assert not job.written(("batch", "mini_batches"))


def test_lines_are_found_behind_every_toml_form() -> None:
    text = (
        "a = '''\n[not.a.table]\nb = 1\n'''  # [nor] = this\n"
        'list = [\n  1, # "x"\n  [2, 3],\n]\n'
        '[t."dotted.key" . u]\n"quoted \\" key" = "#"\nx.y = 1\n'
        "[[many]]\n[many.inner]\nk = 1\n[[many]]\n[[many.deep]]\n[[many.deep]]\nz = 2\n"
    )
    tomllib.loads(text)
    lines = key_lines(text)
    assert lines["a",] == 1
    assert lines["list",] == 5
    assert lines["t", "dotted.key", "u"] == 9
    assert lines["t", "dotted.key", "u", "x", "y"] == 11
    assert lines["many", 0, "inner", "k"] == 14
    assert lines["many", 1, "deep", 1, "z"] == 18
    assert not any("not" in path or "nor" in path for path in lines)


KEYS = st.text(min_size=1, max_size=6)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.datetimes(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_is_written_as_toml_is_read_back(table: dict[str, Any]) -> None:
    assert tomllib.loads(dumps(table)) == table


def test_a_sound_job_has_no_finding(write_job: WriteJob) -> None:
    assert check_job(load_job(write_job())) == []


def test_one_mistake_does_not_hide_another(write_job: WriteJob) -> None:
    with pytest.raises(JobErrors, match="mini_batches") as caught:
        load_job(write_job(("mini_batches = 2", "mini_batch = 2")), ["job.sed=1", "rollout.instances=0"])
    assert len(caught.value.errors) == 3


@pytest.mark.parametrize("content", ['{"job": {"na', "", "{}", "[]", "null", b"\xff"])
def test_a_run_whose_job_was_damaged_says_so(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunError, match="the job of the run cannot be read: ") as caught:
        load_resolved(path, directory=str(tmp_path))
    assert caught.value.origin == str(path)
    assert "put the file back" in caught.value.fix
