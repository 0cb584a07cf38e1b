"""What a plugin sees of Headrace: one small file per role, numpy and the standard library only."""

from headrace.contract.algorithm import Algorithm, AlgorithmNeeds, Prepared
from headrace.contract.columns import Array, Batch, Column, Ragged
from headrace.contract.environment import (
    Demonstrations,
    Environment,
    EnvironmentContext,
    Episode,
    GenerationSession,
    Score,
    Split,
    Task,
)
from headrace.contract.generation import (
    Completion,
    EngineHealth,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Sampling,
    VersionSpan,
)
from headrace.contract.inference import (
    InferenceCapabilities,
    InferenceContext,
    InferenceEngine,
    MultiVersion,
    Scoring,
    WeightUpdate,
)
from headrace.contract.launcher import Launcher, NodeLaunch, NodeProcess
from headrace.contract.loss import LossInputs, LossOutput, LossSpec
from headrace.contract.metrics import Metric, Reduction, merge_metrics
from headrace.contract.model import ModelFacts
from headrace.contract.plugin import CONTRACT_VERSION, NoSettings, Plugin
from headrace.contract.staleness import FlowView, StalenessPolicy
from headrace.contract.storage import Storage, StorageStats
from headrace.contract.training import (
    CURRENT,
    ForwardOutput,
    SaveKind,
    ScratchModels,
    Snapshots,
    StepResult,
    TrainingCapabilities,
    TrainingContext,
    TrainingEngine,
    TrainingStep,
)
from headrace.contract.weights import (
    TensorInfo,
    TransportContext,
    WeightManifest,
    WeightPublisher,
    WeightReceiver,
    WeightSource,
    WeightTransport,
)

__all__ = [
    "CONTRACT_VERSION",
    "CURRENT",
    "Algorithm",
    "AlgorithmNeeds",
    "Array",
    "Batch",
    "Column",
    "Completion",
    "Demonstrations",
    "EngineHealth",
    "Environment",
    "EnvironmentContext",
    "Episode",
    "FinishReason",
    "FlowView",
    "ForwardOutput",
    "GenerationOutput",
    "GenerationRequest",
    "GenerationSession",
    "InferenceCapabilities",
    "InferenceContext",
    "InferenceEngine",
    "Launcher",
    "LossInputs",
    "LossOutput",
    "LossSpec",
    "Metric",
    "ModelFacts",
    "MultiVersion",
    "NoSettings",
    "NodeLaunch",
    "NodeProcess",
    "Plugin",
    "Prepared",
    "Ragged",
    "Reduction",
    "Sampling",
    "SaveKind",
    "Score",
    "Scoring",
    "ScratchModels",
    "Snapshots",
    "Split",
    "StalenessPolicy",
    "StepResult",
    "Storage",
    "StorageStats",
    "Task",
    "TensorInfo",
    "TrainingCapabilities",
    "TrainingContext",
    "TrainingEngine",
    "TrainingStep",
    "TransportContext",
    "VersionSpan",
    "WeightManifest",
    "WeightPublisher",
    "WeightReceiver",
    "WeightSource",
    "WeightTransport",
    "WeightUpdate",
    "merge_metrics",
]
