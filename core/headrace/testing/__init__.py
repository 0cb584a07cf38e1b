"""Fakes of every role, and the conformance suites that every plugin must pass (:mod:`headrace.testing.suites`).

A fake is a plugin like any other: a job file names it ``headrace.testing:FakeStorage``. Fakes are deterministic, as
slow and as faulty as their settings say, and need nothing but numpy. The suites need pytest, so they are a module of
their own. Nothing else imports this room.
"""

from headrace.testing.algorithm import FakeAlgorithm
from headrace.testing.environment import FakeEnvironment
from headrace.testing.inference import FakeInferenceEngine
from headrace.testing.launcher import FakeLauncher
from headrace.testing.observer import FakeObserver
from headrace.testing.pertoken import PerToken
from headrace.testing.quantization import FakeQuantization
from headrace.testing.staleness import FakeStaleness
from headrace.testing.storage import FakeStorage
from headrace.testing.training import FakeTrainingEngine
from headrace.testing.transport import FakeWeightTransport

__all__ = [
    "FakeAlgorithm",
    "FakeEnvironment",
    "FakeInferenceEngine",
    "FakeLauncher",
    "FakeObserver",
    "FakeQuantization",
    "FakeStaleness",
    "FakeStorage",
    "FakeTrainingEngine",
    "FakeWeightTransport",
    "PerToken",
]
