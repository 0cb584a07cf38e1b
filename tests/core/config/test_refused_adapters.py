"""A trainer that trains an adapter, beside tables and engines that cannot have one."""

from __future__ import annotations

from pathlib import Path

from headrace.config import check_job, load_job

JOB = Path(__file__).parents[3] / "examples" / "sort_symbols" / "job.toml"
LORA = "phase.reinforce.trainer.lora.rank=8"


def errors(*overrides: str) -> list[str]:
    return [str(finding) for finding in check_job(load_job(JOB, overrides)) if finding.severity == "error"]


def test_an_adapter_is_trained_where_nothing_else_stands_against_it() -> None:
    assert errors(LORA) == []


def test_an_adapter_is_not_trained_beside_a_quantisation_scheme() -> None:
    for align in ("true", "false"):
        (error,) = errors(LORA, "quantization.scheme=w8a8_int8", f"quantization.align={align}")
        assert (
            "training engine 'torch' is set to train an adapter, and [quantization] has weights made low-bit" in error
        )
        assert "fix:  remove [quantization], or have the trainer train all weights" in error


def test_an_adapter_is_not_trained_for_an_inference_engine_that_serves_none() -> None:
    (error,) = errors(LORA, "rollout.use=headrace.testing:FakeInferenceEngine", "rollout.adapters=false")
    assert (
        "is set to train an adapter, and inference engine 'headrace.testing:FakeInferenceEngine' serves none" in error
    )
    assert "fix:  choose an inference engine with adapters, or have the trainer train all weights" in error
    assert "job.toml" in error


def test_what_an_adapter_cannot_be_is_refused_with_what_it_can() -> None:
    (error,) = errors('phase.reinforce.trainer.lora={targets=["q_prog"]}')
    assert "did you mean 'q_proj'?" in error
    (error,) = errors("trainer.lora.rank=8")
    assert 'optimizer must be "adamw" with lora' in error
    (error,) = errors(LORA, "trainer.use=fsdp")
    assert "lora is no setting of fsdp; those have it: torch" in error
