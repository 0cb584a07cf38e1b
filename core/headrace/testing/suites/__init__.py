"""One conformance suite per role: subclass it in a test file, override its fixtures, and every rule is a test.

    from headrace.testing.suites import StorageContract

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def plugin(self) -> Storage:
            return MyStorage(MyStorage.Settings())

A rule about a capability that the plugin does not have is skipped, with the reason. A rule that fails says which one
it is, and what was seen. Invariant: a suite knows nothing of a plugin but its contract.
"""

from headrace.testing.suites.adapters import AdapterContract
from headrace.testing.suites.algorithm import AlgorithmContract
from headrace.testing.suites.environment import EnvironmentContract
from headrace.testing.suites.inference import InferenceEngineContract
from headrace.testing.suites.kv_migration import KVMigrationContract
from headrace.testing.suites.launcher import LauncherContract
from headrace.testing.suites.observer import ObserverContract
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.quantization import QuantizationContract
from headrace.testing.suites.rules import RuleBrokenError
from headrace.testing.suites.staleness import StalenessContract
from headrace.testing.suites.storage import StorageContract
from headrace.testing.suites.training import TrainingEngineContract
from headrace.testing.suites.transport import WeightTransportContract

__all__ = [
    "AdapterContract",
    "AlgorithmContract",
    "EnvironmentContract",
    "InferenceEngineContract",
    "KVMigrationContract",
    "LauncherContract",
    "ObserverContract",
    "PluginContract",
    "QuantizationContract",
    "RuleBrokenError",
    "StalenessContract",
    "StorageContract",
    "TrainingEngineContract",
    "WeightTransportContract",
]
