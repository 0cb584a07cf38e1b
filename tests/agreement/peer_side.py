"""The losses and advantages of verl, AReaL and TRL on given inputs; ``peers.py`` starts it in an interpreter with them.

    python tests/agreement/peer_side.py INPUTS.npz RESULT.npz

Inputs are padded [rows, tokens], as these libraries take them. It imports nothing of headrace.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.utils.functional import functional as areal
from trl import GRPOTrainer
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo import rollout_corr_helper as corrections
from verl.workers.config.actor import ActorConfig

Loss = Callable[[torch.Tensor], torch.Tensor]


def of_verl(given: dict[str, torch.Tensor]) -> dict[str, Loss]:
    """verl names the anchor of the ratio ``old``, and is given importance weights ready made."""
    mask, advantages = given["mask"].float(), given["advantages"]

    def actor(**settings: Any) -> ActorConfig:
        return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)

    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    weights = (given["proximal"] - given["behaviour"]).exp().clamp(max=2.0)

    def policy(function: Any, mode: str, anchor: str, **settings: Any) -> Loss:
        def loss(current: torch.Tensor) -> torch.Tensor:
            weighted = {"rollout_is_weights": weights} if anchor == "proximal" else {}
            return function(given[anchor], current, advantages, mask, mode, actor(**settings), **weighted)[0]

        return loss

    def kl(name: str) -> Loss:
        return lambda current: verl.agg_loss(
            verl.kl_penalty_forward(current, given["reference"], name), mask, "token-mean"
        )

    def critic(values: torch.Tensor) -> torch.Tensor:
        return verl.compute_value_loss(values, given["returns"], given["values"], mask, 0.5)[0]

    vanilla = verl.compute_policy_loss_vanilla
    return {
        "clip, token mean": policy(vanilla, "token-mean", "behaviour", clip_ratio_c=1e6, **clip),
        "clip and dual clip": policy(vanilla, "token-mean", "behaviour", clip_ratio_c=3.0, **clip),
        "clip, sequence mean of token means": policy(
            vanilla, "seq-mean-token-mean", "behaviour", clip_ratio_c=1e6, **clip
        ),
        "clip, sequence mean of token sums": policy(
            vanilla, "seq-mean-token-sum", "behaviour", clip_ratio_c=1e6, **clip
        ),
        "decoupled, weights capped at 2": policy(vanilla, "token-mean", "proximal", clip_ratio_c=1e6, **clip),
        "gspo": policy(
            verl.compute_policy_loss_gspo, "seq-mean-token-mean", "behaviour", clip_ratio_low=0.03, clip_ratio_high=0.04
        ),
        "sapo": policy(verl.compute_policy_loss_sapo, "seq-mean-token-mean", "behaviour", tau_pos=1.0, tau_neg=1.05),
        "cispo": policy(
            verl.compute_policy_loss_cispo, "token-mean", "behaviour", clip_ratio_low=1.0, clip_ratio_high=4.0
        ),
        "kl k1": kl("k1"),
        "kl k2": kl("k2"),
        "kl k3": kl("k3"),
        "critic": critic,
    }


def of_areal(given: dict[str, torch.Tensor]) -> dict[str, Loss]:
    """AReaL takes the proximal and the behaviour policy apart."""
    mask, advantages = given["mask"], given["advantages"]

    def actor(anchor: str, **settings: Any) -> Loss:
        settings = {"eps_clip": 0.2, "eps_clip_higher": 0.28, **settings}
        return lambda current: areal.ppo_actor_loss_fn(
            current, given[anchor], given["behaviour"], advantages, loss_mask=mask, **settings
        )[0]

    cap = RejectionSamplingConfig(level="token", action="clamp", metric="ratio", upper=2.0)
    reject = RejectionSamplingConfig(level="token", action="mask", metric="ratio", upper=2.0)
    return {
        "clip, token mean": actor("behaviour"),
        "clip and dual clip": actor("behaviour", c_clip=3.0),
        "decoupled, weights capped at 2": actor("proximal", rejection_sampling=cap),
        "decoupled, tokens beyond 2 rejected": actor("proximal", rejection_sampling=reject),
        "sapo, token mean": lambda current: areal.sapo_loss_fn(
            current, given["behaviour"], advantages, 1.0, 1.05, mask
        )[0],
    }


def of_trl(given: dict[str, torch.Tensor]) -> dict[str, Loss]:
    """TRL's loss is a method of its trainer: here of one that has what the method reads, and log-probs for a model."""
    mask, rows = given["mask"].double(), len(given["mask"])
    prompt = torch.zeros((rows, 1), dtype=torch.int64)
    alone = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)

    def policy(kind: str, anchor: str = "behaviour", **settings: Any) -> Loss:
        trainer = SimpleNamespace(
            loss_type=kind,
            importance_sampling_level="token",
            epsilon_low=0.2,
            epsilon_high=0.28,
            beta=0.0,
            max_completion_length=mask.shape[1],
            use_vllm=anchor == "proximal",
            vllm_importance_sampling_correction=True,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            accelerator=alone,
            model=SimpleNamespace(training=True),
            _metrics=defaultdict(lambda: defaultdict(list)),
            args=SimpleNamespace(
                delta=None,
                use_bias_correction_kl=False,
                sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05,
                steps_per_generation=1,
            ),
        )
        for name, value in settings.items():
            setattr(trainer.args if hasattr(trainer.args, name) else trainer, name, value)
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
            "completion_mask": mask,
            "advantages": given["advantages"] * (trainer.beta == 0.0),
            "old_per_token_logps": given[anchor],
            "ref_per_token_logps": given["reference"],
            "importance_sampling_ratio": (given["proximal"] - given["behaviour"]).exp().clamp(max=2.0),
            "num_items_in_batch": mask.sum(),
        }

        def loss(current: torch.Tensor) -> torch.Tensor:
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (current, torch.zeros_like(current), None)
            return GRPOTrainer._compute_loss(trainer, None, inputs)

        return loss

    return {
        "clip, token mean": policy("dapo"),
        "clip and dual clip": policy("dapo", delta=3.0),
        "clip, sequence mean of token means": policy("grpo"),
        "clip, fixed length": policy("dr_grpo"),
        "decoupled, weights capped at 2": policy("dapo", "proximal"),
        "gspo": policy("grpo", importance_sampling_level="sequence", epsilon_low=0.03, epsilon_high=0.04),
        "sapo": policy("sapo"),
        "cispo": policy("cispo", epsilon_high=5.0),
        "kl k3": policy("dapo", beta=1.0),
        "kl k3, weighted": policy("dapo", beta=1.0, use_bias_correction_kl=True),
    }


