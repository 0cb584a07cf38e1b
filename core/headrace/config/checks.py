"""What must hold before anything starts: plugins, their settings, and what the roles declare about each other.

Nothing is started and no engine is imported: capabilities are declared by classes. Another interpreter is asked once
whether it can import its plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.findings import Finding
from headrace.config.inert import inert_settings
from headrace.config.interpreters import check_interpreter
from headrace.config.loading import PHASE_TABLES, core_keys
from headrace.config.network import check_network
from headrace.config.schema import Job, Phase
from headrace.contract import (
    Algorithm,
    AlgorithmNeeds,
    Demonstrations,
    InferenceCapabilities,
    InferenceEngine,
    MultiVersion,
    Plugin,
    ScratchModels,
    Snapshots,
    StalenessPolicy,
    TrainingCapabilities,
    TrainingEngine,
)
from headrace.errors import ConfigError, ContractError, HeadraceError, WiringError
from headrace.registry import PluginSpec, judge_settings, load, require
from headrace.validation import Path as KeyPath
from headrace.validation import keys_at, near_miss, unknown_key

T = TypeVar("T")

ACCURACIES = {"evaluation/greedy_accuracy": "greedy", "evaluation/sampled_accuracy": "sampled"}
"""Metric that may end a phase → the key of ``[evaluation]`` that measures it."""


def check_job(job: Job) -> list[Finding]:
    """Everything that is wrong with a job, errors first; without errors it can be wired."""
    checker = _Checker(job)
    checker.run()
    findings = [Finding(severity="error", error=error) for error in checker.errors]
    findings += [Finding(severity="warning", error=warning) for warning in inert_settings(job, checker.needs)]
    return list({str(finding): finding for finding in findings}.values())


@dataclass(frozen=True, slots=True)
class _Selected:
    """A plugin's class with valid settings."""

    spec: PluginSpec
    cls: type[Plugin]
    settings: Any


