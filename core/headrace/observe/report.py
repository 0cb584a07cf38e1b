"""One self-contained page about a run: what it learned, how it worked, and whether the audit believes it.

Invariant: the page is written whole or not at all.
"""

from __future__ import annotations

import importlib
from html import escape
from pathlib import Path
from string import Template

import msgspec

from headrace.errors import PluginError, RunError
from headrace.observe.audit import AuditResult, audit_run
from headrace.observe.report_data import RunData, collect
from headrace.observe.report_figures import Panel, learning, lengths, speed, staleness, training
from headrace.observe.report_sections import audit_section, header, job_section, mishaps_section, samples_section
from headrace.observe.report_stages import stages
from headrace.observe.report_timeline import fleet_size, timeline

REPORT_FILE = "report.html"
PAGE = Path(__file__).parent / "page"


def write_report(run_dir: str | Path) -> Path:
    """Write ``RUN/report.html`` and return its path. It needs nothing else: open it, mail it. RunError when the run
    cannot be read or the page not be written, PluginError when plotly is missing."""
    run_dir = Path(run_dir)
    plotly = _plotly_js()
    result, data = audit_run(run_dir), collect(run_dir)
    page = _page(run_dir, data, result, plotly)
    path = run_dir / REPORT_FILE
    hidden = run_dir / f".{REPORT_FILE}.partial"
    try:
        hidden.write_text(page, encoding="utf-8")
        hidden.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", fix="free disk space or the directory") from error
    finally:
        hidden.unlink(missing_ok=True)
    return path


def _plotly_js() -> str:
    try:
        return str(importlib.import_module("plotly.offline").get_plotlyjs())
    except ImportError as error:
        raise PluginError(
            "the report draws with plotly, which is not installed",
            origin="headrace report",
            fix='pip install "headrace[report]"',
        ) from error


def _page(run_dir: Path, data: RunData, result: AuditResult, plotly: str) -> str:
    summary = result.summary
    sections: list[tuple[str, list[Panel | None]]] = [
        ("What it learned", [*learning(data)]),
        (
            "How it worked",
            [
                timeline(data),
                stages(data),
                fleet_size(data),
                staleness(summary["staleness"], summary["max_staleness"]),
                lengths(data),
                *speed(data),
            ],
        ),
        ("How training went", [*training(data)]),
    ]
    figures: dict[str, object] = {}
    body = [header(run_dir, data, result)]
    for title, panels in sections:
        body.append(_section(title, [panel for panel in panels if panel is not None], figures))
    body += [mishaps_section(data), samples_section(data), audit_section(result), job_section(data)]
    return Template((PAGE / "report.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{data.job_name}: {run_dir.name}"),
        css=(PAGE / "report.css").read_text(encoding="utf-8"),
        script=(PAGE / "report.js").read_text(encoding="utf-8"),
        plotly=plotly,
        # "</script>" inside a string would end the script.
        figures=msgspec.json.encode(figures).decode().replace("</", "<\\/"),
        body="\n".join(part for part in body if part),
    )


def _section(title: str, panels: list[Panel], figures: dict[str, object]) -> str:
    """Plots of a section; their figures are added to ``figures`` under the id of their place."""
    if not panels:
        return ""
    parts = []
    for panel in panels:
        place = f"plot-{len(figures)}"
        figures[place] = panel.figure
        parts.append(
            f'<figure class="{"wide" if panel.wide else ""}"><h3>{escape(panel.title)}</h3>'
            f"<figcaption>{escape(panel.caption)}</figcaption>"
            f'<div class="plot" id="{place}" role="img" aria-label="{escape(panel.title)}"></div></figure>'
        )
    return f'<h2>{escape(title)}</h2>\n<div class="panels">\n' + "\n".join(parts) + "\n</div>"
