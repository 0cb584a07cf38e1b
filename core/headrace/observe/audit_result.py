"""The outcome of an audit, and how it reads on one screen: verdict, books, staleness, rules, violations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.observe.audit_findings import RULES, Rule, Violation

SHOWN = 12
"""Violations on the screen."""
BAR = 32
"""Characters of the longest bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """A verdict and what it rests on."""

    violations: tuple[Violation, ...]
    """In log order; the first thousand."""
    violated: Mapping[Rule, int]
    """How often each broken rule was broken."""
    checked: Mapping[Rule, int]
    """How often each rule was checked: a rule that never applied proves nothing."""
    summary: Mapping[str, Any]
    """Counts, by name."""

    @property
    def ok(self) -> bool:
        """Whether every rule held."""
        return not self.violated

    @property
    def finished(self) -> bool:
        """Whether the log is whole, so that the verdict is about a run and not about its beginning."""
        return self.summary["status"] is not None and not self.summary["cut_short"]

    @property
    def verdict(self) -> str:
        """One line."""
        events, resumed = self.summary["events"], self.summary["resumed"]
        held = f"{len(RULES)} rules over {events:,} events"
        if resumed:
            held += f", resumed {_times(resumed)}"
        passed = "PASS without C1" if self.summary["interrupting"] else "PASS"
        if self.ok and not self.finished:
            end = "log unfinished" if self.summary["status"] is None else "log goes on"
            return f"{passed} so far: {held}, {self.summary['trained']:,} trajectories trained, {end}"
        if self.ok:
            return f"{passed}: {held}, {self.summary['trained']:,} trajectories trained, none lost"
        count = sum(self.violated.values())
        return f"FAIL: {count:,} violation{'s' * (count > 1)} of {len(self.violated)} rules in {events:,} events"

    def __str__(self) -> str:
        return format_audit(self)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def format_audit(result: AuditResult, *, title: str = "") -> str:
    """Plain text, 80 columns but for messages; ``title`` says what was audited."""
    summary = result.summary
    lines = [f"audit {title or summary['job']}", "", result.verdict]
    lines += [f"      {note}" for note in _notes(result)]
    lines += ["", *_books(summary), "", *_staleness(summary), "", *_rules(result)]
    if not result.ok:
        lines += ["", *_violations(result)]
    return "\n".join(lines)


def _notes(result: AuditResult) -> Iterator[str]:
    """What limits the verdict."""
    summary = result.summary
    if summary["cut_short"]:
        line = f"line {summary['events'] + 1:,} is cut in the middle"
        if summary["status"] is None:
            yield f"{line}: its writer was killed, or is writing it now"
        elif summary["status"] == "completed":
            yield f"{line}; it follows the end of a completed run"
        else:
            yield f"{line}; it follows the end: a resume was cut off"
    if summary["status"] is None:
        yield "the log has no run_finished: the run is still going, or was killed"
    if not result.finished:
        yield f"covered: the {summary['events']:,} events of the first {summary['seconds']:,.1f} s"
    elif summary["status"] != "completed":
        yield f"the run {summary['status']}: what it had in flight and buffered was left behind"
    yield from without_c1(result)
    if summary["void_events"]:
        yield f"{summary['void_events']:,} events are void: the run went on from a checkpoint before them"
    if summary["lost_nodes"]:
        yield "lost nodes: " + ", ".join(f"{node} {_times(count)}" for node, count in summary["lost_nodes"].items())
    if summary["unscored"]:
        yield f"{summary['unscored']:,} trajectories in the batches could not be scored and carried no weight"
    if summary["late_reports"]:
        yield f"{summary['late_reports']:,} reports came after their group had been dropped, and were ignored"


def without_c1(result: AuditResult) -> Iterator[str]:
    """Which phases gave up that a trajectory is of a single policy (C1 of DORA, arXiv 2604.26256)."""
    for phase, policy in result.summary["interrupting"].items():
        yield f"phase {phase}: {policy} interrupts trajectories; they are not of a single policy (C1 is given up)"


def _books(summary: Mapping[str, Any]) -> Iterator[str]:
    columns = ("dispatched", "trained", "buffered", "in flight", "dropped")
    dropped = sum(summary["dropped"].values())
    values = (summary["dispatched"], summary["trained"], summary["buffered"], summary["in_flight"], dropped)
    signs = ("", "=", "+", "+", "+")
    yield "trajectories " + "".join(f"{sign:>2} {name:>10}" for sign, name in zip(signs, columns, strict=True))
    yield "             " + "".join(f"   {value:>10,}" for value in values)
    if summary["dropped"]:
        yield "  dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in summary["dropped"].items())
    if summary["failed_attempts"]:
        failed = ", ".join(f"{count:,} {reason}" for reason, count in summary["failed_attempts"].items())
        yield f"  failed attempts: {failed}"
    others = [
        f"{summary[what + '_batches']:,} {what}" for what in ("skipped", "released") if summary[what + "_batches"]
    ]
    aside = f" ({', '.join(others)})" if others else ""
    yield (
        f"batches {summary['batches']:,}{aside} · optimiser steps {summary['optimizer_steps']:,} · "
        f"versions published {summary['versions_published']:,} · evaluations {summary['evaluations']:,}"
    )
    if summary["scored"]:
        yield f"mean reward of all {summary['scored']:,} scored sampled trajectories: {summary['mean_reward']:.4g}"
    counts = {what: summary[key] for what, key in (("moves", "moves"), ("interruptions", "interrupted"))}
    if any(counts.values()):
        shown = [f"{what} {count:,}" for what, count in counts.items() if count]
        yield " · ".join([*shown, f"tokens prefilled again {summary['prefilled_again']:,}"])
    if summary["interrupting"]:
        mixed, trained = summary["mixed"], sum(sum(counts.values()) for counts in summary["staleness"].values())
        yield f"trained rows with tokens of several versions: {mixed:,} of {trained:,}"
    if summary["self_check"] is not None:
        yield f"self-check: trainer and instances differ by at most {summary['self_check']:.2e} in log-prob"


def _staleness(summary: Mapping[str, Any]) -> Iterator[str]:
    yield "staleness of trained rows"
    histograms: Mapping[str, Mapping[int, int]] = summary["staleness"]
    for phase, histogram in histograms.items():
        yield f"  phase {phase}, max_staleness {summary['max_staleness'][phase]}"
        total, longest = sum(histogram.values()), max(histogram.values())
        for staleness, count in histogram.items():
            bar = "█" * max(1, round(BAR * count / longest))
            yield f"{staleness:>5}  {bar:<{BAR}}  {count:>10,}  {count / total:6.1%}"


def _rules(result: AuditResult) -> Iterator[str]:
    yield f"{'rules':<72}checked"
    for rule, sentence in RULES.items():
        broken, checked = result.violated.get(rule, 0), result.checked.get(rule, 0)
        mark = "FAIL" if broken else "ok" if checked else "-"
        yield f"{mark:<4} {rule:<12} {sentence:<52}{checked:>10,}"


def _violations(result: AuditResult) -> Iterator[str]:
    count = sum(result.violated.values())
    shown = result.violations[:SHOWN]
    yield f"violations ({count:,}{f', the first {len(shown)}' if count > len(shown) else ''})"
    for violation in shown:
        yield f"  event {violation.seq:>8}  {violation.rule}: {violation.message}"
