"""``[quantization]``: which weights are low-bit, and whether the trainer computes with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import check_job, load_job
from headrace.config.loading import load_resolved
from headrace.run.plans import LOW_PRECISION_TOLERANCE, UNALIGNED_TOLERANCE, aligned_scheme, self_check_tolerance

JOB = Path(__file__).parents[3] / "examples" / "sort_symbols" / "job.toml"
Errors = Callable[..., list[str]]


def errors(*overrides: str) -> list[str]:
    return [str(finding) for finding in check_job(load_job(JOB, overrides)) if finding.severity == "error"]


def test_a_job_without_the_table_has_weights_as_they_are() -> None:
    job = load_job(JOB)
    assert job.quantization is None
    assert aligned_scheme(job) is None


@pytest.mark.parametrize("scheme", ["w8a8_int8", "w4a16_int4", "w4a8", "fp8_e4m3"])
def test_one_key_turns_a_scheme_on_and_the_trainer_is_aligned(scheme: str) -> None:
    assert errors(f"quantization.scheme={scheme}") == []
    job = load_job(JOB, [f"quantization.scheme={scheme}"])
    spec = aligned_scheme(job)
    assert spec is not None
    assert (spec.role, spec.use) == ("quantization", scheme)


def test_a_trainer_that_is_not_aligned_may_differ_more_from_the_rollout() -> None:
    aligned = load_job(JOB, ["quantization.scheme=w8a8_int8"])
    plain = load_job(JOB, ["quantization.scheme=w8a8_int8", "quantization.align=false"])
    assert aligned_scheme(plain) is None
    assert self_check_tolerance(aligned) == LOW_PRECISION_TOLERANCE
    assert self_check_tolerance(plain) == UNALIGNED_TOLERANCE


def test_settings_of_a_scheme_are_its_own_and_are_judged() -> None:
    assert errors("quantization.scheme=w4a16_int4", "quantization.group=64") == []
    (error,) = errors("quantization.scheme=w4a16_int4", "quantization.group=0")
    assert "group must be at least 1, got 0" in error
    (error,) = errors("quantization.scheme=w8a8_int8", "quantization.group=64")
    assert "group" in error


def test_a_scheme_that_is_not_there_is_refused_with_its_neighbour() -> None:
    (error,) = errors("quantization.scheme=w8a8_int")
    assert "no quantization scheme named 'w8a8_int'" in error
    assert 'set scheme = "w8a8_int8"' in error


def test_a_table_without_a_scheme_says_what_is_missing() -> None:
    with pytest.raises(Exception, match="scheme is missing: it names the quantization"):
        load_job(JOB, ["quantization.align=true"])


def test_engines_without_low_bit_weights_are_refused_before_anything_starts() -> None:
    (error,) = errors("quantization.scheme=w8a8_int8", "rollout.use=headrace.testing:FakeInferenceEngine")
    assert "w8a8_int8 makes int8 weights, and inference engine" in error
    assert "multiplies by no low-bit weights" in error


def test_a_job_goes_through_its_own_record_unchanged(tmp_path: Path) -> None:
    import json

    overrides = ["quantization.scheme=w4a16_int4", "quantization.group=64", "quantization.align=false"]
    for job in (load_job(JOB), load_job(JOB, overrides)):
        path = tmp_path / "job.json"
        path.write_text(json.dumps(job.resolved()))
        again = load_resolved(path, directory=job.directory)
        assert (again.quantization is None) == (job.quantization is None)
        if job.quantization and again.quantization:
            assert again.quantization.align == job.quantization.align
            assert again.quantization.spec.settings == job.quantization.spec.settings
