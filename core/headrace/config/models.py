"""Whether the job's model and the roles that use it fit, before it is made or loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.config.findings import Finding
from headrace.config.schema import Job
from headrace.config.selections import Selected, Selections
from headrace.contract import Environment, InferenceEngine, ModelFacts, ScratchModels, TaskLengths, TrainingEngine
from headrace.errors import ConfigError, ContractError, HeadraceError, WiringError


def check_model(job: Job, plugins: Selections) -> list[Finding]:
    """Says what is wrong with the model, or else where it does not fit its users. What a plugin raises is noted by
    ``plugins``."""
    try:
        facts = _scratch(job, plugins) if job.model.path is None else _folder(job, Path(job.model.path))
    except HeadraceError as error:
        return [Finding(severity="error", error=error)]
    if facts is None:
        return []
    _ask_engine(plugins, facts)
    tasks = _ask_environment(plugins, facts)
    errors = [Finding(severity="error", error=error) for error in _lengths(job, plugins, facts, tasks)]
    return [*errors, *_answers(job, tasks)]


def _scratch(job: Job, plugins: Selections) -> ModelFacts | None:
    trainer, origin = plugins.trainers[0], job.origin(("model", "scratch"))
    if trainer is None or not issubclass(trainer.cls, TrainingEngine):
        return None
    cls = trainer.cls
    declared = plugins.ask(trainer, "capabilities", lambda: cls.capabilities(trainer.settings))
    if declared is None:
        return None
    if not declared.scratch:
        raise WiringError(
            f"training engine {trainer.spec.use!r} cannot create a model from scratch",
            origin=origin,
            fix='write path = "FOLDER" of an existing model in [model]',
        )
    if not issubclass(cls, ScratchModels):
        raise unbacked(trainer, "scratch", ScratchModels)

    def ask() -> ModelFacts | None:
        return cls.check_model(job.model.scratch or {}, origin=lambda key: job.origin(("model", "scratch", key)))

    return plugins.ask(trainer, "check_model", ask)


def _folder(job: Job, path: Path) -> ModelFacts:
    """What an existing model's own configuration says."""
    origin = job.origin(("model", "path"))
    try:
        config: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
        problem = "" if isinstance(config, dict) else "is not that of a model: its config.json holds no object"
    except OSError as error:
        lacks = f"has no config.json that can be read: {error.strerror}"
        problem = lacks if path.is_dir() else "is not a folder"
    except ValueError as error:
        problem = f"has a config.json that is not JSON: {error}"
    if problem:
        raise ConfigError(
            f"model path {path} {problem}; expected a Hugging Face-format folder",
            origin=origin,
            fix="give a folder relative to the job file, or make a fresh model with [model.scratch]" + _hint(job, path),
        )
    length = config.get("max_position_embeddings")
    return ModelFacts(origin=origin, path=str(path), max_length=length if isinstance(length, int) else None)


def _hint(job: Job, path: Path) -> str:
    """Where somebody may have written how to get a model that is not there."""
    told = Path(job.directory, "README.md")
    return f"; {told} may say how to get this one" if told.is_file() and not path.exists() else ""


def _ask_engine(plugins: Selections, facts: ModelFacts) -> None:
    selected = plugins.rollout
    if selected is None or not issubclass(selected.cls, InferenceEngine):
        return
    cls = selected.cls

    def ask() -> None:
        cls.check_model(selected.settings, facts, origin=lambda key: plugins.origin(selected, key))

    plugins.ask(selected, "check_model", ask)


def _ask_environment(plugins: Selections, facts: ModelFacts) -> TaskLengths | None:
    selected = plugins.environment
    if selected is None or not issubclass(selected.cls, Environment) or not plugins.lives_here("environment"):
        return None
    cls, directory = selected.cls, selected.spec.directory

    def ask() -> TaskLengths | None:
        return cls.check_model(
            selected.settings, facts, directory=directory, origin=lambda key: plugins.origin(selected, key)
        )

    return plugins.ask(selected, "check_model", ask)


def _lengths(job: Job, plugins: Selections, facts: ModelFacts, tasks: TaskLengths | None) -> Iterator[ConfigError]:
    """Sequences that could never be as long as the job says."""
    selected, model = plugins.rollout, facts.max_length
    if selected is None or not issubclass(selected.cls, InferenceEngine):
        return
    cls = selected.cls
    declared = plugins.ask(selected, "capabilities", lambda: cls.capabilities(selected.settings))
    engine = declared.max_length if declared else None
    if engine and model and engine > model:
        yield ConfigError(
            f"the rollout's longest sequence has {engine} tokens, and the model's {model}",
            origin=job.origin(("rollout", "max_length"), ("rollout",)),
            fix=f"set rollout.max_length to at most {model}, or leave it out",
        )
        return
    limit, wanted = engine or model, job.rollout.max_new_tokens
    whose = "rollout.max_length" if engine else "the model's longest sequence"
    if limit and tasks and tasks.longest_prompt >= limit:
        yield ConfigError(
            f"a prompt of {tasks.longest_prompt} tokens leaves no room for an answer: {whose} has {limit} tokens, "
            f"answer included; the longest prompt is {tasks.longest_text!r}",
            origin=job.origin(("environment",)),
            fix=f"leave out tasks whose prompts have {limit} tokens or more, or allow longer sequences",
        )
    if limit and wanted >= limit:
        yield ConfigError(
            f"max_new_tokens = {wanted} leaves no room for a prompt: {whose} has {limit} tokens, prompt included",
            origin=job.origin(("rollout", "max_new_tokens")),
            fix=f"set max_new_tokens below {limit} by as many tokens as prompts have, or allow longer sequences",
        )


def _answers(job: Job, tasks: TaskLengths | None) -> list[Finding]:
    """Whether an answer as the tasks themselves have it can be given at all."""
    most, shortest = job.rollout.max_new_tokens, tasks.shortest_answer if tasks else None
    if tasks is None or shortest is None or most >= shortest:
        return []
    error = ConfigError(
        f"max_new_tokens = {most} is too few for any of the tasks' own answers: the shortest has {shortest} tokens, "
        f"its end included{', and no other is rewarded' if tasks.exact else ''}",
        origin=job.origin(("rollout", "max_new_tokens")),
        fix=f"set max_new_tokens to at least {shortest}, or choose tasks with shorter answers",
    )
    return [Finding(severity="error" if tasks.exact else "warning", error=error)]


def unbacked(selected: Selected, capability: str, base: type) -> ContractError:
    """A declared capability needs the class that has its methods."""
    return ContractError(
        f"{selected.cls.__name__} declares {capability} without being a {base.__name__}",
        origin=selected.spec.origin,
        fix=f"derive it from headrace.contract.{base.__name__}, or do not declare {capability}",
    )
