"""What must hold before anything starts: plugins, their settings, and what the roles declare about each other.

Nothing is started and no engine is imported: capabilities are declared by classes. Another interpreter is asked whether
it can import its plugins, and they whether they could start there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.config.adapters import check_adapters
from headrace.config.findings import Finding
from headrace.config.inert import inert_settings
from headrace.config.instances import check_instances
from headrace.config.models import check_model, unbacked
from headrace.config.network import check_network
from headrace.config.places import check_run_directory
from headrace.config.room import check_room
from headrace.config.schema import Job, Phase
from headrace.config.selections import Selected, Selections
from headrace.config.transports import fitting, one_machine, out_of_reach
from headrace.contract import (
    Algorithm,
    AlgorithmNeeds,
    Demonstrations,
    InferenceCapabilities,
    InferenceEngine,
    KVMigration,
    MultiVersion,
    Plugin,
    Quantization,
    Scoring,
    Snapshots,
    StalenessPolicy,
    TrainingCapabilities,
    TrainingEngine,
    WeightTransport,
)
from headrace.contract.columns import KNOWN
from headrace.errors import ConfigError, HeadraceError, WiringError
from headrace.validation import Path as KeyPath
from headrace.validation import near_miss

FITS = 64
"""Up to here numbers that divide another are listed."""
ACCURACIES = {"evaluation/greedy_accuracy": "greedy", "evaluation/sampled_accuracy": "sampled"}
"""Metric that may end a phase → the key of ``[evaluation]`` that measures it."""


def check_job(job: Job, *, run_dir: Path | None = None) -> list[Finding]:
    """Everything that is wrong with a job, errors first; without errors it can be wired. ``run_dir``: where it will
    run, when that is not a new folder in ``job.runs``."""
    checker = _Checker(job)
    checker.run()
    checker.errors += check_run_directory(job, run_dir)
    findings = [Finding(severity="error", error=error) for error in checker.errors]
    warnings = [*checker.warnings, *inert_settings(job, checker.needs)]
    findings += [Finding(severity="warning", error=warning) for warning in warnings]
    return list({str(finding): finding for finding in findings}.values())


class _Checker:
    """Gathers errors; a check that needs a plugin which is itself in error is left out."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.plugins = Selections(job)
        self.errors = self.plugins.errors
        self.warnings: list[HeadraceError] = []
        self.needs = [self._needs(selected) for selected in self.plugins.algorithms]
        """Per phase; None where the algorithm is in error."""

    def run(self) -> None:
        unreachable = check_network(self.job)
        self.errors += unreachable
        self.errors += check_room(self.job, self.needs)
        for finding in check_model(self.job, self.plugins):
            (self.errors if finding.severity == "error" else self.warnings).append(finding.error)
        self._rollout_capabilities()
        self.errors += check_instances(self.job, self._inference(self.plugins.rollout))
        self._quantization()
        if not unreachable:
            self._transport()
        trainers = [self._training(selected) for selected in self.plugins.trainers]
        self.errors += check_adapters(self.job, self._inference(self.plugins.rollout), trainers)
        for index, phase in enumerate(self.job.phases):
            self._batch(index, phase)
            self._algorithm(index, phase)
            self._until(index, phase)
            self._interruption(index, phase)
        self._staleness()

    # ------------------------------------------------------------ what plugins declare

    def _needs(self, selected: Selected | None) -> AlgorithmNeeds | None:
        if selected is None or not issubclass(selected.cls, Algorithm):
            return None
        cls = selected.cls
        return self.plugins.ask(selected, "needs", lambda: cls.needs(selected.settings))

    def _training(self, selected: Selected | None) -> TrainingCapabilities | None:
        if selected is None or not issubclass(selected.cls, TrainingEngine):
            return None
        cls = selected.cls
        return self.plugins.ask(selected, "capabilities", lambda: cls.capabilities(selected.settings))

    def _inference(self, selected: Selected | None) -> InferenceCapabilities | None:
        if selected is None or not issubclass(selected.cls, InferenceEngine):
            return None
        cls = selected.cls
        return self.plugins.ask(selected, "capabilities", lambda: cls.capabilities(selected.settings))

    # ------------------------------------------------------------ capabilities

    def _rollout_capabilities(self) -> None:
        rollout = self.plugins.rollout
        declared = self._inference(rollout)
        if rollout and declared:
            self._backed(rollout, "live_versions", declared.live_versions > 1, MultiVersion)
            self._backed(rollout, "scoring", declared.scoring, Scoring)
            self._backed(rollout, "kv_migration", declared.kv_migration, KVMigration)

    def _quantization(self) -> None:
        table, selected = self.job.quantization, self.plugins.quantization
        if table is None or selected is None:
            return
        scheme = selected.cls(selected.settings)
        assert isinstance(scheme, Quantization), "load checks the class"
        kind = self.plugins.ask(selected, "format", lambda: scheme.format.weights)
        engine = self._inference(self.plugins.rollout)
        if kind and engine and kind not in engine.low_bit:
            self._wiring(
                f"{table.spec.use} makes {kind} weights, and inference engine {self.job.rollout.spec.use!r} "
                f"multiplies by {_listed(engine.low_bit)}",
                ("quantization", "scheme"),
                fix="choose a scheme whose weights the engine has, or an engine that has them",
            )
        for index, phase in enumerate(self.job.phases):
            trainer = self._training(self.plugins.trainers[index])
            if kind and table.align and trainer and kind not in trainer.low_bit:
                self._wiring(
                    f"{table.spec.use} makes {kind} weights, and training engine {phase.trainer.use!r} computes with "
                    f"{_listed(trainer.low_bit)}",
                    ("quantization", "align"),
                    ("quantization", "scheme"),
                    fix="set quantization.align = false, which needs a loss that corrects for the mismatch, or choose "
                    "a training engine that has them",
                )

    def _transport(self) -> None:
        selected = self.plugins.weights
        if selected is None or not issubclass(selected.cls, WeightTransport):
            return
        cls, use = selected.cls, selected.spec.use
        able = self.plugins.ask(selected, "capabilities", lambda: cls.capabilities(selected.settings))
        if able is None or one_machine(self.job):
            return
        if reason := out_of_reach(self.job, able):
            self._wiring(
                f"weight transport {use!r} cannot connect the trainer with the engines: {reason}",
                ("weights", "use"),
                ("network", "host"),
                fix=f"leave weights.use out, or set it to one of {', '.join(fitting(self.job))}",
            )
        elif not able.private:
            host = self.job.network.host
            message = f"weight transport {use!r} has neither keys nor encryption, and nodes serve at {host}"
            fix = "leave weights.use out, unless nobody else is on that network"
            self.warnings.append(WiringError(message, origin=self.job.origin(("weights", "use")), fix=fix))

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
        lone = phase.batch.group_size == 1 and not needs.greedy_reward
        if needs.rollout and phase.batch.dynamic_sampling and lone:
            self._config(
                "dynamic sampling drops groups whose rewards are all equal, and those of one member always are",
                *_places(index, "batch", "dynamic_sampling"),
                *_places(index, "batch", "group_size"),
                fix="set batch.group_size to 2 or more, or batch.dynamic_sampling = false",
            )
        environment = self.plugins.environment
        if not needs.rollout and environment and not issubclass(environment.cls, Demonstrations):
            self._wiring(
                f"{phase.algorithm.use} imitates demonstrations, and environment "
                f"{self.job.environment.spec.use!r} has none",
                *_places(index, "algorithm", "use"),
                fix="choose an environment with demonstrations, or an algorithm that learns from rollouts",
            )
        if needs.whole_batch:
            self._whole_batch(index, phase)
        if self.job.stages.processes:
            self._separable(index, phase)
        elif needs.reference_logprobs:
            self._snapshots(index, phase, "reference log-probs", "switch the algorithm's reference term off")
        if needs.values:
            self._critic(index, phase)
        if phase.batch.streaming and phase.batch.mini_batches > 1:
            alone = "set batch.mini_batches = 1, so that no step is taken before the last part"
            if needs.proximal_logprobs:
                self._snapshots(index, phase, "proximal log-probs", alone)
            if needs.values:
                self._snapshots(index, phase, "the values from before the first step", alone)

    def _whole_batch(self, index: int, phase: Phase) -> None:
        """Neither parts of a batch nor groups one by one will do."""
        what = f"{phase.algorithm.use} compares the groups of a batch with one another"
        if phase.batch.streaming:
            self._config(
                f"{what}, and batch.streaming = true has them trained as they come",
                *_places(index, "batch", "streaming"),
                *_places(index, "algorithm", "use"),
                fix="set batch.streaming = false",
            )
        if self.job.stages.processes:
            self._wiring(
                f"{what}, and stages.processes = true has each prepared by itself, in a process of its own",
                ("stages", "processes"),
                *_places(index, "algorithm", "use"),
                fix="set stages.processes = false",
            )

    def _critic(self, index: int, phase: Phase) -> None:
        """It is beside the policy, and its values are the first thing that is computed of a batch."""
        declared = self._training(self.plugins.trainers[index])
        if declared is not None and not declared.values:
            self._wiring(
                f"{phase.algorithm.use} needs a critic, and training engine {phase.trainer.use!r} keeps none",
                *_places(index, "algorithm", "use"),
                fix="choose a training engine with values, or an algorithm that compares the members of a group",
            )
        if self.job.stages.processes:
            self._wiring(
                f"{phase.algorithm.use} compares rewards with the values of a critic, which is the trainer's, and "
                "stages.processes = true has advantages computed elsewhere",
                ("stages", "processes"),
                *_places(index, "algorithm", "use"),
                fix="set stages.processes = false",
            )

    def _separable(self, index: int, phase: Phase) -> None:
        """What an algorithm adds to rows is stored when it runs in a process of its own, and a store knows columns."""
        selected = self.plugins.algorithms[index]
        if selected is None:
            return
        algorithm = selected.cls(selected.settings)
        assert isinstance(algorithm, Algorithm), "load checks the class"
        temperature = self.job.rollout.temperature
        loss = self.plugins.ask(selected, "loss", lambda: algorithm.loss(temperature=temperature))
        own = [column for column in (loss.columns if loss else ()) if column not in KNOWN]
        if own:
            self._wiring(
                f"the loss of {phase.algorithm.use} reads {', '.join(own)}, which only its own process could know: "
                "stages.processes = true has it add columns elsewhere",
                ("stages", "processes"),
                fix="set stages.processes = false",
            )

    def _snapshots(self, index: int, phase: Phase, which: str, instead: str) -> None:
        trainer = self.plugins.trainers[index]
        declared = self._training(trainer)
        if trainer is None or declared is None:
            return
        if not declared.snapshots:
            self._wiring(
                f"{phase.algorithm.use} needs {which}, and training engine {phase.trainer.use!r} "
                "keeps no snapshots of its weights",
                *_places(index, "algorithm", "use"),
                fix=f"{instead}, or choose a training engine with snapshots",
            )
        self._backed(trainer, "snapshots", declared.snapshots, Snapshots)

    # ------------------------------------------------------------ numbers

    def _batch(self, index: int, phase: Phase) -> None:
        batch = phase.batch
        rows = batch.groups if batch.streaming else batch.groups * batch.group_size
        if rows % batch.mini_batches:
            fits = [str(n) for n in range(1, min(rows, FITS) + 1) if rows % n == 0]
            whole = " of whole groups, as streaming has them" if batch.streaming else ""
            self._config(
                f"{batch.groups} groups of {batch.group_size} cannot be split into {batch.mini_batches} equal "
                f"mini-batches{whole}",
                *_places(index, "batch", "mini_batches"),
                *_places(index, "batch", "groups"),
                fix=f"set mini_batches to one of {', '.join(fits)}, or change groups",
            )
        longest, needs = self.job.rollout.max_new_tokens + 1, self.needs[index]
        if needs is not None and needs.rollout and batch.micro_batch_tokens < longest:
            self._config(
                f"micro_batch_tokens = {batch.micro_batch_tokens} cannot hold one row: an answer may have "
                f"max_new_tokens = {longest - 1}, after a prompt",
                *_places(index, "batch", "micro_batch_tokens"),
                fix=f"set micro_batch_tokens to at least {longest} and the length of a prompt, or lower "
                "rollout.max_new_tokens",
            )

    def _staleness(self) -> None:
        """A policy in error that phases share is in error once, however their batches differ."""
        wrong: list[tuple[type[Plugin], Any]] = []
        for selected, phase in zip(self.plugins.policies, self.job.phases, strict=True):
            if selected and (selected.cls, selected.settings) not in wrong and not self._bound(selected, phase):
                wrong.append((selected.cls, selected.settings))

    def _bound(self, selected: Selected, phase: Phase) -> bool:
        """Whether the policy can work with the phase's batches."""

        def check() -> bool:
            policy = selected.cls(selected.settings)
            assert isinstance(policy, StalenessPolicy), "load checks the class"
            policy.check(batch_groups=phase.batch.groups)
            return True

        return bool(self.plugins.ask(selected, "check", check))

    def _interruption(self, index: int, phase: Phase) -> None:
        """Keys and values of an interrupted answer travel with its state, if only from one version to the next."""
        selected, needs, able = self.plugins.policies[index], self.needs[index], self._inference(self.plugins.rollout)
        if selected is None or needs is None or able is None or able.kv_migration or not needs.rollout:
            return
        policy = selected.cls(selected.settings)
        assert isinstance(policy, StalenessPolicy), "load checks the class"
        interruption = self.plugins.ask(selected, "interruption", lambda: policy.interruption)
        if interruption is not None and interruption.keep_kv:
            self._wiring(
                f"{phase.staleness.use} keeps the keys and values of interrupted answers, and inference engine "
                f"{self.job.rollout.spec.use!r} cannot give them out: it does not declare kv_migration",
                *_places(index, "staleness", "keep_kv"),
                fix="set staleness.keep_kv = false, so that they are computed again",
            )

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

    def _backed(self, selected: Selected, capability: str, declared: bool, base: type) -> None:
        if declared and not issubclass(selected.cls, base):
            self.errors.append(unbacked(selected, capability, base))


def _listed(kinds: Sequence[str]) -> str:
    return f"{', '.join(kinds)} only" if kinds else "no low-bit weights"


def _places(index: int, *path: str) -> Iterator[KeyPath]:
    """Where a key of a phase may be written: in the phase or in the table that phases share."""
    yield ("phase", index, *path)
    yield path
