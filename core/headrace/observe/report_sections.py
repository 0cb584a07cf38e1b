"""The parts of a report that are words and tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from headrace.observe.audit import AuditResult
from headrace.observe.audit_result import format_audit, without_c1
from headrace.observe.records import EvaluationRecord
from headrace.observe.report_data import RunData

SAMPLES_SHOWN = 8
ENDS = {"completed": "completed", "stopped": "stopped early", "failed": "failed", None: "not finished"}


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def size(nbytes: float) -> str:
    """``0.25 MB``, ``38 MB``."""
    return f"{nbytes / 1e6:.2g} MB" if nbytes < 1e7 else f"{nbytes / 1e6:,.0f} MB"


# ---------------------------------------------------------------- header


def header(run_dir: Path, data: RunData, result: AuditResult) -> str:
    """Name, end, verdict and the figures that matter most."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(data.started))
    phases = " → ".join(f"{p.phase} ({p.algorithm})" for p in data.phases)
    about = [run_dir.name, f"started {when}", ENDS[data.status] + (f": {data.reason}" if data.reason else ""), phases]
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in _tiles(data, result))
    mark, kind = ("✓ Audit passed", "good") if result.ok else ("✗ Audit failed", "bad")
    if result.ok and result.summary["interrupting"]:
        mark += " without C1"
    if result.ok and not result.finished:
        mark, kind = f"{mark} so far", "unfinished"
    without = "".join(f'<p class="muted">{escape(note)}</p>\n' for note in without_c1(result))
    return (
        f'<h1>{escape(data.job_name)}</h1>\n<p class="muted">{escape(" · ".join(filter(None, about)))}</p>\n'
        f'<p class="verdict {kind}">{mark}: {escape(result.verdict.split(": ", 1)[1])}</p>\n{without}'
        f'<dl class="tiles">{tiles}</dl>'
    )


