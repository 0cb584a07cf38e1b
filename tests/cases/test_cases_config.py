"""Cases D01, D02, L01, L06, M01 and M04: a job that cannot work is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace.config import check_job, dumps, load_job
from headrace.errors import PluginError
from headrace.registry import load

WriteJob = Callable[..., Path]
ErrorsOf = Callable[..., list[str]]


@pytest.mark.parametrize("key", ["top_p = 0.9", "top_k = 50", "min_p = 0.1"])
def test_D01_truncated_sampling_is_refused_with_the_reason(errors_of: ErrorsOf, key: str) -> None:
    (error,) = errors_of(("max_new_tokens = 8", f"max_new_tokens = 8\n{key}"))
    assert "every ratio would carry a hidden factor" in error
    assert f"[rollout] {key}" in error
    assert "sharpen the samples with rollout.temperature" in error


@pytest.mark.parametrize("temperature", ["0", "0.0", "-1"])
def test_D02_a_temperature_of_zero_or_less_is_refused_for_training(errors_of: ErrorsOf, temperature: str) -> None:
    (error,) = errors_of(overrides=[f"rollout.temperature={temperature}"])
    assert "temperature should be greater than 0" in error
    assert "log-probs need a temperature above 0" in error


@pytest.mark.parametrize(
    ("old", "new", "meant"),
    [
        ("[batch]", "[bach]", "batch"),
        ("group_size = 4", "groups_size = 4", "group_size"),
        ("max_staleness = 1", "max_stalenes = 1", "max_staleness"),
        ("learning_rate", "learning_rte", "learning_rate"),
        ("largest", "larges", "largest"),
        ('name = "small"', 'nme = "small"', "name"),
    ],
)
def test_L01_an_unknown_key_is_an_error_with_the_nearest_match(
    errors_of: ErrorsOf, old: str, new: str, meant: str
) -> None:
    assert any("unknown key" in error and f"Did you mean {meant!r}?" in error for error in errors_of((old, new)))


def test_L01_settings_of_a_disabled_block_are_warned_about(write_job: WriteJob) -> None:
    findings = check_job(load_job(write_job(extra="\n[evaluation]\nprompts = 64\nsampled = false\n")))
    assert [finding.severity for finding in findings] == ["warning", "warning"]
    assert all("evaluation.every is 0" in str(finding) for finding in findings)


def test_L01_the_resolved_job_says_every_default(write_job: WriteJob) -> None:
    text = dumps(load_job(write_job()).resolved())
    for line in ("seed = 0", "temperature = 1.0", "scoring_deadline = 10.0", "micro_batch_tokens = 8192", "keep = 2"):
        assert line in text.splitlines()


def test_L01_a_wrong_job_is_refused_before_anything_starts(write_job: WriteJob) -> None:
    path = write_job(("mini_batches = 2", "mini_batches = 3"))
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "run", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
    )
    assert done.returncode == 2
    assert "8 groups of 4 cannot be split into 3 equal mini-batches" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (path.parent / "runs").exists()


def test_L06_a_job_is_immutable_after_loading(write_job: WriteJob) -> None:
    job = load_job(write_job())
    for table, key in ((job, "model"), (job.model, "path"), (job.phases[0], "steps"), (job.checkpoint, "every")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(table, key, None)


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a distribution that offers the storage ``shelf`` and whose extra needs what is not there."""

    def install(name: str) -> None:
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nProvides-Extra: gpu\n"
            "Requires-Dist: absent-engine>=7 ; extra == 'gpu'\nRequires-Dist: numpy>=9999 ; extra == 'gpu'\n"
        )
        target = f"{Path(__file__).parents[1] / 'small_plugins.py'}"
        (tmp_path / name / f"{name}_shelf.py").write_text(Path(target).read_text())
        (info / "entry_points.txt").write_text(f"[headrace.storage]\nshelf = {name}_shelf:Dictionary [gpu]\n")
        monkeypatch.syspath_prepend(str(tmp_path / name))

    return install


def test_M01_an_absent_or_unsupported_engine_is_named_with_found_and_needed_versions(
    errors_of: ErrorsOf, distribution: Callable[[str], None], write_job: WriteJob
) -> None:
    distribution("alpha")
    storage = write_job().read_text().partition("[storage]\n")[2].splitlines()[0]
    begun = time.monotonic()
    (error,) = errors_of((storage, 'use = "shelf"'))
    assert time.monotonic() - begun < 5
    first, *rest = error.splitlines()
    assert first.startswith("PluginError: storage 'shelf' needs absent-engine>=7, which is not installed; numpy>=9999")
    assert "and finds " in first
    assert rest[-1] == '  fix:  pip install "alpha[gpu]"'


def test_M04_the_same_name_from_two_distributions_is_refused(distribution: Callable[[str], None]) -> None:
    distribution("beta")
    distribution("gamma")
    with pytest.raises(PluginError, match=r"storage 'shelf' is offered more than once: beta .*, gamma "):
        load("storage", "shelf")


def test_M04_an_unpackaged_file_fills_a_role(write_job: WriteJob, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from headrace.contract import Algorithm, AlgorithmNeeds\n\n"
        "class Mine(Algorithm):\n"
        "    @classmethod\n"
        "    def needs(cls, settings):\n"
        "        return AlgorithmNeeds(min_group_size=3)\n\n"
        "    def prepare(self, batch):\n"
        "        raise NotImplementedError\n\n"
        "    def loss(self, *, temperature):\n"
        "        raise NotImplementedError\n"
    )
    algorithm = write_job().read_text().partition("[algorithm]\n")[2].splitlines()[0]
    job = load_job(write_job((algorithm, 'use = "./mine.py:Mine"')))
    assert check_job(job) == []
    assert load("algorithm", job.phases[0].algorithm.use, directory=job.directory).__name__ == "Mine"
