"""What the policies come to where lengths have a heavy tail: wall time to one accuracy, idle trainer, staleness, audit.

    python tests/benchmarks/heavy_tail.py [--json] [--seeds 1] [--work DIR] [--batches 120] [--every 10] [--prompts 256]

The demo's task with symbols that come again, their number log-normal (median 2, sigma 1.3) up to 64: one answer in a
hundred is 20 times as long as the median. Per seed, all policies begin with the same warmed-up weights and train
equally many batches (32 prompts x 8 answers) on the same two cores, evaluated every so many versions: with K = 2
``multi_version``, ``windowed`` and ``partial_rollout``, and beside them ``synchronous`` and ``delayed_update``.

*seconds_to_accuracy*: from the first dispatched group to the publication of the first evaluated version whose sampled
held-out accuracy is at least the seed's target, the best accuracy that every policy reached. Held-out answers take
slots of the same instances, under every policy alike. Medians over seeds; a run that is finished is kept in ``DIR`` and
not made again; runs of other settings are another folder's. Nothing is required of the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo import JobTable, demo_job, progress, records, run_job, use_two_cores

from headrace.observe.audit import audit_run

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "multi_version": {"policy": "multi_version", "max_staleness": 2},
    "synchronous": {"policy": "synchronous"},
    "windowed": {"policy": "windowed", "max_staleness": 2},
    "delayed_update": {"policy": "delayed_update", "max_staleness": 1},
    "partial_rollout": {"policy": "partial_rollout", "max_staleness": 2},
}
TAIL = {"use": "sort_symbols", "median": 2.0, "sigma": 1.3, "shortest": 2, "longest": 64, "distinct": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    accuracies: list[tuple[float, float]]
    """(seconds since the first dispatch, sampled held-out accuracy) of each evaluated version, in order."""
    seconds: float
    """To the last trained batch."""
    trainer_idle_share: float
    mean_staleness: float
    max_staleness: int
    longest_to_median: float
    """Response tokens of the longest trained answer by those of the median one."""
    mixed: int
    """Trained rows with tokens of several versions."""
    audit: str
    """Verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A policy over the seeds: medians, but for what must hold in every run."""

    seconds_to_accuracy: float
    seconds: float
    best_accuracy: float
    trainer_idle_share: float
    mean_staleness: float
    max_staleness: int
    mixed: int
    audits: list[str]


# ---------------------------------------------------------------- arithmetic


def outcome(events: Sequence[Mapping[str, Any]], *, audit: str, mixed: int) -> Outcome:
    """From a run's ``events.jsonl``."""
    trained = [event for event in events if event["kind"] == "batch_trained"]
    began = next(event["time"] for event in events if event["kind"] == "group_dispatched")
    published = {event["version"]: event["time"] for event in events if event["kind"] == "version_published"}
    answers = {event["trajectory"]: event for event in events if event["kind"] == "trajectory_finished"}
    ages = [
        event["version"] - min(version for version, _, _ in answers[row]["spans"])
        for event in trained
        for row in event["rows"]
        if answers[row]["spans"]
    ]
    lengths = [answers[row]["response_tokens"] for event in trained for row in event["rows"]]
    seconds = trained[-1]["time"] - began
    return Outcome(
        accuracies=[
            (max(0.0, published[event["version"]] - began), event["sampled_accuracy"])
            for event in sorted(events, key=lambda event: event.get("version", 0))
            if event["kind"] == "evaluation_finished"
        ],
        seconds=seconds,
        trainer_idle_share=sum(event["wait_seconds"] for event in trained) / seconds,
        mean_staleness=statistics.mean(ages),
        max_staleness=max(ages),
        longest_to_median=max(lengths) / statistics.median(lengths),
        mixed=mixed,
        audit=audit,
    )


def best(run: Outcome) -> float:
    """The best accuracy of a run."""
    return max(accuracy for _, accuracy in run.accuracies)


def seconds_to(target: float, run: Outcome) -> float:
    """Until the first evaluated version with this accuracy, which the run reaches."""
    return next(seconds for seconds, accuracy in run.accuracies if accuracy >= target)


