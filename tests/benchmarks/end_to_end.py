"""What asynchrony gains on the demo job, next to what two cores allow and to TRL's GRPOTrainer.

    python tests/benchmarks/end_to_end.py [--json] [--runs 3] [--batches 40] [--trl-python VENV/bin/python]

All kinds start from the same warmed-up checkpoint and train the same batches (32 prompts x 8 answers, 4 optimiser
steps, same clip, rate and AdamW) on the same two cores; evaluation and checkpoints are off. *synchronous*: the demo's
job under ``policy = "synchronous"``. *synchronous, 2 threads*: the same with both cores for the trainer too, the
fairest synchronous run. *multi_version*: the demo's job as it is. *trl*: one process with two threads, in the
interpreter that ``--trl-python`` names; left out without it. Kinds alternate; ratios are within a run, and their
medians count.

Seconds are per batch, from the first trained batch to the last, so that start-up is outside. CPU seconds are of all
processes of a run, by a clock that reads /proc.

The overlap bound. A part (a process) runs on one core at a time, so with ``C`` cores no schedule of the parts' CPU
seconds per batch ``c_i`` takes less wall time per batch than ``max(sum(c_i) / C, max(c_i))``. It is computed from
multi_version's own parts, and from the synchronous run's, whose parts do not compete for caches and memory but decode
in emptier batches. ``of_bound`` is bound / wall time.

The trainer is idle while it waits for a batch or for leave to publish, and busy from a batch's start to its end, also
when other processes have the cores meanwhile. How much of the time it could use a core at the bound's pace is
``trainer_cpu_share_at_bound``: where generation costs more than training, that is far below 1 under any schedule.

Rewards are means over the batches' answers: equal curves say that the kinds do the same work. Nothing is required
of the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cpu_clock import CpuClock
from demo import CORES, JobTable, demo_job, progress, records, reinforce_job, run_job, use_two_cores, warmed_up

from headrace.contract import EnvironmentContext
from headrace_algorithms.settings import GrpoSettings
from headrace_environments.sort_symbols import SortSymbols
from headrace_torch.training import TorchTrainingSettings

SYNCHRONOUS, THREADED, ASYNCHRONOUS, TRL = "synchronous", "synchronous, 2 threads", "multi_version", "trl"
CURVE_POINTS = 10
"""Means that a reward curve is reported as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run, or the medians of several. Per batch unless it says otherwise."""

    wall_seconds: float
    cpu_seconds: float
    tokens_per_second: float
    """Sampled tokens of trained batches per wall second."""
    rewards: list[float]
    """Mean reward, first batches first, in at most ten stretches of equal length."""
    cores_busy: float
    """CPU seconds / (wall seconds x cores)."""
    trainer_idle_share: float | None = None
    trainer_busy_share: float | None = None
    """What idle and busy leave of 1 is publication, and messages."""
    parts: dict[str, float] | None = None
    """CPU seconds by process; None where there is one."""
    mean_staleness: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians over the runs, and their ratios."""

    kinds: dict[str, Measured]
    overlap_bound: float
    """Wall seconds per batch, from multi_version's parts."""
    overlap_bound_of_synchronous_parts: float
    of_bound: float
    of_bound_of_synchronous_parts: float
    trainer_cpu_share_at_bound: float
    """The trainer's CPU seconds / overlap_bound."""
    speed_to_synchronous: float
    """Batches per wall second: multi_version / synchronous."""
    speed_to_threaded: float
    speed_to_trl: float | None
    cpu_to_trl: float | None
    """Batches per CPU second: multi_version / TRL."""
    reward_gap_to_trl: float | None
    """Mean of multi_version's less TRL's rewards over the whole curve."""
    trl_skipped: str | None
    """Why TRL was not measured."""
    runs: int
    batches: int
    cores: int = CORES


# ---------------------------------------------------------------- arithmetic


