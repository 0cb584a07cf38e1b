"""Low-bit rollout with and without an aligned trainer: what it costs in accuracy, and what bears error tokens.

    python tests/benchmarks/quantized_arms.py --work DIR [--json] [--plot OUT.html] [--arms int8,stress] [--seeds 3]

An arm is a GRPO phase of the demo from one warmed-up checkpoint per seed, under ``synchronous``, so that what differs
between trainer and rollout is the arithmetic alone. *full*: no quantisation. Under each scheme, *unaligned*: the
rollout is low-bit and the trainer is not; *qarl*: both are. *stress*: qarl by int4, with a rollout that garbles one
answer in fifty (``error_tokens.py``). ``gspo`` has one ratio to what was sampled per sequence; ``grpo`` and ``tbpo``
have theirs to the proximal policy, and weigh by what it is to the rollout.

*accuracy*: held-out, sampled, after the last batch; mean and sample standard deviation over seeds. *mismatch*: |Δ
log-prob| per token, mean over batches; under ``gspo`` it also holds how far the policy moved within a batch. *by
length*: |sum of Δ log-prob| of answers, by their least number of tokens. *spike*: the largest gradient norm over the
median one. *dropped*: tokens whose gradient a bound removed. A finished arm is in ``DIR/cells.json`` at once, and
another call goes on from there. Nothing is required of the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo import JobTable, progress, records, reinforce_job, run_job, use_two_cores, warmed_up
from kept import Kept

from headrace.observe.audit import audit_run

SYNCHRONOUS = {"policy": "synchronous"}
GARBLING = f"{Path(__file__).with_name('error_tokens.py')}:ErrorTokens"
SCHEMES = {"int8": "w8a8_int8", "int4": "w4a16_int4"}
BY_LENGTH = "mismatch/sequence_log_ratio_from_"
CLIPPED = ("policy/clip_share_low", "policy/clip_share_high", "policy/clip_share_dual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """``scheme``: of the rollout, "" for none; ``aligned``: whether the trainer has it too."""

    algorithm: str
    scheme: str = ""
    aligned: bool = True
    garbled: bool = False


def every_arm() -> dict[str, Arm]:
    """By name."""
    arms = {"full-grpo": Arm(algorithm="grpo"), "full-tbpo": Arm(algorithm="tbpo")}
    for short, scheme in SCHEMES.items():
        for algorithm in ("grpo", "gspo"):
            arms[f"{short}-unaligned-{algorithm}"] = Arm(algorithm=algorithm, scheme=scheme, aligned=False)
        for algorithm in ("gspo", "tbpo"):
            arms[f"{short}-qarl-{algorithm}"] = Arm(algorithm=algorithm, scheme=scheme)
    for algorithm in ("gspo", "tbpo"):
        arms[f"stress-qarl-{algorithm}"] = Arm(algorithm=algorithm, scheme=SCHEMES["int4"], garbled=True)
    return arms


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    accuracy: float
    accuracy_before: float
    mismatch: float
    by_length: dict[str, float]
    """Least tokens → mean over batches."""
    error_tokens: float
    """Their share."""
    gradient_norm: float
    """Median over batches."""
    spike: float
    dropped: float
    audit: str
    """Verdict: among others, that every instance served the tensors that the trainer published, by their digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The seeds of an arm together: means."""

    arm: str
    seeds: int
    accuracy: float
    spread: float | None
    """Sample standard deviation; None for a single seed."""
    mismatch: float
    by_length: dict[str, float]
    error_tokens: float
    spike: float
    """The largest of the seeds."""
    dropped: float
    audits: int
    """That passed."""


def arm_job(arm: Arm, model: Path, *, seed: int, batches: int, prompts: int) -> JobTable:
    """Evaluated before its first batch and after its last."""
    job = reinforce_job(model, seed=seed, batches=batches, staleness=SYNCHRONOUS)
    job["phase"][0]["algorithm"] = {"use": arm.algorithm}
    job["evaluation"] = {"every": batches, "prompts": prompts, "greedy": False}
    if arm.scheme:
        job["quantization"] = {"scheme": arm.scheme, "align": arm.aligned}
    if arm.garbled:
        job["rollout"]["use"] = GARBLING
    return job


def outcome(run: Path) -> Outcome:
    """From a run's files."""
    batches = records(run / "metrics.jsonl")
    evaluated = [event for event in records(run / "events.jsonl") if event["kind"] == "evaluation_finished"]
    by_version = {event["version"]: event["sampled_accuracy"] for event in evaluated}
    norms = [batch["train/gradient_norm"] for batch in batches]
    lengths = sorted({int(name.removeprefix(BY_LENGTH)) for batch in batches for name in batch if BY_LENGTH in name})
    return Outcome(
        accuracy=by_version[max(by_version)],
        accuracy_before=by_version[min(by_version)],
        mismatch=mean_of(batches, "mismatch/abs_logprob_diff_mean"),
        by_length={str(least): mean_of(batches, f"{BY_LENGTH}{least}") for least in lengths},
        error_tokens=mean_of(batches, "mismatch/error_token_share"),
        gradient_norm=statistics.median(norms),
        spike=max(norms) / statistics.median(norms),
        dropped=sum(mean_of(batches, name) for name in CLIPPED if any(name in batch for batch in batches)),
        audit="PASS" if audit_run(run).ok else "FAIL",
    )


