"""The plugin: requests in, tokens with behaviour log-probs out."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.contract.inference import InferenceContext
from headrace.errors import EngineError
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings

DEADLINE = 60.0
ENDLESS = {"max_position_embeddings": 100_000}
FOREVER = {"max_new_tokens": 90_000}


def test_importing_and_constructing_the_engine_leaves_torch_out() -> None:
    code = (
        "import sys, headrace_torch.inference as m; s = m.TorchInferenceSettings(); m.TorchInferenceEngine(s);"
        "m.TorchInferenceEngine.capabilities(s); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_capabilities_follow_the_settings() -> None:
    found = TorchInferenceEngine.capabilities(TorchInferenceSettings(slots=3, live_versions=2, dtype="bfloat16"))
    assert (found.slots, found.live_versions, found.deterministic, found.dtype) == (3, 2, True, "bfloat16")


@pytest.mark.parametrize("settings", [{"slots": 0}, {"live_versions": 0}, {"max_length": 1}])
def test_settings_that_cannot_decode_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        TorchInferenceSettings(**settings)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "model", [{}, {"model_type": "llama", "tie_word_embeddings": True}, {"model_type": "qwen2", "attention_bias": True}]
)
async def test_log_probs_equal_a_plain_full_forward(
    model: dict[str, Any],
    temperature: float,
    make_model: Any,
    serve: Any,
    request_for: Any,
    prompts: Any,
    recompute: Any,
) -> None:
    path, given = make_model(**model), prompts(24)
    async with serve(path, slots=7) as served:
        answers = await served.generate(
            *(request_for(i, p, seed=i, temperature=temperature, max_new_tokens=3 + i) for i, p in enumerate(given))
        )
    for i, prompt in enumerate(given):
        answer = answers[str(i)]
        expected = recompute(path, np.concatenate([prompt, answer.tokens]), temperature=temperature)
        np.testing.assert_allclose(answer.logprobs, expected[len(prompt) - 1 :], atol=1e-5, rtol=0)


async def test_greedy_tokens_equal_transformers(make_model: Any, serve: Any, request_for: Any, prompts: Any) -> None:
    path, given = make_model(), prompts(6)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path)
    async with serve(path, slots=4) as served:
        answers = await served.generate(*(request_for(i, p, greedy=True) for i, p in enumerate(given)))
    for i, prompt in enumerate(given):
        tokens = prompt.tolist()
        with torch.inference_mode():
            for _ in range(8):
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert answers[str(i)].tokens == tokens[len(prompt) :]


async def test_the_same_requests_give_the_same_bits_again(
    make_model: Any, serve: Any, request_for: Any, prompts: Any
) -> None:
    requests = [request_for(i, p, seed=i, max_new_tokens=1 + i % 17) for i, p in enumerate(prompts(40))]
    async with serve(make_model(), slots=8) as served:
        first, second = await served.generate(*requests), await served.generate(*requests)
    async with serve(make_model(), slots=8) as served:
        third = await served.generate(*requests)
    for run in (second, third):
        assert list(run) == list(first)
        assert all(run[i].tokens == first[i].tokens and run[i].logprobs == first[i].logprobs for i in first)


async def test_an_aborted_request_keeps_what_it_has_and_the_others_go_on(
    make_model: Any, serve: Any, request_for: Any, join: Any
) -> None:
    async with serve(make_model(**ENDLESS), slots=2) as served:
        plain = await served.generate(request_for("plain", [1, 2], seed=3, max_new_tokens=60))
        await served.engine.submit([request_for(n, [1, 2], seed=3, **FOREVER, stream=True) for n in "abc"])
        async with asyncio.timeout(DEADLINE):
            answers = join(await anext(served.engine.outputs()))
            await served.engine.abort(["a", "c", "never seen"])
            for name, more in (await served.finish(["a", "c"])).items():
                answers.setdefault(name, type(more)()).extend(more)
            before = len(answers["b"].tokens)
            join(await anext(served.engine.outputs()), answers)
            assert len(answers["b"].tokens) > before
    assert [answers[n].reason for n in "abc"] == ["aborted", "", "aborted"]
    assert answers["c"].tokens == []
    shared = min(60, len(answers["a"].tokens))
    assert shared > 0
    assert answers["a"].tokens[:shared] == answers["b"].tokens[:shared] == plain["plain"].tokens[:shared]


async def test_the_end_of_the_context_ends_a_response(make_model: Any, serve: Any, request_for: Any) -> None:
    async with serve(make_model(), max_length=16) as served:
        answers = await served.generate(request_for("a", [1] * 10, max_new_tokens=100), request_for("b", [1] * 15))
    assert [(len(answers[n].tokens), answers[n].reason) for n in "ab"] == [(6, "length"), (1, "length")]


@pytest.mark.parametrize(
    ("prompt", "sampling", "kind", "told"),
    [
        ([1], {"version": 3}, EngineError, r"version 3; live are \[0\]"),
        ([1, 50], {}, EngineError, "0 to 49"),
        ([-1], {}, EngineError, "0 to 49"),
        ([], {}, ValueError, "empty"),
        ([1], {"temperature": 0.0}, ValueError, "temperature"),
        ([1], {"temperature": float("nan")}, ValueError, "temperature"),
        ([1], {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ([1], {"seed": -1}, ValueError, "seed"),
    ],
)
async def test_an_impossible_request_is_refused_with_all_that_came_with_it(
    prompt: list[int], sampling: dict[str, Any], kind: type[Exception], told: str,
    make_model: Any, serve: Any, request_for: Any,
) -> None:  # fmt: skip
    async with serve(make_model()) as served:
        with pytest.raises(kind, match=told) as caught:
            await served.engine.submit([request_for("good", [1]), request_for("bad", prompt, **sampling)])
        if isinstance(caught.value, EngineError):
            assert "rollout-0" in caught.value.message
            assert caught.value.fix
        health = await served.engine.health()
        assert (health.running, health.waiting) == (0, 0)
        assert len((await served.generate(request_for("good", [1])))["good"].tokens) == 8


async def test_an_open_request_id_cannot_be_used_again(make_model: Any, serve: Any, request_for: Any) -> None:
    async with serve(make_model()) as served:
        with pytest.raises(ValueError, match="'a' is open"):
            await served.engine.submit([request_for("a", [1]), request_for("a", [1])])
        await served.generate(request_for("a", [1]))
        await served.generate(request_for("a", [1]))


async def test_close_ends_the_outputs_and_may_come_at_any_time_and_twice(
    make_model: Any, serve: Any, request_for: Any
) -> None:
    await TorchInferenceEngine(TorchInferenceSettings()).close()
    async with serve(make_model()) as served:
        await served.engine.submit([request_for(i, [1], max_new_tokens=60) for i in range(200)])
        await served.engine.close()
        await served.engine.close()
        async with asyncio.timeout(DEADLINE):
            async for outputs in served.engine.outputs():
                assert outputs
            assert [o async for o in served.engine.outputs()] == []
        await served.engine.abort(["1"])
        with pytest.raises(EngineError, match="not serving"):
            await served.engine.submit([request_for("late", [1])])


async def test_an_engine_that_breaks_says_so_to_everybody_who_asks(
    make_model: Any, serve: Any, request_for: Any
) -> None:
    async with serve(make_model(**ENDLESS)) as served:
        await served.engine.submit([request_for("a", [1], **FOREVER)])
        served.engine._session.worker.post(lambda scheduler: scheduler.retire(99))
        with pytest.raises(EngineError, match=r"rollout-0.*KeyError.*versions \[0\]") as caught:
            await served.finish(["a"])
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(EngineError, match="KeyError"):
            await served.engine.submit([request_for("b", [1])])
        with pytest.raises(EngineError, match="KeyError"):
            await served.engine.health()


async def test_a_model_or_length_that_cannot_be_served_is_told_at_start(make_model: Any, tmp_path: Any) -> None:
    context = {"name": "rollout-0", "version": 0, "threads": 1}
    with pytest.raises(EngineError, match="max_length 65"):
        await TorchInferenceEngine(TorchInferenceSettings(max_length=65)).start(
            InferenceContext(model_path=make_model(), **context)
        )
    with pytest.raises(EngineError, match=r"config\.json"):
        await TorchInferenceEngine(TorchInferenceSettings()).start(
            InferenceContext(model_path=str(tmp_path), **context)
        )


async def test_bfloat16_log_probs_stay_near_float32(
    make_model: Any, serve: Any, request_for: Any, prompts: Any, recompute: Any
) -> None:
    path, given = make_model(model_type="llama"), prompts(12)
    async with serve(path, dtype="bfloat16", slots=5) as served:
        answers = await served.generate(*(request_for(i, p, seed=i) for i, p in enumerate(given)))
    gaps = []
    for i, prompt in enumerate(given):
        tokens = np.concatenate([prompt, answers[str(i)].tokens])
        gaps += list(np.abs(recompute(path, tokens)[len(prompt) - 1 :] - answers[str(i)].logprobs))
    assert 1e-6 < np.mean(gaps) < 0.1