def overlap_bound(parts: Mapping[str, float], cores: int) -> float:
    """Least wall seconds in which ``cores`` cores can do ``parts``, each of which uses one core at a time."""
    return max(sum(parts.values()) / cores, max(parts.values()))


def curve(rewards: Sequence[float], points: int = CURVE_POINTS) -> list[float]:
    """Means of ``points`` stretches; fewer when there are fewer values."""
    return [float(part.mean()) for part in np.array_split(np.asarray(rewards), min(points, len(rewards)))]


def median(runs: Sequence[Measured]) -> Measured:
    """Field by field."""
    rows = [asdict(run) for run in runs]
    return Measured(**{name: _middle([row[name] for row in rows]) for name in rows[0]})


def _middle(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _middle([value.get(key, 0.0) for value in values]) for key in first}
    if isinstance(first, list):
        return [_middle(column) for column in zip(*values, strict=True)]
    return None if first is None else statistics.median(values)


def compare(runs: Sequence[Mapping[str, Measured]], *, batches: int, trl_skipped: str | None) -> Result:
    """Medians of what was measured, and of the ratios within each run."""
    return Result(
        kinds={kind: median([run[kind] for run in runs]) for kind in runs[0]},
        **_middle([ratios(run) for run in runs]),
        trl_skipped=trl_skipped,
        runs=len(runs),
        batches=batches,
    )


def ratios(kinds: Mapping[str, Measured]) -> dict[str, float | None]:
    """Between what was measured in one run, one kind right after the other: machines become faster and slower."""
    ours, synchronous, trl = kinds[ASYNCHRONOUS], kinds[SYNCHRONOUS], kinds.get(TRL)
    assert ours.parts is not None
    assert synchronous.parts is not None
    bound = overlap_bound(ours.parts, CORES)
    other_bound = overlap_bound(synchronous.parts, CORES)
    gaps = [] if trl is None else [a - b for a, b in zip(ours.rewards, trl.rewards, strict=True)]
    return {
        "overlap_bound": bound,
        "overlap_bound_of_synchronous_parts": other_bound,
        "of_bound": bound / ours.wall_seconds,
        "of_bound_of_synchronous_parts": other_bound / ours.wall_seconds,
        "trainer_cpu_share_at_bound": ours.parts["trainer"] / bound,
        "speed_to_synchronous": synchronous.wall_seconds / ours.wall_seconds,
        "speed_to_threaded": kinds[THREADED].wall_seconds / ours.wall_seconds,
        "speed_to_trl": None if trl is None else trl.wall_seconds / ours.wall_seconds,
        "cpu_to_trl": None if trl is None else trl.cpu_seconds / ours.cpu_seconds,
        "reward_gap_to_trl": statistics.mean(gaps) if gaps else None,
    }


# ---------------------------------------------------------------- headrace


def measure(job: JobTable, run: Path) -> Measured:
    """Run ``job`` and read what it cost from its metrics and the CPU clock."""
    clocks: list[CpuClock] = []

    def watch(process: int) -> CpuClock:
        clocks.append(CpuClock(process))
        return clocks[0]

    run_job(job, run, watch=watch)
    batches = records(run / "metrics.jsonl")
    begin, end = batches[0]["time"], batches[-1]["time"]
    used = clocks[0].between(begin, end)
    counted, wall = batches[1:], end - begin
    parts = {name: seconds / len(counted) for name, seconds in _by_node(run, clocks[0].parents, used).items()}
    tokens = sum(batch["response/length"] for batch in counted) * _answers(job)
    return Measured(
        wall_seconds=wall / len(counted),
        cpu_seconds=sum(parts.values()),
        tokens_per_second=tokens / wall,
        rewards=curve([batch["reward/mean"] for batch in batches]),
        cores_busy=sum(used.values()) / (wall * CORES),
        trainer_idle_share=sum(batch["trainer/wait_seconds"] for batch in counted) / wall,
        trainer_busy_share=sum(batch["train/seconds"] for batch in counted) / wall,
        parts=parts,
        mean_staleness=statistics.mean(batch["staleness/mean"] for batch in counted),
    )


