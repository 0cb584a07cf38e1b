"""Evaluation: held-out tasks at a pinned version, with tickets of their own, outside admission and ledger.

Invariant: an evaluation changes nothing that training can see but the time it takes. Its results are keyed by the
version that was asked for, so two evaluations that end together cannot overwrite each other.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace import clock
from headrace.config import EvaluationConfig
from headrace.observe.records import EvaluationRecord
from headrace.observe.records import EvaluationSample as KeptSample
from headrace.run.seeds import derive_seed
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet, Instance
from headrace.services.messages import EvaluationDone, EvaluationSample, Member, WorkItem

TASKS_PER_ITEM = 32
SAMPLES_KEPT = 8


@dataclass(slots=True)
class _Round:
    """One version's evaluation in progress."""

    version: int
    done: asyncio.Future[dict[str, float | None]]
    finished: Callable[[], None]
    started: float
    open_items: set[int]
    samples: dict[bool, list[EvaluationSample]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    version_end: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """How held-out answers are drawn."""

    config: EvaluationConfig
    tasks: int
    """Held-out tasks per mode: ``config.prompts``, or all there are when there are fewer."""
    seed: int
    max_new_tokens: int
    temperature: float
    lockstep: bool


class Evaluator:
    """Runs evaluations one version at a time or several at once."""

    def __init__(
        self,
        plan: EvaluationPlan,
        *,
        controller: Controller,
        fleet: Fleet,
        emit: Callable[..., Any],
        record: Callable[[EvaluationRecord], None],
    ) -> None:
        self._plan = plan
        self._controller = controller
        self._fleet = fleet
        self._emit = emit
        self._record = record
        self._items = 0
        self._rounds: dict[int, _Round] = {}
        self._round_of_item: dict[int, _Round] = {}
        self.results: dict[int, dict[str, float | None]] = {}
        self.lockstep = plan.lockstep

    def begin(self, version: int, *, finished: Callable[[], None]) -> asyncio.Future[dict[str, float | None]]:
        """Start evaluating ``version``, which instances must be serving; ``finished`` releases its pin, within the very
        report that ends the evaluation: what the controller does after it sees the version free."""
        instances = self._fleet.hosting(version)
        items = self._work_items(version, instances)
        current = _Round(
            version=version,
            done=asyncio.get_running_loop().create_future(),
            finished=finished,
            started=clock.now(),
            open_items={item.group for item in items},
        )
        self._rounds[version] = current
        self._round_of_item |= {item.group: current for item in items}
        self._fleet.evaluating.add(version)
        self._emit("evaluation_started", version=version)
        self._controller.evaluate(items, self._item_done)
        return current.done

    def _modes(self) -> list[bool]:
        """``greedy`` flag of each mode that is asked for."""
        config = self._plan.config
        return [greedy for greedy, wanted in ((True, config.greedy), (False, config.sampled)) if wanted]

    def _work_items(self, version: int, instances: list[Instance]) -> list[WorkItem]:
        plan = self._plan
        items = []
        for greedy in self._modes():
            for first in range(0, plan.tasks, TASKS_PER_ITEM):
                tasks = range(first, min(first + TASKS_PER_ITEM, plan.tasks))
                self._items += 1
                items.append(
                    WorkItem(
                        kind="evaluation",
                        group=self._items,
                        version=version,
                        split="evaluation",
                        members=self._members(tasks, instances, version, greedy),
                        max_new_tokens=plan.max_new_tokens,
                        temperature=plan.temperature,
                        greedy=greedy,
                    )
                )
        return items

    def _members(self, tasks: range, instances: list[Instance], version: int, greedy: bool) -> list[Member]:
        """Every version is asked with the same seeds, so that two evaluations differ by their policies alone."""
        cohort = f"evaluation-{version}-{'greedy' if greedy else 'sampled'}-{tasks.start}"
        placed = Counter(task % len(instances) for task in tasks)
        return [
            Member(
                trajectory=2 * task + int(greedy),
                task=task,
                instance=instances[task % len(instances)].address,
                seed=derive_seed(self._plan.seed, "evaluation", task),
                cohort=cohort if self._plan.lockstep else "",
                cohort_size=placed[task % len(instances)] if self._plan.lockstep else 0,
            )
            for task in tasks
        ]

    def _item_done(self, done: EvaluationDone) -> None:
        current = self._round_of_item.pop(done.item)
        current.open_items.discard(done.item)
        current.samples.setdefault(done.greedy, []).extend(done.samples)
        current.failed.update(done.failed)
        current.version_end = max(current.version_end, *done.versions, current.version)
        if not current.open_items:
            self._finish(current)

    def _finish(self, current: _Round) -> None:
        del self._rounds[current.version]
        result: dict[str, float | None] = {}
        for greedy, samples in current.samples.items():
            mode = "greedy" if greedy else "sampled"
            result[f"evaluation/{mode}_accuracy"] = _accuracy(samples)
            self._record(self._record_of(current, mode, samples))
        self._emit(
            "evaluation_finished",
            version=current.version,
            version_end=current.version_end,
            greedy_accuracy=result.get("evaluation/greedy_accuracy"),
            sampled_accuracy=result.get("evaluation/sampled_accuracy"),
            prompts=self._plan.tasks,
            failed=dict(current.failed),
            started=current.started,
            finished=clock.now(),
        )
        self.results[current.version] = result
        self._fleet.evaluating.discard(current.version)
        current.finished()
        if not current.done.done():  # whoever waited for it may have been cancelled
            current.done.set_result(result)

    def _record_of(self, current: _Round, mode: str, samples: list[EvaluationSample]) -> EvaluationRecord:
        ordered = sorted(samples, key=lambda s: s.task)
        return EvaluationRecord(
            version=current.version,
            mode=mode,
            samples=[KeptSample(prompt=s.prompt, answer=s.answer, reward=s.reward) for s in ordered[:SAMPLES_KEPT]],
        )


def _accuracy(samples: list[EvaluationSample]) -> float | None:
    """An answer that could not be scored counts as wrong; when none could be, nothing is known."""
    if all(math.isnan(sample.reward) for sample in samples):
        return None
    return sum(sample.correct for sample in samples) / len(samples)