class _Checker:
    """Gathers errors; a check that needs a plugin which is itself in error is left out."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.errors: list[HeadraceError] = []
        self.environment = self._select(job.environment.spec, "environment")
        self.rollout = self._select(job.rollout.spec, "rollout")
        for table in ("storage", "weights", "launcher"):
            self._select(getattr(job, table).spec, table)
        for index, spec in enumerate(job.observers):
            self._select(spec, "", ("observers", index), ("observers",))
        phases = range(len(job.phases))
        self.algorithms = [self._phase_plugin(index, "algorithm") for index in phases]
        self.trainers = [self._phase_plugin(index, "trainer") for index in phases]
        self.policies = [self._phase_plugin(index, "staleness") for index in phases]
        self.needs = [self._needs(selected) for selected in self.algorithms]
        """Per phase; None where the algorithm is in error."""

    def run(self) -> None:
        self._interpreters()
        self.errors += check_network(self.job)
        self._model()
        self._rollout_capabilities()
        for index, phase in enumerate(self.job.phases):
            self._batch(index, phase)
            self._algorithm(index, phase)
            self._staleness(index, phase)
            self._until(index, phase)

    # ------------------------------------------------------------ what plugins declare

    def _needs(self, selected: _Selected | None) -> AlgorithmNeeds | None:
        if selected is None or not issubclass(selected.cls, Algorithm):
            return None
        cls = selected.cls
        return self._ask(selected, "needs", lambda: cls.needs(selected.settings))

    def _training(self, selected: _Selected | None) -> TrainingCapabilities | None:
        if selected is None or not issubclass(selected.cls, TrainingEngine):
            return None
        cls = selected.cls
        return self._ask(selected, "capabilities", lambda: cls.capabilities(selected.settings))

    def _inference(self, selected: _Selected | None) -> InferenceCapabilities | None:
        if selected is None or not issubclass(selected.cls, InferenceEngine):
            return None
        cls = selected.cls
        return self._ask(selected, "capabilities", lambda: cls.capabilities(selected.settings))

    def _ask(self, selected: _Selected, method: str, call: Callable[[], T], *, origin: str = "") -> T | None:
        """What a plugin answers, or None after noting what it raised."""
        spec = selected.spec
        origin = origin or spec.origin
        try:
            return call()
        except HeadraceError as error:
            error.origin = error.origin or origin
            self.errors.append(error)
        except Exception as error:  # a plugin may raise anything; it is wrapped once, here
            message = f"{spec.role} {spec.use!r}: {method} raised {type(error).__name__}: {error}"
            self.errors.append(ContractError(message, origin=origin, fix=f"correct {selected.cls.__name__}.{method}"))
        return None

    # ------------------------------------------------------------ plugins

    def _phase_plugin(self, index: int, table: str) -> _Selected | None:
        spec: PluginSpec = getattr(self.job.phases[index], table)
        key = PHASE_TABLES[table][1]
        own: KeyPath = ("phase", index, table)
        replaced = self.job.written((*own, key)) and self.job.value((table, key)) != spec.use
        return self._select(spec, table, *((own,) if replaced else (own, (table,))))

    def _select(self, spec: PluginSpec, table: str, *places: KeyPath) -> _Selected | None:
        """The class and settings of ``spec``, or None after noting what is wrong. ``places``: where its table may be
        written, the first that has a key wins."""
        try:
            cls = load(spec.role, spec.use, directory=spec.directory, origin=spec.origin)
            if self._interpreter(table) is None:
                require(spec.role, spec.use, origin=spec.origin)
            settings, problems = judge_settings(cls, spec.settings, origin=spec.origin)
        except HeadraceError as error:
            self.errors.append(error)
            return None
        reserved = core_keys(table) if table else frozenset({"use"})
        clash = sorted(reserved & keys_at(cls.Settings))
        if clash:
            message = f"settings of {spec.use!r} are named like keys of core: {', '.join(clash)}"
            self.errors.append(ContractError(message, origin=spec.origin, fix="rename them in the plugin"))
            return None
        for problem in problems:
            self._setting_error(cls, problem.path, problem.message, problem.fix, reserved, places or ((table,),))
        return None if problems else _Selected(spec, cls, settings)

    def _setting_error(
        self,
        cls: type[Plugin],
        path: KeyPath,
        message: str,
        fix: str,
        reserved: frozenset[str],
        places: Sequence[KeyPath],
    ) -> None:
        own = keys_at(cls.Settings)
        if len(path) == 1 and path[0] not in own:
            problem = unknown_key(path, own | reserved)
            message, fix = problem.message, problem.fix
        origin = self.job.origin(*((*place, *path) for place in places))
        self.errors.append(ConfigError(message, origin=origin, fix=fix))

    def _interpreter(self, table: str) -> str | None:
        """The other interpreter that a table's plugin lives in, where there is one."""
        node = {"algorithm": "trainer"}.get(table, table)
        return getattr(getattr(self.job, node, None), "python", None)

    def _interpreters(self) -> None:
        job = self.job
        for table, spec in (
            ("environment", job.environment.spec),
            ("rollout", job.rollout.spec),
            ("trainer", job.phases[0].trainer),
        ):
            python = self._interpreter(table)
            if python is not None:
                try:
                    check_interpreter(python, spec, origin=job.origin((table, "python")))
                except HeadraceError as error:
                    self.errors.append(error)

    # ------------------------------------------------------------ capabilities

    def _model(self) -> None:
        model, trainer = self.job.model, self.trainers[0]
        if model.path is not None:
            self._model_path(Path(model.path))
            return
        declared = self._training(trainer)
        if trainer is None or declared is None:
            return
        if not declared.scratch:
            self._wiring(
                f"training engine {trainer.spec.use!r} cannot create a model from scratch",
                ("model", "scratch"),
                fix='write path = "FOLDER" of an existing model in [model]',
            )
        self._backed(trainer, "scratch", declared.scratch, ScratchModels)

    def _model_path(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            what = "has no config.json" if path.is_dir() else "is not a folder"
            self._config(
                f"model path {path} {what}; expected a Hugging Face-format folder",
                ("model", "path"),
                fix="give a folder relative to the job file, or make a fresh model with [model.scratch]",
            )

    def _rollout_capabilities(self) -> None:
        declared = self._inference(self.rollout)
        if self.rollout and declared:
            self._backed(self.rollout, "live_versions", declared.live_versions > 1, MultiVersion)

    def _algorithm(self, index: int, phase: Phase) -> None:
        needs = self.needs[index]
        if needs is None:
            return
        if phase.batch.group_size < needs.min_group_size:
            self._config(
                f"{phase.algorithm.use} compares the members of a group: group_size must be at least "
                f"{needs.min_group_size}, it is {phase.batch.group_size}",
                *_places(index, "batch", "group_size"),
                fix=f"set batch.group_size to {needs.min_group_size} or more",
            )
        if not needs.rollout and self.environment and not issubclass(self.environment.cls, Demonstrations):
            self._wiring(
                f"{phase.algorithm.use} imitates demonstrations, and environment "
                f"{self.job.environment.spec.use!r} has none",
                *_places(index, "algorithm", "use"),
                fix="choose an environment with demonstrations, or an algorithm that learns from rollouts",
            )
        if needs.reference_logprobs:
            self._reference(index, phase)

    def _reference(self, index: int, phase: Phase) -> None:
        trainer = self.trainers[index]
        declared = self._training(trainer)
        if trainer is None or declared is None:
            return
        if not declared.snapshots:
            self._wiring(
                f"{phase.algorithm.use} needs reference log-probs, and training engine {phase.trainer.use!r} "
                "keeps no snapshots of its weights",
                *_places(index, "algorithm", "use"),
                fix="switch the algorithm's reference term off, or choose a training engine with snapshots",
            )
        self._backed(trainer, "snapshots", declared.snapshots, Snapshots)

    # ------------------------------------------------------------ numbers

    def _batch(self, index: int, phase: Phase) -> None:
        batch = phase.batch
        if batch.groups % batch.mini_batches:
            fits = [n for n in range(1, batch.groups + 1) if batch.groups % n == 0]
            self._config(
                f"{batch.groups} groups cannot be split into {batch.mini_batches} equal mini-batches",
                *_places(index, "batch", "mini_batches"),
                *_places(index, "batch", "groups"),
                fix=f"set mini_batches to one of {', '.join(map(str, fits))}, or change groups",
            )

    def _staleness(self, index: int, phase: Phase) -> None:
        selected = self.policies[index]
        if selected is None:
            return
        cls = selected.cls

        def check() -> None:
            policy = cls(selected.settings)
            assert isinstance(policy, StalenessPolicy), "load checks the class"
            policy.check(batch_groups=phase.batch.groups)

        self._ask(selected, "check", check, origin=self.job.origin(*_places(index, "staleness", "max_staleness")))

    def _until(self, index: int, phase: Phase) -> None:
        if phase.until is None:
            return
        metric, evaluation = phase.until.metric, self.job.evaluation
        place: KeyPath = ("phase", index, "until")
        if metric not in ACCURACIES:
            meant = near_miss(metric, ACCURACIES)
            hint = f". Did you mean {meant!r}?" if meant else ""
            self._config(
                f"a phase cannot end by {metric!r}; what can end it: {', '.join(sorted(ACCURACIES))}{hint}",
                (*place, "metric"),
                fix=f'set metric = "{meant or min(ACCURACIES)}"',
            )
        elif not (phase.until.every or evaluation.every):
            self._config(
                f"{metric} ends this phase, but nothing measures it: evaluation.every is 0",
                place,
                fix="set until.every, or evaluation.every, to the number of versions between evaluations",
            )
        elif not getattr(evaluation, ACCURACIES[metric]):
            key = ACCURACIES[metric]
            message = f"{metric} ends this phase, but evaluation.{key} is false"
            self._config(message, ("evaluation", key), fix=f"set evaluation.{key} = true")

    # ------------------------------------------------------------ errors

    def _config(self, message: str, *places: KeyPath, fix: str) -> None:
        self.errors.append(ConfigError(message, origin=self.job.origin(*places), fix=fix))

    def _wiring(self, message: str, *places: KeyPath, fix: str) -> None:
        self.errors.append(WiringError(message, origin=self.job.origin(*places), fix=fix))

    def _backed(self, selected: _Selected, capability: str, declared: bool, base: type) -> None:
        """A declared capability needs the class that has its methods."""
        if declared and not issubclass(selected.cls, base):
            name = selected.cls.__name__
            self.errors.append(
                ContractError(
                    f"{name} declares {capability} without being a {base.__name__}",
                    origin=selected.spec.origin,
                    fix=f"derive it from headrace.contract.{base.__name__}, or do not declare {capability}",
                )
            )


def _places(index: int, *path: str) -> Iterator[KeyPath]:
    """Where a key of a phase may be written: in the phase or in the table that phases share."""
    yield ("phase", index, *path)
    yield path
