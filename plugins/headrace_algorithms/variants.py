"""``grpo`` under the names of the papers whose choices it is then told: each is its settings, and nothing else.

| name                    | advantage unit | ratio    | bound              | weight          | mean over      |
|-------------------------|----------------|----------|--------------------|-----------------|----------------|
| `dr_grpo`               | none           | token    | clip               | token, cap      | a fixed length |
| `dapo`                  | group std      | token    | clip, higher above | token, cap      | tokens         |
| `rloo`                  | leave one out  | token    | clip               | token, cap      | sequence sums  |
| `remax`                 | none           | token    | clip               | token, cap      | sequence sums  |
| `reinforce_pp`          | batch std      | token    | clip               | token, cap      | tokens         |
| `reinforce_pp_baseline` | batch std      | token    | clip               | token, cap      | tokens         |
| `maxrl`                 | group mean     | token    | clip               | token, cap      | tokens         |
| `cispo`                 | group std      | none     | none               | token, cap 5    | tokens         |
| `sapo`                  | group std      | token    | soft               | token, cap      | token means    |
| `gspo`                  | group std      | sequence | clip               | none            | token means    |
| `longcat`               | none           | token    | clip and dual clip | token, cap      | a fixed length |
| `tbpo`                  | group std      | sequence | clip and dual clip | sequence, cap 2 | token means    |

Every one can be told any setting of ``grpo``; the table is where each starts. Rows may be stale, and a clip around the
behaviour policy would bound the update and the staleness at once: those with a weight use the decoupled loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_algorithms.advantages import Baseline, Scaling
from headrace_algorithms.aggregation import Aggregation
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.loss_settings import Level, Loss, RatioLevel, Surrogate
from headrace_algorithms.settings import GrpoSettings
from headrace_algorithms.whitening import Whitening


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGrpoSettings(GrpoSettings):
    """Settings of ``dr_grpo``; ``constant_length`` must be given."""

    advantage_scaling: Scaling = "none"
    aggregation: Aggregation = "constant"


class DrGrpo(Grpo):
    """GRPO without the two divisions that favour long wrong answers and easy or hard prompts (arXiv:2503.20783)."""

    Settings = DrGrpoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoSettings(GrpoSettings):
    """Settings of ``dapo``; over-long shaping acts where ``overlong_length`` is given."""

    mask_truncated: bool = True


class Dapo(Grpo):
    """Clip higher above, mean over tokens, truncated answers left out (arXiv:2503.14476, sections 3.1 to 3.4)."""

    Settings = DapoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RlooSettings(GrpoSettings):
    """Settings of ``rloo``."""

    advantage_scaling: Scaling = "leave_one_out"
    aggregation: Aggregation = "sequence_mean_token_sum"


class Rloo(Grpo):
    """Each reward against the mean of the others in its group (arXiv:2402.14740)."""

    Settings = RlooSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RemaxSettings(GrpoSettings):
    """Settings of ``remax``."""

    baseline: Baseline = "greedy"
    advantage_scaling: Scaling = "none"
    aggregation: Aggregation = "sequence_mean_token_sum"


class Remax(Grpo):
    """Each reward against that of the greedy answer to the same prompt; groups may be of one trajectory, and each has
    the greedy one beside (ReMax, arXiv:2310.10505). A KL to the reference is a term of the loss here, never of the
    reward."""

    Settings = RemaxSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlusSettings(GrpoSettings):
    """Settings of ``reinforce_pp``."""

    baseline: Baseline = "none"
    advantage_scaling: Scaling = "none"
    whitening: Whitening = "shift_and_scale"


class ReinforcePlusPlus(Grpo):
    """Rewards against the mean of the whole batch, in units of its deviation; groups may be of one trajectory
    (REINFORCE++, arXiv:2501.03262). A KL to the reference is a term of the loss here, never of the reward."""

    Settings = ReinforcePlusPlusSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlusBaselineSettings(ReinforcePlusPlusSettings):
    """Settings of ``reinforce_pp_baseline``."""

    baseline: Baseline = "group_mean"


class ReinforcePlusPlusBaseline(Grpo):
    """Rewards against the mean of their group first, then as ``reinforce_pp`` (arXiv:2501.03262, the variant with a
    baseline)."""

    Settings = ReinforcePlusPlusBaselineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRlSettings(GrpoSettings):
    """Settings of ``maxrl``."""

    advantage_scaling: Scaling = "group_mean"


class MaxRl(Grpo):
    """Rewards relative to the group's success rate, which makes rare successes count more (arXiv:2602.02710)."""

    Settings = MaxRlSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoSettings(GrpoSettings):
    """Settings of ``cispo``."""

    loss: Loss = "importance"
    importance_cap: float = 5.0


class Cispo(Grpo):
    """The importance weight is capped, and every token keeps its gradient (MiniMax-M1, arXiv:2506.13585, section 3.1).
    The value of the loss is another one than the paper's, which has log-probs in it; its gradient is the same."""

    Settings = CispoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoSettings(GrpoSettings):
    """Settings of ``sapo``."""

    surrogate: Surrogate = "soft"
    aggregation: Aggregation = "sequence_mean_token_mean"


class Sapo(Grpo):
    """A soft gate around a ratio of 1 where others cut (arXiv:2511.20347)."""

    Settings = SapoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoSettings(GrpoSettings):
    """Settings of ``gspo``; bounds as in its paper, section 5.1: ratios are length-normalised, so they are narrow."""

    loss: Loss = "clipped"
    ratio_level: RatioLevel = "sequence"
    aggregation: Aggregation = "sequence_mean_token_mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4


class Gspo(Grpo):
    """One ratio per sequence, clipped as one (arXiv:2507.18071)."""

    Settings = GspoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LongcatSettings(GrpoSettings):
    """Settings of ``longcat``; ``constant_length`` must be given: the longest response there can be."""

    advantage_scaling: Scaling = "none"
    aggregation: Aggregation = "constant"
    dual_clip: float = 5.0


class Longcat(Grpo):
    """Triplet clip, truncated importance sampling, a fixed length (LongCat-Flash-Thinking, arXiv:2509.18883)."""

    Settings = LongcatSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TbpoSettings(GrpoSettings):
    """Settings of ``tbpo``; the bands of the paper. An ``importance_floor`` of 0.5 bounds the weight on both sides."""

    ratio_level: RatioLevel = "sequence"
    aggregation: Aggregation = "sequence_mean_token_mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float = 1 + 7e-4
    importance_level: Level = "sequence_geometric"


class Tbpo(Grpo):
    """Whole sequences leave the update when their ratio leaves a band on either side; what the rollout's numerics
    changed is a capped weight of the sequence (QaRL, arXiv:2604.07853)."""

    Settings = TbpoSettings
