"""What the recipes came to: the table of README.md, and curves.svg beside it, from the directories of their runs.

    for job in examples/recipes/*.toml; do headrace run $job --run-dir seen/$(basename $job .toml); done
    python examples/recipes/curves.py seen

A panel is one run: held-out accuracy of sampled answers by batch of the second phase, in grey that of the first run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ORDER = ("grpo", "dapo", "gspo", "rloo", "remax", "reinforce_pp", "ppo", "tbpo_qarl", "lora")
WIDE, HIGH, COLUMNS, GAP = 200, 110, 3, 46
LAST = 20
"""Batches that the last reward is the mean of."""
STYLE = (
    "text{font:11px sans-serif;fill:#777}.name{font-size:13px;font-weight:bold}"
    "polyline{fill:none;stroke:#2a7ab9;stroke-width:2}.first{stroke:#999;stroke-width:1}line{stroke:#8886}"
)

Curve = list[tuple[int, float]]
"""(batch of the second phase, held-out accuracy)."""


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def curve(run: Path) -> Curve:
    """From the weights that imitation left on."""
    events = records(run / "events.jsonl")
    began = [event["version"] for event in events if event["kind"] == "phase_started"][-1]
    found = [event for event in events if event["kind"] == "evaluation_finished" and event["version"] >= began]
    return [(event["version"] - began, event["sampled_accuracy"]) for event in found]


def row(name: str, run: Path) -> str:
    points, batches = curve(run), records(run / "metrics.jsonl")
    reward = sum(batch["reward/mean"] for batch in batches[-LAST:]) / LAST
    minutes, seconds = divmod(round(batches[-1]["time"] - records(run / "events.jsonl")[0]["time"]), 60)
    there = next((batch for batch, accuracy in points if accuracy >= 0.9), None)
    return (
        f"| [{name}]({name}.toml) | {points[0][1]:.2f} | {points[-1][1]:.2f} | {there or '-'} | {reward:.2f} "
        f"| {minutes}:{seconds:02d} |"
    )


def panel(name: str, points: Curve, first: Curve, x: int, y: int) -> str:
    longest = max(batch for batch, _ in [*points, *first])

    def line(curve: Curve, kind: str) -> str:
        at = " ".join(f"{WIDE * batch / longest:.1f},{HIGH * (1 - accuracy):.1f}" for batch, accuracy in curve)
        return f'<polyline class="{kind}" points="{at}"/>'

    rules = "".join(f'<line x2="{WIDE}" y1="{HIGH * part}" y2="{HIGH * part}"/>' for part in (0, 0.5, 1))
    marks = f'<text x="-22" y="{HIGH + 4}">0</text><text x="-22" y="4">1</text>'
    words = f'<text class="name" y="-10">{name}</text><text x="{WIDE - 24}" y="{HIGH + 14}">{longest}</text>'
    return f'<g transform="translate({x},{y})">{rules}{marks}{words}{line(first, "first")}{line(points, "own")}</g>'


def main() -> None:
    seen = Path(sys.argv[1])
    curves = {name: curve(seen / name) for name in ORDER if (seen / name).exists()}
    first = next(iter(curves.values()))
    places = [(GAP + n % COLUMNS * (WIDE + GAP), GAP + n // COLUMNS * (HIGH + GAP)) for n in range(len(curves))]
    panels = [panel(name, points, first, *at) for (name, points), at in zip(curves.items(), places, strict=True)]
    size = f'width="{COLUMNS * (WIDE + GAP) + GAP}" height="{places[-1][1] + HIGH + GAP}"'
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(panels)}</svg>\n'
    (HERE / "curves.svg").write_text(picture)
    print("| recipe | accuracy before | after | batches to 0.9 | reward at the end | time |\n|---|---|---|---|---|---|")
    for name in curves:
        print(row(name, seen / name))


if __name__ == "__main__":
    main()