def _answers(job: JobTable) -> int:
    batch = job["phase"][0]["batch"]
    return int(batch["groups"] * batch["group_size"])


def _by_node(run: Path, parents: Mapping[int, int], used: Mapping[int, float]) -> dict[str, float]:
    """Seconds by name: a node's, ``NODE/children`` of processes that it started, ``controller`` of the rest."""
    started = (event for event in records(run / "events.jsonl") if event["kind"] == "node_started")
    nodes = {event["pid"]: event["node"] for event in started}
    seconds: dict[str, float] = {}
    for pid, amount in used.items():
        name = part_name(pid, parents, nodes)
        seconds[name] = seconds.get(name, 0.0) + amount
    return seconds


def part_name(pid: int, parents: Mapping[int, int], nodes: Mapping[int, str]) -> str:
    """Of the process itself where it is a node, else of the nearest node above it."""
    if pid in nodes:
        return nodes[pid]
    while (pid := parents.get(pid, 0)) not in nodes:
        if not pid:
            return "controller"
    return f"{nodes[pid]}/children"


def jobs(model: Path, *, seed: int, batches: int) -> dict[str, JobTable]:
    """Every kind of ours."""
    asynchronous = demo_job(seed)["staleness"]
    kinds = {
        SYNCHRONOUS: reinforce_job(model, seed=seed, batches=batches, staleness={"policy": "synchronous"}),
        THREADED: reinforce_job(model, seed=seed, batches=batches, staleness={"policy": "synchronous"}),
        ASYNCHRONOUS: reinforce_job(model, seed=seed, batches=batches, staleness=asynchronous),
    }
    kinds[THREADED]["trainer"]["threads"] = CORES
    return kinds


# ---------------------------------------------------------------- TRL


def trl_spec(model: Path, job: JobTable) -> dict[str, Any]:
    """The job in the words of ``trl_grpo.py``, with the prompts that the run's environment gives."""
    phase, seed = job["phase"][0], job["job"]["seed"]
    trainer, loss = TorchTrainingSettings(**phase["trainer"]), GrpoSettings()
    environment = SortSymbols(SortSymbols.Settings())
    environment.start(EnvironmentContext(model_path=str(model), seed=seed, directory=str(model)))
    tasks = [environment.task(i, split="train").data for i in range(phase["steps"] * phase["batch"]["groups"])]
    return {
        "model": str(model),
        "seed": seed,
        "threads": CORES,
        "batches": phase["steps"],
        **{name: phase["batch"][name] for name in ("groups", "group_size", "mini_batches")},
        "max_new_tokens": job["rollout"]["max_new_tokens"],
        "temperature": job["rollout"].get("temperature", 1.0),
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        **{
            name: getattr(trainer, name)
            for name in ("learning_rate", "betas", "eps", "weight_decay", "max_gradient_norm")
        },
        "tasks": [{"prompt": task["prompt"], "answer": task["answer"]} for task in tasks],
    }


