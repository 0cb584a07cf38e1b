"""Our losses and advantages next to those of verl, AReaL and TRL, on the same random inputs.

    python tests/agreement/peers.py --python VENV/bin/python [--json] [--seeds 3]

``make peers`` sets such an environment up. A line is the largest absolute difference of the loss's value, and of its
gradient for the current policy's log-probs, over the seeds; inputs are float64, so that what is left is a difference
of formulae. ``docs/algorithms.md`` explains those that are not 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.contract import LossInputs
from headrace.contract.columns import ADVANTAGES, BEHAVIOUR_LOGPROBS, PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS
from headrace_algorithms.advantages import Baseline, Scaling, group_relative
from headrace_algorithms.aggregation import Aggregation, normalisers
from headrace_algorithms.corrections import correct
from headrace_algorithms.critic import value_error
from headrace_algorithms.gae import generalised_advantages
from headrace_algorithms.kl import importance_weighted, kl_estimate
from headrace_algorithms.loss_settings import Level, LossSettings
from headrace_algorithms.losses import policy_loss
from headrace_algorithms.rows import Groups
from headrace_algorithms.whitening import whitened

GROUPS, GROUP_SIZE, LONGEST = 4, 6, 40
PEERS = ("verl", "areal", "trl")
Inputs = Mapping[str, np.ndarray]
Found = dict[str, np.ndarray]

CLIP: dict[str, Any] = {"loss": "clipped", "clip_low": 0.2, "clip_high": 0.28}
WEIGHTED: dict[str, Any] = {**CLIP, "loss": "decoupled", "importance_cap": 2.0}
SOFT: dict[str, Any] = {"loss": "clipped", "surrogate": "soft", "soft_positive": 1.0, "soft_negative": 1.05}
GSPO: dict[str, Any] = {"loss": "clipped", "ratio_level": "sequence", "clip_low": 0.03, "clip_high": 0.04}
LOSSES: dict[str, tuple[dict[str, Any], Aggregation]] = {
    "clip, token mean": (CLIP, "token_mean"),
    "clip and dual clip": ({**CLIP, "dual_clip": 3.0}, "token_mean"),
    "clip, sequence mean of token means": (CLIP, "sequence_mean_token_mean"),
    "clip, sequence mean of token sums": (CLIP, "sequence_mean_token_sum"),
    "clip, fixed length": (CLIP, "constant"),
    "decoupled, weights capped at 2": (WEIGHTED, "token_mean"),
    "decoupled, tokens beyond 2 rejected": ({**WEIGHTED, "keep_cap": 2.0}, "token_mean"),
    "gspo": (GSPO, "sequence_mean_token_mean"),
    "sapo": (SOFT, "sequence_mean_token_mean"),
    "sapo, token mean": (SOFT, "token_mean"),
    "cispo": ({"loss": "importance", "importance_cap": 5.0}, "token_mean"),
}
SCALINGS: dict[str, Scaling] = {"group std": "group_std", "none": "none", "leave one out": "leave_one_out"}
LEVELS: tuple[Level, ...] = ("token", "sequence_product", "sequence_geometric")
WHITENED: dict[str, Baseline] = {"whitened": "none", "none, whitened": "group_mean"}


def inputs_of(seed: int) -> Inputs:
    """Padded [rows, tokens] float64: policies that differ enough for every bound to act, one row without any token."""
    chance = np.random.default_rng(seed)
    rows = GROUPS * GROUP_SIZE
    lengths = chance.integers(1, LONGEST + 1, rows)
    lengths[0] = 0
    shape = (rows, LONGEST)
    behaviour = -chance.exponential(1.0, shape)
    return {
        "mask": np.arange(LONGEST) < lengths[:, None],
        "group": np.repeat(np.arange(GROUPS), GROUP_SIZE),
        "reward": np.round(chance.uniform(0, 1, rows), 3),
        "greedy": np.repeat(np.round(chance.uniform(0, 1, GROUPS), 3), GROUP_SIZE),
        "advantages": np.repeat(chance.normal(0, 1, rows)[:, None], LONGEST, axis=1),
        "behaviour": behaviour,
        "values": chance.normal(0, 0.5, shape),
        "returns": chance.normal(0, 1, shape),
        "proximal": behaviour + chance.normal(0, 0.5, shape),
        "current": behaviour + chance.normal(0, 0.6, shape),
        "reference": behaviour + chance.normal(0, 0.7, shape),
    }


def our_loss(given: Inputs, settings: Mapping[str, Any], aggregation: Aggregation) -> tuple[float, np.ndarray]:
    mask = given["mask"]
    lengths = mask.sum(axis=1)
    groups = Groups(index=given["group"], count=GROUPS, order=np.arange(len(mask)))
    found = normalisers(lengths, groups, aggregation=aggregation, constant_length=LONGEST)
    current = torch.from_numpy(given["current"][mask]).requires_grad_()
    columns = {
        ADVANTAGES: "advantages",
        BEHAVIOUR_LOGPROBS: "behaviour",
        PROXIMAL_LOGPROBS: "proximal",
        REFERENCE_LOGPROBS: "reference",
    }
    inputs = LossInputs(
        logprobs=current,
        weights=torch.from_numpy(np.repeat(found.weights, lengths)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(mask)), lengths)),
        sequences=len(mask),
        columns={column: torch.from_numpy(given[name][mask]) for column, name in columns.items()},
    )
    return gradient_of(policy_loss(inputs, **settings).numerator / found.denominators.sum(), current, mask)


def our_kl(given: Inputs, estimator: Any, *, weighted: bool = False) -> tuple[float, np.ndarray]:
    mask = given["mask"]
    current = torch.from_numpy(given["current"][mask]).requires_grad_()
    kl = kl_estimate(current, torch.from_numpy(given["reference"][mask]), estimator=estimator)
    if weighted:
        kl = importance_weighted(kl, current, torch.from_numpy(given["behaviour"][mask]), estimator=estimator)
    return gradient_of(kl.mean(), current, mask)


def our_critic(given: Inputs) -> tuple[float, np.ndarray]:
    """Its error by the values, for which any numbers will do."""
    mask = given["mask"]
    current, old, returns = (torch.from_numpy(given[name][mask]) for name in ("current", "values", "returns"))
    current.requires_grad_()
    return gradient_of(value_error(current, old, returns, clip=0.5).mean(), current, mask)


def our_corrections(given: Inputs) -> Found:
    """Per token: weights up to 2, and which tokens a band from 0.8 to 1.25 keeps."""
    mask = given["mask"]
    moved = torch.from_numpy((given["proximal"] - given["behaviour"])[mask])
    sequence = torch.from_numpy(np.repeat(np.arange(len(mask)), mask.sum(axis=1)))
    found: Found = {}
    for level in LEVELS:
        band: dict[str, Any] = {"keep_level": level, "keep_floor": 0.8, "keep_cap": 1.25}
        how = LossSettings(importance_level=level, importance_cap=2.0, **band)
        correction = correct(moved, sequence, len(mask), how)
        for name, tokens in (("weight", correction.weight), ("kept", correction.keep)):
            padded = found[f"{name}, {level.replace('_', ' ')}/value"] = np.zeros(mask.shape)
            padded[mask] = tokens.numpy()
    return found


def gradient_of(value: torch.Tensor, current: torch.Tensor, mask: np.ndarray) -> tuple[float, np.ndarray]:
    """Also, padded."""
    value.backward()
    assert current.grad is not None
    padded = np.zeros(mask.shape)
    padded[mask] = current.grad.numpy()
    return value.item(), padded


def ours(given: Inputs) -> Found:
    found: Found = our_corrections(given)
    losses = {name: our_loss(given, *how) for name, how in LOSSES.items()}
    losses |= {f"kl {estimator}": our_kl(given, estimator) for estimator in ("k1", "k2", "k3")}
    losses["critic"] = our_critic(given)
    losses["kl k3, weighted"] = our_kl(given, "k3", weighted=True)
    for name, (value, gradient) in losses.items():
        found[f"{name}/value"], found[f"{name}/gradient"] = np.asarray(value), gradient
    groups = Groups(index=given["group"], count=GROUPS, order=np.arange(len(given["group"])))
    first = np.ones(len(given["group"]), dtype=np.bool_)
    for name, scaling in SCALINGS.items():
        statistics = group_relative(given["reward"], groups, first=first, scaling=scaling)
        found[f"advantages, {name}/value"] = statistics.advantages
    greedy = group_relative(
        given["reward"], groups, first=first, scaling="none", baseline="greedy", greedy=given["greedy"]
    )
    found["advantages, greedy/value"] = greedy.advantages
    lengths = given["mask"].sum(axis=1)
    for name, baseline in WHITENED.items():
        statistics = group_relative(given["reward"], groups, first=first, scaling="none", baseline=baseline)
        found[f"advantages, {name}/value"] = whitened(statistics.advantages, lengths, whitening="shift_and_scale")
    mask = given["mask"]
    came = np.zeros(mask.shape)
    came[lengths > 0, lengths[lengths > 0] - 1] = given["reward"][lengths > 0]
    values = given["values"][mask]
    advantages = generalised_advantages(came[mask], values, lengths, discount=0.99, trace_decay=0.95)
    once = np.ones(len(values), dtype=np.int64)
    white = whitened(advantages, once, whitening="shift_and_scale")
    for name, per_token in (("generalised", white), ("returns", advantages + values)):
        found[f"advantages, {name}/value"] = np.zeros(mask.shape)
        found[f"advantages, {name}/value"][mask] = per_token
    return found


def theirs(python: str, given: Inputs, work: Path) -> Found:
    np.savez(work / "inputs.npz", **given)
    script = Path(__file__).with_name("peer_side.py")
    subprocess.run([python, str(script), str(work / "inputs.npz"), str(work / "result.npz")], check=True)
    return dict(np.load(work / "result.npz"))


def versions(python: str) -> dict[str, str]:
    """Of the peers."""
    code = f"from importlib.metadata import version; print(*map(version, {PEERS}))"
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(PEERS, said, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help=f"interpreter that has {', '.join(PEERS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    largest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as work:
        for seed in range(options.seeds):
            given = inputs_of(seed)
            mine = ours(given)
            for name, value in theirs(options.python, given, Path(work)).items():
                difference = float(np.abs(value - mine[name.partition("/")[2]]).max())
                largest[name] = max(largest.get(name, 0.0), difference)
    known = versions(options.python)
    if options.json:
        print(json.dumps({"versions": known, "differences": largest}))
        return
    for name, difference in largest.items():
        peer, what, of = name.split("/")
        print(f"{peer} {known[peer]:8} {what:38} {of:9} {difference:.1e}")


if __name__ == "__main__":
    main()
