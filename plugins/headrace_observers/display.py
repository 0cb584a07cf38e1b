"""How progress looks: a panel for a terminal, one line for anything else, and the closing summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace_observers.progress import Evaluation, Progress, sparkline

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#"
SPARK_WIDTH = 40
MARKS = ("✓ ", "✗ ")
ASCII_MARKS = ("+ ", "- ")
SAMPLES_SHOWN = 5
SAMPLE_WIDTH = 40
LABEL_WIDTH = 13


def clock(seconds: float) -> str:
    """``1:05`` or ``1:02:05``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


# ---------------------------------------------------------------- facts, as text


def objective(progress: Progress) -> tuple[str, str]:
    """Reward, or the loss where a phase has no reward: label and value."""
    if (reward := progress.number("reward/mean")) is not None:
        return "reward", f"{reward:.3f}"
    loss = progress.number("train/loss")
    return ("loss", f"{loss:.4f}") if loss is not None else ("reward", "–")  # noqa: RUF001  # a dash for "none yet"


def accuracy(evaluation: Evaluation) -> str:
    """``58% sampled · 66% greedy``, or why there is nothing to tell."""
    modes = (("sampled", evaluation.sampled), ("greedy", evaluation.greedy))
    shown = " · ".join(f"{value:.0%} {mode}" for mode, value in modes if value is not None)
    return shown or f"none could be scored: {_counted(evaluation.failed)}"


def staleness(progress: Progress) -> str:
    """Of the newest batch, and the bound."""
    bound = f"{progress.phase.max_staleness} allowed" if progress.phase else ""
    if not progress.staleness:
        return bound
    return f"{mean_staleness(progress):.2f} mean · {max(progress.staleness)} max · {bound}"


def mean_staleness(progress: Progress) -> float:
    """Of the newest batch, over groups."""
    return sum(progress.staleness) / len(progress.staleness)


def speed(progress: Progress) -> str:
    """Tokens per second of both sides."""
    names = (("rollout/tokens_per_second", "sampled"), ("train/tokens_per_second", "trained"))
    values = [(progress.number(name), what) for name, what in names]
    return " · ".join(f"{value:,.0f} {what}" for value, what in values if value is not None)


def groups(progress: Progress) -> str:
    """Where the groups are."""
    parts = [f"{progress.in_flight} in flight", f"{len(progress.buffered)} buffered"]
    if progress.dropped:
        parts.append(f"dropped: {_counted(progress.dropped)}")
    if progress.failed:
        parts.append(f"failed tries: {_counted(progress.failed)}")
    return " · ".join(parts)


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


# ---------------------------------------------------------------- the panel


def panel(progress: Progress, *, elapsed: float, ascii_only: bool) -> Panel:
    """A snapshot: what it shows does not change afterwards."""
    return Panel(
        Group(_head(progress), Text(), _facts(progress, ASCII_BLOCKS if ascii_only else BLOCKS)),
        title=Text(progress.job_name or "headrace", style="bold"),
        title_align="left",
        subtitle=Text(clock(elapsed)),
        subtitle_align="right",
        border_style="dim",
        padding=(0, 1),
    )


def _head(progress: Progress) -> RenderableType:
    phase = progress.phase
    if phase is None:
        return Text(f"{model_line(progress)}\nstarting {', '.join(progress.nodes)}", style="italic")
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_row(
        Text.assemble((phase.name, "bold"), f"  phase {phase.number} of {max(progress.phases, phase.number)}"),
        Text(f"step {progress.step} of {phase.steps}"),
        ProgressBar(total=phase.steps, completed=progress.step),
    )
    return row


def _facts(progress: Progress, blocks: str) -> RenderableType:
    label, value = objective(progress)
    curve = sparkline(progress.rewards, SPARK_WIDTH, blocks=blocks) if label == "reward" else ""
    idle = progress.idle_share
    rows: list[tuple[str, RenderableType]] = [
        (label, Text.assemble((value, "bold"), "  ", (curve, "cyan"))),
        ("held-out", _held_out(progress)),
        ("staleness", Text(staleness(progress))),
        ("tokens/s", Text(speed(progress))),
        ("trainer idle", Text("" if idle is None else f"{idle:.0%}")),
        ("version", Text(f"{progress.version} newest · {len(progress.live)} live")),
        ("groups", Text(groups(progress))),
    ]
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True)
    table.add_column()
    for name, cell in rows:
        table.add_row(name, cell)
    return table


