"""The plugins that a job selects: found, their settings judged, and asked whether they could start.

Invariant: a plugin is selected only when its class and its settings are in order; what is wrong is noted once, with
the place of the key, whatever the plugin raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headrace.config.inert import overridden, replaced
from headrace.config.interpreters import check_interpreter
from headrace.config.loading import PHASE_TABLES, core_keys, selector
from headrace.config.schema import Job
from headrace.config.transports import transport_of
from headrace.contract import Plugin
from headrace.errors import ConfigError, ContractError, HeadraceError
from headrace.registry import PluginSpec, having, judge_settings, load, require
from headrace.validation import Path as KeyPath
from headrace.validation import Problem, keys_at, unknown_key

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Selected:
    """A plugin's class with valid settings."""

    spec: PluginSpec
    cls: type[Plugin]
    settings: Any
    places: tuple[KeyPath, ...]
    """Where its table may be written; the first that has a key wins."""


class Selections:
    """A job's plugins; those in error are None. ``errors`` says what is wrong."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.errors: list[HeadraceError] = []
        self.environment = self._select(job.environment.spec, "environment")
        self.rollout = self._select(job.rollout.spec, "rollout")
        for table in ("storage", "launcher"):
            self._select(getattr(job, table).spec, table)
        self.weights = self._transport()
        self.quantization = self._select(job.quantization.spec, "quantization") if job.quantization else None
        for index, spec in enumerate(job.observers):
            self._select(spec, "", ("observers", index), ("observers",))
        phases = range(len(job.phases))
        self.algorithms = [self._of_phase(index, "algorithm") for index in phases]
        self.trainers = [self._of_phase(index, "trainer") for index in phases]
        self.policies = [self._of_phase(index, "staleness") for index in phases]
        self._judge_overridden("algorithm", self.algorithms)
        self._judge_overridden("trainer", self.trainers)
        self._judge_overridden("staleness", self.policies)
        self._judge_replaced()
        self._interpreters()

    def ask(self, selected: Selected, method: str, call: Callable[[], T]) -> T | None:
        """What a plugin answers, or None after noting what it raised. A message that begins with a setting's name is
        about that setting, and points to it."""
        spec = selected.spec
        try:
            return call()
        except HeadraceError as error:
            key = error.message.partition(" ")[0]
            named = key in keys_at(selected.cls.Settings)
            error.origin = error.origin or (self.origin(selected, key) if named else spec.origin)
            self.errors.append(error)
        except Exception as error:  # a plugin may raise anything; it is wrapped once, here
            message = f"{spec.role} {spec.use!r}: {method} raised {type(error).__name__}: {error}"
            fix = f"correct {selected.cls.__name__}.{method}"
            self.errors.append(ContractError(message, origin=spec.origin, fix=fix))
        return None

    def origin(self, selected: Selected, *path: str | int) -> str:
        """Where a setting was written."""
        return self.job.origin(*((*place, *path) for place in selected.places))

    def lives_here(self, table: str) -> bool:
        """Whether a table's plugin runs in this interpreter."""
        return self._interpreter(table) is None

    def _of_phase(self, index: int, table: str) -> Selected | None:
        spec: PluginSpec = getattr(self.job.phases[index], table)
        key = selector(table)
        own: KeyPath = ("phase", index, table)
        replaced = self.job.written((*own, key)) and self.job.value((table, key)) != spec.use
        return self._select(spec, table, *((own,) if replaced else (own, (table,))))

    def _select(self, spec: PluginSpec, table: str, *places: KeyPath) -> Selected | None:
        """The class and settings of ``spec``, or None after noting what is wrong."""
        places = places or ((table,),)
        try:
            cls = load(spec.role, spec.use, directory=spec.directory, origin=spec.origin)
            if self.lives_here(table):
                require(spec.role, spec.use, origin=spec.origin)
            settings, problems = judge_settings(cls, spec.settings, origin=spec.origin)
        except HeadraceError as error:
            self._unusable(error, spec.role, table)
            return None
        reserved = core_keys(table) if table else frozenset({"use"})
        clash = sorted(reserved & keys_at(cls.Settings))
        if clash:
            message = f"settings of {spec.use!r} are named like keys of core: {', '.join(clash)}"
            self.errors.append(ContractError(message, origin=spec.origin, fix="rename them in the plugin"))
            return None
        selected = Selected(spec, cls, settings, places)
        for problem in problems:
            self._setting_error(selected, problem, reserved)
        if problems:
            return None
        return selected if not self.lives_here(table) or self._preflight(selected) else None

    def _transport(self) -> Selected | None:
        try:
            return self._select(transport_of(self.job), "weights")
        except HeadraceError as error:
            self.errors.append(error)
            return None

    def _unusable(self, error: HeadraceError, role: str, table: str) -> None:
        key = selector(table)
        if key != "use":  # the registry knows roles, not the key that a table selects with
            error.fix = error.fix.replace("use = ", f"{key} = ")
            error.message = error.message.replace(f"no {role} named", f"no {role} {key} named")
        self.errors.append(error)

    def _preflight(self, selected: Selected) -> bool:
        """Whether the plugin could start, as far as it can tell itself."""
        spec, cls = selected.spec, selected.cls

        def call() -> bool:
            cls.preflight(selected.settings, directory=spec.directory, origin=lambda key: self.origin(selected, key))
            return True

        return bool(self.ask(selected, "preflight", call))

    def _judge_overridden(self, table: str, selections: Sequence[Selected | None]) -> None:
        """A shared setting that every phase overrides reaches no plugin; a mistake in it is one all the same."""
        shared = {key: self.job.value((table, key)) for key in overridden(self.job, table)}
        selected = next((s for s in selections if s is not None and (table,) in s.places), None)
        if not shared or selected is None:
            return
        table_of, settings = replace(selected, places=((table,),)), {**selected.spec.settings, **shared}
        judged = self.ask(selected, "Settings", lambda: judge_settings(selected.cls, settings))
        for problem in judged[1] if judged else ():
            if {*problem.path[:1], problem.message.partition(" ")[0]} & shared.keys():
                self._setting_error(table_of, problem, core_keys(table))

    def _judge_replaced(self) -> None:
        """A shared plugin that every phase replaces is never used; one that is not there is a mistake all the same."""
        for table in replaced(self.job):
            role, key, _ = PHASE_TABLES[table]
            use, origin = str(self.job.value((table, key))), self.job.origin((table, key))
            try:
                load(role, use, directory=self.job.directory, origin=origin)
            except HeadraceError as error:
                self._unusable(error, role, table)

    def _setting_error(self, selected: Selected, problem: Problem, reserved: frozenset[str]) -> None:
        own, path = keys_at(selected.cls.Settings), problem.path
        if len(path) == 1 and path[0] not in own:
            problem = _of_others(selected.spec, path) or unknown_key(path, own | reserved)
        elif not path and (key := problem.message.partition(" ")[0]) in own:
            path = (key,)
        self.errors.append(ConfigError(problem.message, origin=self.origin(selected, *path), fix=problem.fix))

    def _interpreter(self, table: str) -> str | None:
        """The other interpreter that a table's plugin lives in, where there is one."""
        node = {"algorithm": "trainer"}.get(table, table)
        return getattr(getattr(self.job, node, None), "python", None)

    def _interpreters(self) -> None:
        """Ask other interpreters about the plugins that live in them; each once, also when phases share it."""
        job = self.job
        plugins = [("environment", job.environment.spec, self.environment), ("rollout", job.rollout.spec, self.rollout)]
        if (weights := self.weights) is not None:
            plugins += [("rollout", weights.spec, weights), ("trainer", weights.spec, weights)]
        for phase, trainer, algorithm in zip(job.phases, self.trainers, self.algorithms, strict=True):
            plugins += [("trainer", phase.trainer, trainer), ("trainer", phase.algorithm, algorithm)]
        asked: list[tuple[str, PluginSpec]] = []
        for node, spec, selected in plugins:
            python = self._interpreter(node)
            if python is None or (python, spec) in asked:
                continue
            asked.append((python, spec))
            places = {k: self.origin(selected, k) for k in keys_at(selected.cls.Settings)} if selected else None
            try:
                check_interpreter(python, spec, places, origin=job.origin((node, "python")))
            except HeadraceError as error:
                self.errors.append(error)


def _of_others(spec: PluginSpec, path: KeyPath) -> Problem | None:
    """The problem of a key that ``spec``'s plugin lacks and others of its role have."""
    key, others = path[-1], having(spec.role, str(path[-1]))
    if not others:
        return None
    return Problem(
        path=path,
        message=f"{key} is no setting of {spec.use}; those have it: {', '.join(others)}",
        fix=f"remove {key}, or choose one of those",
    )