def mean_of(batches: Sequence[Mapping[str, Any]], name: str) -> float:
    """Over the batches that have it."""
    return statistics.mean(float(batch[name]) for batch in batches if name in batch)


def summarise(arm: str, outcomes: Sequence[Outcome]) -> Summary:
    """Of one or more seeds."""
    lengths = set.intersection(*(set(found.by_length) for found in outcomes))
    return Summary(
        arm=arm,
        seeds=len(outcomes),
        accuracy=statistics.mean(found.accuracy for found in outcomes),
        spread=statistics.stdev(found.accuracy for found in outcomes) if len(outcomes) > 1 else None,
        mismatch=statistics.mean(found.mismatch for found in outcomes),
        by_length={n: statistics.mean(f.by_length[n] for f in outcomes) for n in sorted(lengths, key=int)},
        error_tokens=statistics.mean(found.error_tokens for found in outcomes),
        spike=max(found.spike for found in outcomes),
        dropped=statistics.mean(found.dropped for found in outcomes),
        audits=sum(found.audit == "PASS" for found in outcomes),
    )


def measure(arms: Mapping[str, Arm], work: Path, *, seeds: int, batches: int, prompts: int) -> list[Summary]:
    """Runs that are not kept in ``work`` yet, seed after seed, so that an interrupted measurement has whole seeds."""
    work.mkdir(parents=True, exist_ok=True)
    kept = Kept(work / "cells.json", {"batches": batches, "prompts": prompts}, Outcome)
    for seed in range(seeds):
        for name, arm in arms.items():
            cell = f"{name}:{seed}"
            if cell not in kept.outcomes:
                run = work / "runs" / cell.replace(":", "-")
                run_job(arm_job(arm, warmed_up(work, seed), seed=seed, batches=batches, prompts=prompts), run)
                kept.add(cell, outcome(run))
            found = kept.outcomes[cell]
            progress(
                f"{cell}: accuracy {found.accuracy_before:.3f} -> {found.accuracy:.3f}, mismatch {found.mismatch:.2e}, "
                f"spike {found.spike:.1f}"
            )
    return [summarise(name, [kept.outcomes[f"{name}:{seed}"] for seed in range(seeds)]) for name in arms]


def plot(summaries: Sequence[Summary], file: Path) -> None:
    """Accuracy, and mismatch by length, of each arm; one page that needs nothing else."""
    import plotly.graph_objects as go  # type: ignore[import-untyped]
    from plotly.subplots import make_subplots  # type: ignore[import-untyped]

    figure = make_subplots(rows=2, cols=1, subplot_titles=("held-out accuracy", "|sum of Δ log-prob| by tokens"))
    spreads = [found.spread or 0.0 for found in summaries]
    names, accuracies = [found.arm for found in summaries], [found.accuracy for found in summaries]
    figure.add_trace(go.Bar(x=names, y=accuracies, error_y={"array": spreads}, showlegend=False), row=1, col=1)
    for found in summaries:
        x, y = [int(n) for n in found.by_length], list(found.by_length.values())
        figure.add_trace(go.Scatter(name=found.arm, x=x, y=y, mode="lines+markers"), row=2, col=1)
    figure.update_yaxes(type="log", row=2, col=1)
    figure.update_layout(height=1000, template="plotly_white")
    figure.write_html(file, include_plotlyjs=True)


def show(summaries: Sequence[Summary]) -> None:
    """For people."""
    print(f"{'arm':22} accuracy           mismatch  error tokens  spike  dropped  audits  by length")
    for row in summaries:
        spread = "       " if row.spread is None else f"± {row.spread:.3f}"
        lengths = ", ".join(f"{least}: {gap:.1e}" for least, gap in row.by_length.items())
        print(
            f"{row.arm:22} {row.accuracy:.3f} {spread}  {row.mismatch:10.2e}  {row.error_tokens:12.2e}  "
            f"{row.spike:5.1f}  {row.dropped:7.3f}  {row.audits}/{row.seeds}     {lengths}"
        )


def chosen_arms(text: str) -> dict[str, Arm]:
    """Those whose name begins with one of the words. ArgumentTypeError when there is none."""
    words = tuple(text.split(","))
    arms = {name: arm for name, arm in every_arm().items() if name.startswith(words)}
    if not arms:
        raise argparse.ArgumentTypeError(f"no arm begins with {text!r}; arms are {', '.join(every_arm())}")
    return arms


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="OUT.html", help="also draw it; needs plotly")
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints, runs and finished arms")
    parser.add_argument("--arms", type=chosen_arms, default=every_arm(), help="those that begin so; default: all 12")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=120, help="training batches of a run")
    parser.add_argument("--prompts", type=int, default=512, help="held-out prompts")
    options = parser.parse_args()
    use_two_cores()
    work = options.work.resolve()
    summaries = measure(options.arms, work, seeds=options.seeds, batches=options.batches, prompts=options.prompts)
    if options.plot is not None:
        plot(summaries, options.plot)
    if options.json:
        print(json.dumps([asdict(summary) for summary in summaries]))
    else:
        show(summaries)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