def _held_out(progress: Progress) -> Text:
    shown = Text()
    if progress.evaluations:
        first, last = progress.evaluations[0], progress.evaluations[-1]
        shown = Text.assemble((accuracy(last), "bold"), f"  at version {last.version}")
        if first is not last:
            shown.append(f", began at {accuracy(first)}", style="dim")
    if progress.evaluating:
        versions = ", ".join(str(version) for version in sorted(progress.evaluating))
        shown.append(f"  evaluating {versions}", style="italic dim")
    return shown


# ---------------------------------------------------------------- plain lines


def step_line(progress: Progress) -> str:
    """One trained batch in one line."""
    label, value = objective(progress)
    assert progress.phase is not None
    parts = [f"{progress.phase.name} {progress.step}/{progress.phase.steps}", f"{label} {value}"]
    if progress.staleness:
        parts.append(f"staleness {mean_staleness(progress):.2f}/{progress.phase.max_staleness}")
    if rate := speed(progress):
        parts.append(f"tokens/s {rate.replace(' · ', ', ')}")
    if progress.idle_share is not None:
        parts.append(f"idle {progress.idle_share:.0%}")
    parts.append(groups(progress).replace(" · ", ", "))
    return "  ".join(parts)


def model_line(progress: Progress) -> str:
    """Where the model comes from."""
    return f"model {progress.model}" if progress.model else "model made from [model.scratch]"


def phase_line(progress: Progress) -> str:
    """A phase begins."""
    phase = progress.phase
    assert phase is not None
    return (
        f"phase {phase.name} ({phase.number} of {max(progress.phases, phase.number)}): {phase.algorithm}, up to "
        f"{phase.steps} batches of {phase.batch_groups} x {phase.group_size}, max_staleness {phase.max_staleness}"
    )


# ---------------------------------------------------------------- the end


def closing(status: str, summary: Mapping[str, Any], *, elapsed: float, ascii_only: bool) -> list[RenderableType]:
    """Sample answers before and after, the audit's verdict, where the report is: a table, then lines."""
    parts: list[RenderableType] = [Text()]
    before, after = summary.get("samples_before") or (), summary.get("samples_after") or ()
    if before and after:
        parts += [_samples(before, after, ASCII_MARKS if ascii_only else MARKS), Text()]
    style = "bold green" if status == "completed" else "bold yellow" if status == "stopped" else "bold red"
    reason = f": {summary['reason']}" if summary.get("reason") else ""
    parts.append(_fact("run", Text.assemble((status, style), f"{reason} after {clock(elapsed)}")))
    if audit := str(summary.get("audit") or ""):
        parts.append(_fact("audit", Text(audit, style="green" if audit.startswith("PASS") else "bold red")))
    if summary.get("report"):
        parts.append(_fact("report", Text(str(summary["report"]))))
    if summary.get("report_error"):
        parts.append(_fact("no report", Text(str(summary["report_error"]), style="yellow")))
    return parts


def _fact(label: str, value: Text) -> Text:
    return Text.assemble((f"{label:<{LABEL_WIDTH}} ", "dim"), value)


def _samples(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], marks: tuple[str, str]) -> Table:
    """The same tasks answered by the first and by the last policy."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("held-out task", "before", "after"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=SAMPLE_WIDTH)
    pairs = [(one, other) for one, other in zip(before, after, strict=False) if one["prompt"] == other["prompt"]]
    for one, other in pairs[:SAMPLES_SHOWN]:
        table.add_row(Text(_one_line(one["prompt"])), _answer(one, marks), _answer(other, marks))
    return table


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())


def _answer(sample: Mapping[str, Any], marks: tuple[str, str]) -> Text:
    reward = sample["reward"]
    right = reward is not None and reward >= 1
    return Text.assemble((marks[0] if right else marks[1], "green" if right else "red"), _one_line(sample["answer"]))
