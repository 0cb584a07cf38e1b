"""What the suites of inference engines share: the fixtures that an author writes, and a started engine."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import pytest

from headrace.contract import Array, InferenceEngine
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import override
from headrace.testing.suites.serving import Served, other_policy, serving


class EngineRules(PluginContract):
    """See :class:`~.inference.InferenceEngineContract`."""

    deadline: ClassVar[float] = 60.0
    atol: ClassVar[float] = 1e-4

    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        """A constructed engine; the suite starts and closes it. Few slots make the rules about queues quick."""
        override("plugin", "an engine, constructed and not started")

    @pytest.fixture
    def model_path(self) -> str:
        """A Hugging Face-format folder with ``config.json`` and ``*.safetensors``; a context of 64 tokens or more."""
        override("model_path", "the folder of a small model")

    def serving(self, plugin: InferenceEngine, model_path: str) -> AbstractAsyncContextManager[Served]:
        """The engine, started with the model as version 0."""
        return serving(plugin, model_path, deadline=self.deadline)

    def other(self, model_path: str) -> dict[str, Array]:
        """Weights of another policy, by Hugging Face name."""
        return other_policy(model_path)