def _tiles(data: RunData, result: AuditResult) -> Iterator[tuple[str, str]]:
    """Values are HTML."""
    for mode in ("sampled", "greedy"):
        found = {e.version: getattr(e, f"{mode}_accuracy") for e in data.evaluations}
        shares = {version: share for version, share in found.items() if share is not None}
        if shares:
            base = max((v for v in shares if v <= data.base_version), default=min(shares))
            yield f"held-out, {mode}", f"<small>{shares[base]:.0%} →</small> {shares[max(shares)]:.0%}"
    rewards = [r.values["reward/mean"] for r in data.metrics if "reward/mean" in r.values]
    if rewards:
        few = max(1, len(rewards) // 20)
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        yield "training reward", f"<small>{first:.2f} →</small> {last:.2f}"
    yield "wall time", escape(duration(data.seconds))
    yield "policy versions", f"{result.summary['versions_published']:,}"
    yield "trajectories trained", f"{result.summary['trained']:,}"
    if data.version_bytes and (fetched := [nbytes for nbytes in data.fetched_bytes if nbytes]):
        usual, whole = median(fetched), median(data.version_bytes)
        rest = f" <small>of {size(whole)}, the base once</small>" if usual < whole else ""
        yield "weights per version", size(usual) + rest
    counts: dict[int, int] = {}
    for phase in data.phases:
        if phase.rollout:
            for step, count in result.summary["staleness"].get(phase.phase, {}).items():
                counts[step] = counts.get(step, 0) + count
    if counts:
        mean = sum(step * count for step, count in counts.items()) / sum(counts.values())
        bound = max(p.max_staleness for p in data.phases if p.rollout)
        yield "staleness, mean", f"{mean:.2f} <small>max {max(counts)} of {bound}</small>"
    if moves := result.summary["moves"]:
        yield "moved while generating", f"{moves:,} <small>{result.summary['prefilled_again']:,} tokens again</small>"
    if parked := sum(r.values.get("rollout/parked", 0) for r in data.metrics):
        yield "parked in host memory", f"{parked:,.0f} <small>times, for want of room for keys and values</small>"
    if result.summary["interrupting"]:
        mixed, interrupted = result.summary["mixed"], result.summary["interrupted"]
        again = f"{interrupted:,} interruptions, {result.summary['prefilled_again']:,} tokens again"
        yield "trained, of several versions", f"{mixed:,} <small>{again}</small>"
    if data.idle_share is not None:
        yield "trainer idle", f"{data.idle_share:.0%}"


# ---------------------------------------------------------------- mishaps


def mishaps_section(data: RunData) -> str:
    """Nodes that were lost and resumes, in the order of time: what became of the work."""
    rows = sorted([*_lost_rows(data), *_resume_rows(data)])
    if not rows:
        return ""
    body = "".join(
        f'<tr><td class="number">{escape(duration(at))}</td><td>{"</td><td>".join(map(escape, cells))}</td></tr>'
        for at, *cells in rows
    )
    return (
        '<h2>What was lost on the way</h2>\n<div class="scroll"><table><thead><tr><th class="number">after</th>'
        f"<th>what</th><th>why</th><th>what became of the work</th></tr></thead><tbody>{body}</tbody></table></div>"
    )


def _lost_rows(data: RunData) -> Iterator[tuple[float, str, str, str]]:
    for lost in data.lost_nodes:
        work = [f"{count:,} trajectories made again ({reason})" for reason, count in lost.again.items()]
        work += [f"{count:,} trajectories dropped ({reason})" for reason, count in lost.dropped.items()]
        if lost.replaced:
            work.append("replaced")
        elif lost.started_again is None:
            work.append("never started again")
        yield data.since_start(lost.at), lost.node, lost.reason, "; ".join(work) or "nothing was under way"


def _resume_rows(data: RunData) -> Iterator[tuple[float, str, str, str]]:
    for resume in data.resumes:
        work = f"resumed from version {resume.version}; {resume.void_events:,} events are void"
        yield data.since_start(resume.at), "the run", resume.reason or "ended without saying why", work


# ---------------------------------------------------------------- samples


def samples_section(data: RunData) -> str:
    """The same held-out tasks, answered by the first and the last evaluated version."""
    pair = _first_and_last(data)
    if pair is None:
        return ""
    before, after = pair
    rows = [
        f'<tr><td class="answer">{escape(one.prompt)}</td>'
        f"{_answer(one.answer, one.reward)}{_answer(other.answer, other.reward)}</tr>"
        for one, other in zip(before.samples, after.samples, strict=False)
        if one.prompt == other.prompt
    ][:SAMPLES_SHOWN]
    if not rows:
        return ""
    return (
        f'<h2>Before and after</h2>\n<p class="muted">Held-out tasks, {escape(before.mode)} answers.</p>\n'
        f'<div class="scroll"><table><thead><tr><th>task</th><th>version {before.version}</th>'
        f"<th>version {after.version}</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _first_and_last(data: RunData) -> tuple[EvaluationRecord, EvaluationRecord] | None:
    """Of sampled answers where there are any, of greedy ones otherwise. The first is the last that was made before
    anything was trained on generated rows."""
    for mode in ("sampled", "greedy"):
        found = sorted((r for r in data.samples if r.mode == mode), key=lambda r: r.version)
        if len(found) > 1:
            return [r for r in found if r.version <= max(data.base_version, found[0].version)][-1], found[-1]
    return None


def _answer(text: str, reward: float | None) -> str:
    kind = "right" if reward is not None and reward >= 1 else "wrong"
    shown = "not scored" if reward is None else f"reward {reward:.2g}"
    return f'<td class="answer {kind}" title="{shown}">{escape(text) or "(empty)"}</td>'


# ---------------------------------------------------------------- audit


def audit_section(result: AuditResult) -> str:
    """The books, what was dropped and why, and the audit as the command prints it."""
    summary = result.summary
    rows = [("trained", summary["trained"]), ("buffered at the end", summary["buffered"])]
    rows += [("in flight at the end", summary["in_flight"])]
    rows += [(f"dropped: {reason}", count) for reason, count in summary["dropped"].items()]
    rows += [("dispatched", summary["dispatched"])]
    books = "".join(f'<tr><td>{escape(name)}</td><td class="number">{count:,}</td></tr>' for name, count in rows)
    return (
        f'<h2>Audit</h2>\n<div class="scroll"><table style="max-width: 420px"><thead><tr><th>trajectories</th>'
        f'<th class="number">count</th></tr></thead><tbody>{books}</tbody></table></div>\n'
        f"<pre>{escape(format_audit(result))}</pre>"
    )


# ---------------------------------------------------------------- job


def job_section(data: RunData) -> str:
    """The resolved job, a block for each table."""
    if not data.job:
        return ""
    blocks = []
    for name, table in _tables(data.job):
        items = "".join(
            f"<div><dt>{escape(key)}</dt><dd>{escape(_shown(value))}</dd></div>" for key, value in _flat(table)
        )
        if items:
            blocks.append(f"<section><h3>{escape(name)}</h3><dl>{items}</dl></section>")
    return f'<h2>Job, as resolved</h2>\n<div class="settings">{"".join(blocks)}</div>'


def _tables(job: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in job.items():
        if isinstance(value, Mapping):
            yield name, value
        elif isinstance(value, list):
            yield from ((f"{name} {v.get('name', v.get('use', i))}", v) for i, v in enumerate(value, 1))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