def measure_trl(python: Path, spec: Mapping[str, Any], folder: Path) -> Measured:
    """Run ``trl_grpo.py`` in its own interpreter. SystemExit with the end of its output when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, answer = folder / "spec.json", folder / "result.json"
    asked.write_text(json.dumps(spec))
    script = Path(__file__).with_name("trl_grpo.py")
    done = subprocess.run([python, script, asked, answer], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-2000:]}")
    return trl_measured(json.loads(answer.read_text()))


def trl_measured(result: Mapping[str, Any]) -> Measured:
    """From the first batch's end to the last's, as ours."""
    wall, cpu = (result[name][-1] - result[name][0] for name in ("wall", "cpu"))
    batches = len(result["wall"]) - 1
    return Measured(
        wall_seconds=wall / batches,
        cpu_seconds=cpu / batches,
        tokens_per_second=sum(result["tokens"][1:]) / wall,
        rewards=curve(result["rewards"]),
        cores_busy=cpu / (wall * CORES),
    )


def trl_missing(python: Path | None) -> str | None:
    """Why TRL cannot be measured; None when it can."""
    if python is None:
        return "no --trl-python: give an interpreter that has trl"
    try:
        done = subprocess.run([python, "-c", "import trl"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{python} cannot be started: {error}"
    return f"{python} cannot import trl: {done.stderr.strip().splitlines()[-1]}" if done.returncode else None


# ---------------------------------------------------------------- the whole


def measure_all(options: argparse.Namespace, work: Path) -> Result:
    """Every kind, alternating."""
    model = warmed_up(work, options.seed)
    ours = jobs(model, seed=options.seed, batches=options.batches)
    skipped = trl_missing(options.trl_python)
    runs: dict[str, list[Measured]] = {kind: [] for kind in (*ours, *(() if skipped else (TRL,)))}
    for number in range(options.runs):
        for kind, measured in runs.items():
            if kind == TRL:
                measured.append(measure_trl(options.trl_python, trl_spec(model, ours[ASYNCHRONOUS]), work / "trl"))
            else:
                measured.append(measure(ours[kind], work / kind.replace(", ", "-").replace(" ", "-")))
            last = measured[-1]
            progress(
                f"run {number + 1}/{options.runs} {kind}: {last.wall_seconds:.3f} s, "
                f"{last.cpu_seconds:.3f} CPU s per batch"
            )
    each = [dict(zip(runs, measured, strict=True)) for measured in zip(*runs.values(), strict=True)]
    return compare(each, batches=options.batches, trl_skipped=skipped)


def show(result: Result) -> None:
    """For people."""
    print(
        "per batch                 wall s   CPU s   tokens/s  cores busy  trainer idle  reward, first to last stretch"
    )
    for kind, run in result.kinds.items():
        idle = "" if run.trainer_idle_share is None else f"{run.trainer_idle_share:.0%}"
        print(
            f"{kind:24} {run.wall_seconds:7.3f} {run.cpu_seconds:7.3f} {run.tokens_per_second:10.0f} "
            f"{run.cores_busy:11.0%} {idle:>13}  {run.rewards[0]:.2f} -> {run.rewards[-1]:.2f}"
        )
    print(f"overlap bound {result.overlap_bound:.3f} s, of which multi_version reaches {result.of_bound:.2f}", end="; ")
    print(
        f"of synchronous parts {result.overlap_bound_of_synchronous_parts:.3f} s, "
        f"{result.of_bound_of_synchronous_parts:.2f}"
    )
    print(f"at the bound the trainer would use a core for {result.trainer_cpu_share_at_bound:.0%} of the time")
    print(f"multi_version is {result.speed_to_synchronous:.2f} x synchronous", end=", ")
    print(f"{result.speed_to_threaded:.2f} x synchronous with 2 threads")
    if result.trl_skipped is not None:
        print(f"TRL not measured: {result.trl_skipped}")
    else:
        print(
            f"and {result.speed_to_trl:.2f} x TRL per wall second, {result.cpu_to_trl:.2f} x per CPU second, "
            f"at a mean reward {result.reward_gap_to_trl:+.3f} from TRL's"
        )


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind; the medians count")
    parser.add_argument("--batches", type=int, default=40, help="training batches of a run, at least 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder that keeps the checkpoint and the runs; default: a fresh one")
    parser.add_argument("--trl-python", type=Path, metavar="PATH", help="interpreter of an environment that has trl")
    options = parser.parse_args()
    if options.batches < 2 or options.runs < 1:
        parser.error("--batches must be at least 2 and --runs at least 1: the first batch only starts the clock")
    use_two_cores()
    with tempfile.TemporaryDirectory() as fresh:
        result = measure_all(options, (options.work or Path(fresh)).resolve())
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
