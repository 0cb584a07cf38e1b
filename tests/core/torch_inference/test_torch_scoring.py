"""Log-probs of given tokens, while other requests are decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import EngineError


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("model", [{}, {"model_type": "llama", "tie_word_embeddings": True}])
async def test_scores_equal_a_plain_full_forward(
    model: dict[str, Any], temperature: float, make_model: Any, serve: Any, prompts: Any, recompute: Any
) -> None:
    path = make_model(**model)
    async with serve(path) as served:
        for tokens in prompts(4):
            scored = await served.engine.score(tokens, version=0, temperature=temperature)
            expected = recompute(path, tokens, temperature=temperature)
            assert scored[0] == 0
            np.testing.assert_allclose(scored[1:], expected, atol=1e-5, rtol=0)


async def test_a_version_that_is_not_live_scores_nothing(make_model: Any, serve: Any) -> None:
    async with serve(make_model()) as served:
        with pytest.raises(EngineError, match="score under version 7"):
            await served.engine.score(np.array([3, 4], dtype=np.int32), version=7, temperature=1.0)