def advantages_of_verl(given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Per row."""
    mask = given["mask"].double()
    every = torch.ones_like(mask)
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = given["reward"]
    index = given["group"].numpy()

    def found(function: Any, **settings: Any) -> np.ndarray:
        return function(rewards, every, index, **settings)[0][:, 0].numpy()

    at_end = torch.zeros_like(mask)
    some = given["mask"].any(dim=1)
    at_end[some, given["mask"].sum(dim=1)[some] - 1] = given["reward"][some]
    whole = verl.compute_reinforce_plus_plus_outcome_advantage(at_end, mask, config=AlgoConfig(gamma=1.0))
    generalised, returns = verl.compute_gae_advantage_return(at_end, given["values"], mask, 0.99, 0.95)
    based = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)
    greedy = verl.compute_remax_outcome_advantage(rewards, given["greedy"], every)

    return {
        "group std": found(verl.compute_grpo_outcome_advantage),
        "none": found(verl.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
        "leave one out": found(verl.compute_rloo_outcome_advantage),
        "greedy": greedy[0][:, 0].numpy(),
        "whitened": whole[0][:, 0].numpy(),
        "none, whitened": based[0][:, 0].numpy(),
        "generalised": (generalised * mask).numpy(),
        "returns": (returns * mask).numpy(),
    }


def corrections_of_verl(given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Per token: importance weights up to 2, and which tokens a band from 0.8 to 1.25 keeps."""
    mask, moved = given["mask"].double(), given["proximal"] - given["behaviour"]
    found = {}
    for level, name in (("token", "token"), ("sequence", "sequence product")):
        found[f"weight, {name}"] = corrections.compute_rollout_correction_weights(moved, mask, level, 2.0)[0]
    for divergence, name in (("token", "token"), ("seq_sum", "sequence product"), ("seq_mean", "sequence geometric")):
        found[f"kept, {name}"] = corrections.compute_rollout_rejection_mask(
            moved, mask, f"{divergence}_k1", "0.8_1.25"
        )[0]
    return {name: tokens.numpy() for name, tokens in found.items()}


def main() -> None:
    inputs, result = sys.argv[1:]
    given = {name: torch.from_numpy(array) for name, array in np.load(inputs).items()}
    found: dict[str, np.ndarray] = {}
    for peer, losses in (("verl", of_verl(given)), ("areal", of_areal(given)), ("trl", of_trl(given))):
        for name, loss in losses.items():
            current = given["current"].clone().requires_grad_()
            value = loss(current)
            value.backward()
            assert current.grad is not None
            found[f"{peer}/{name}/value"] = value.detach().numpy()
            found[f"{peer}/{name}/gradient"] = (current.grad * given["mask"]).numpy()
    for name, advantages in advantages_of_verl(given).items():
        found[f"verl/advantages, {name}/value"] = advantages
    for name, tokens in corrections_of_verl(given).items():
        found[f"verl/{name}/value"] = tokens
    np.savez(result, **found)


if __name__ == "__main__":
    main()