def summarise(runs: Mapping[str, Sequence[Outcome]]) -> dict[str, Summary]:
    """Policy → what its runs, one per seed, come to; the target of a seed is what all its runs reach."""
    targets = [min(map(best, seed)) for seed in zip(*runs.values(), strict=True)]
    return {
        policy: Summary(
            seconds_to_accuracy=statistics.median(
                seconds_to(target, run) for target, run in zip(targets, found, strict=True)
            ),
            seconds=statistics.median(run.seconds for run in found),
            best_accuracy=statistics.median(map(best, found)),
            trainer_idle_share=statistics.median(run.trainer_idle_share for run in found),
            mean_staleness=statistics.median(run.mean_staleness for run in found),
            max_staleness=max(run.max_staleness for run in found),
            mixed=sum(run.mixed for run in found),
            audits=[run.audit for run in found],
        )
        for policy, found in runs.items()
    }


# ---------------------------------------------------------------- runs


def tail_job(seed: int) -> JobTable:
    """The demo with the heavy tail; it neither evaluates nor writes checkpoints."""
    job = demo_job(seed)
    job["environment"] = dict(TAIL)
    job["model"]["scratch"]["max_length"] = 160
    job["rollout"]["max_new_tokens"] = 72
    job["checkpoint"] = {"every": 0}
    return job


def warmed_up(work: Path, seed: int) -> Path:
    """The exported model that the warm-up leaves, trained at the first call and kept."""
    run = work / f"warm-up-{seed}"
    if not (run / "done").exists():
        job = tail_job(seed)
        job["phase"] = job["phase"][:1]
        run_job(job, run)
        (run / "done").touch()
    return run / "model" / "final"


def run_policy(policy: str, seed: int, work: Path, settings: Mapping[str, int]) -> Outcome:
    """One run, or what is kept of it. SystemExit when that is of other settings."""
    run = work / f"{policy}-{seed}"
    kept = run.with_suffix(".json")
    if kept.exists():
        content = json.loads(kept.read_text())
        if content["settings"] != dict(settings):
            raise SystemExit(f"{kept} is of {content['settings']}, not {dict(settings)}; use another --work")
        return Outcome(**content["outcome"])
    job = tail_job(seed)
    job["model"] = {"path": str(warmed_up(work, seed))}
    job["staleness"] = dict(POLICIES[policy])
    job["evaluation"] = {"every": settings["every"], "prompts": settings["prompts"], "greedy": False}
    job["phase"] = job["phase"][1:]
    job["phase"][0]["steps"] = settings["batches"]
    run_job(job, run)
    audited = audit_run(run)
    found = outcome(records(run / "events.jsonl"), audit=audited.verdict, mixed=audited.summary["mixed"])
    kept.write_text(json.dumps({"settings": dict(settings), "outcome": asdict(found)}))
    return found


def measure(work: Path, seeds: Iterable[int], settings: Mapping[str, int]) -> dict[str, list[Outcome]]:
    """Policy → its runs. Seed after seed, so that an interrupted measurement has whole seeds."""
    runs: dict[str, list[Outcome]] = {policy: [] for policy in POLICIES}
    for seed in seeds:
        for policy, found in runs.items():
            found.append(run := run_policy(policy, seed, work, settings))
            progress(
                f"seed {seed} {policy}: {run.seconds:.0f} s, best accuracy {best(run):.3f}, trainer idle "
                f"{run.trainer_idle_share:.0%}, staleness {run.mean_staleness:.2f}, {run.audit.partition(':')[0]}"
            )
    return runs


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0 on")
    parser.add_argument("--work", type=Path, help="folder of runs that are kept; default: a temporary one")
    parser.add_argument("--batches", type=int, default=120, help="per run")
    parser.add_argument("--every", type=int, default=10, help="versions between evaluations")
    parser.add_argument("--prompts", type=int, default=256, help="held-out prompts")
    options = parser.parse_args()
    use_two_cores()
    settings = {name: getattr(options, name) for name in ("batches", "every", "prompts")}
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        runs = measure(work, range(options.seeds), settings)
    summaries = {policy: asdict(summary) for policy, summary in summarise(runs).items()}
    if options.json:
        raw = {policy: [asdict(run) for run in found] for policy, found in runs.items()}
        print(json.dumps({"policies": summaries, "runs": raw, "seeds": options.seeds, **settings}))
        return 0
    print("policy           to accuracy  whole run  best  idle  staleness  mixed  audit")
    for policy, row in summaries.items():
        print(
            f"{policy:<16} {row['seconds_to_accuracy']:9.1f} s {row['seconds']:8.1f} s  {row['best_accuracy']:.2f} "
            f"{row['trainer_idle_share']:5.0%} {row['mean_staleness']:10.2f} {row['mixed']:6}  "
            f"{', '.join(verdict.partition(':')[0] for verdict in row['audits'])}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
