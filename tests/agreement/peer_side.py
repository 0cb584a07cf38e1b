"""The losses and advantages of verl and AReaL on given inputs; started by ``peers.py`` in an interpreter that has them.

    python tests/agreement/peer_side.py INPUTS.npz RESULT.npz

Inputs are padded [rows, tokens], as these libraries take them. It imports nothing of headrace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.utils.functional import functional as areal
from verl.trainer.ppo import core_algos as verl
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


def advantages_of_verl(given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Per row."""
    mask = given["mask"].float()
    index = given["group"].numpy()

    def found(function: Any, **settings: Any) -> np.ndarray:
        rewards = torch.zeros_like(mask)
        rewards[:, 0] = given["reward"]
        return function(rewards, torch.ones_like(mask), index, **settings)[0][:, 0].numpy()

    return {
        "group std": found(verl.compute_grpo_outcome_advantage),
        "none": found(verl.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
        "leave one out": found(verl.compute_rloo_outcome_advantage),
    }


def main() -> None:
    inputs, result = sys.argv[1:]
    given = {name: torch.from_numpy(array) for name, array in np.load(inputs).items()}
    found: dict[str, np.ndarray] = {}
    for peer, losses in (("verl", of_verl(given)), ("areal", of_areal(given))):
        for name, loss in losses.items():
            current = given["current"].clone().requires_grad_()
            value = loss(current)
            value.backward()
            assert current.grad is not None
            found[f"{peer}/{name}/value"] = value.detach().numpy()
            found[f"{peer}/{name}/gradient"] = (current.grad * given["mask"]).numpy()
    for name, advantages in advantages_of_verl(given).items():
        found[f"verl/advantages, {name}/value"] = advantages
    np.savez(result, **found)


if __name__ == "__main__":
    main()
