"""Whether engines work where they live: each is looked for in its interpreter, and then started there and used a little
(:mod:`headrace.testing.smoke`).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.config import Job
from headrace.config.interpreters import check_interpreter
from headrace.engines.known import engine_named, engines
from headrace.engines.setting_up import home, installing, interpreter
from headrace.errors import EngineError, HeadraceError, PluginError
from headrace.registry import PluginSpec

SMOKE = "headrace.testing.smoke"
DEADLINE = 180.0
"""Seconds for a start and the test, which takes ten or less where nothing else is being done."""
TAIL_LINES = 8

Status = Literal["works", "missing", "fails"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Of one engine in one interpreter."""

    role: str
    use: str
    phases: tuple[str, ...]
    """Of the job, that train with it; none for another engine, or without a job."""
    python: str
    status: Status
    """``missing``: the interpreter, headrace or the engine is not there."""
    asked_for: bool = True
    """It has to work; else it is only told that it is not there."""
    found: dict[str, Any] = field(default_factory=dict)
    """What the interpreter has (``python``, ``headrace``, ``contract``, ``versions``), what the engine declares
    (``capabilities``), and what came of it (``start_seconds``, ``seconds``, ``told``); as far as it came."""
    error: HeadraceError | None = None
    commands: tuple[str, ...] = ()
    """That set up what is missing."""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return self.status == "works" or (self.status == "missing" and not self.asked_for)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    spec: PluginSpec
    python: str
    key: str
    """Of the job file, that names the interpreter."""
    phases: tuple[str, ...] = ()
    asked_for: bool = True


def diagnose_installed() -> Iterator[Diagnosis]:
    """Every installed engine, with the settings that it has by itself: where :func:`create` has made an environment for
    it, or else in this interpreter, where it need not be."""
    for listed in engines():
        made = interpreter(home(listed.name))
        spec = PluginSpec(role=listed.role, use=listed.name, directory=os.getcwd())
        key = _KEYS[listed.role]
        if made.exists():
            yield _diagnose(_Asked(spec=spec, python=str(made.absolute()), key=key))
        else:
            yield _diagnose(_Asked(spec=spec, python=sys.executable, key=key, asked_for=False))


def diagnose_job(job: Job) -> Iterator[Diagnosis]:
    """The engines of a job, each with its settings and in its interpreter."""
    yield _diagnose(_asked(job.rollout.spec, job.rollout.python, ()))
    trainers = [(phase.trainer.use, phase.trainer.settings) for phase in job.phases]
    for number, phase in enumerate(job.phases):
        if trainers.index(trainers[number]) == number:
            alike = tuple(job.phases[n].name for n, other in enumerate(trainers) if other == trainers[number])
            yield _diagnose(_asked(phase.trainer, job.trainer.python, alike))


def _asked(spec: PluginSpec, python: str | None, phases: tuple[str, ...]) -> _Asked:
    return _Asked(spec=spec, python=python or sys.executable, key=_KEYS[spec.role], phases=phases)


_KEYS = {"inference_engine": "rollout.python", "training_engine": "trainer.python"}


def _diagnose(asked: _Asked) -> Diagnosis:
    spec, python = asked.spec, asked.python
    try:
        check_interpreter(python, spec, {}, origin=spec.origin)
    except HeadraceError as error:
        absent = isinstance(error, PluginError) or shutil.which(python) is None
        commands = _commands(asked) if absent else ()
        return _diagnosis(asked, "missing" if absent else "fails", error=error, commands=commands)
    found, failure = _smoke(python, spec)
    return _diagnosis(asked, "works" if failure is None else "fails", found=found, error=failure)


def _diagnosis(asked: _Asked, status: Status, **more: Any) -> Diagnosis:
    return Diagnosis(
        role=asked.spec.role,
        use=asked.spec.use,
        phases=asked.phases,
        python=asked.python,
        status=status,
        asked_for=asked.asked_for,
        **more,
    )


def _smoke(python: str, spec: PluginSpec) -> tuple[dict[str, Any], HeadraceError | None]:
    """What was found, and what went wrong."""
    with tempfile.TemporaryDirectory(prefix="headrace-doctor-") as folder:
        question, answer, log = (Path(folder) / name for name in ("question.json", "answer.json", "log"))
        told = {"role": spec.role, "use": spec.use, "directory": spec.directory, "settings": spec.settings}
        question.write_text(json.dumps(told, default=str))
        status = _run([python, "-m", SMOKE, str(question), str(answer)], log)
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
        raised = found.pop("error", None)
        tail = "".join(f"\n    | {line}" for line in log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    if raised is not None:
        return found, EngineError(raised["message"], origin=raised["origin"], fix=raised["fix"])
    if status != 0:
        cause = f"did not end in {DEADLINE:.0f} s" if status is None else f"ended with status {status}"
        return found, EngineError(f"the smoke test {cause}", origin=f"its last words{tail}", fix="see what they say")
    return found, None


def _run(command: list[str], log: Path) -> int | None:
    """The exit status; None when it had to be killed. Nothing that it started is left."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _commands(asked: _Asked) -> tuple[str, ...]:
    """What a person would type to have the engine where it is looked for. None for a plugin that is no entry point."""
    name, python = asked.spec.use, Path(asked.python)
    if not any((each.role, each.name) == (asked.spec.role, name) for each in engines()):
        return ()
    listed, setup = engine_named(name)
    try:
        by_hand = tuple(map(shlex.join, installing(python, listed, setup)))
    except PluginError:
        return ()
    create = ["headrace", "env", "create", name]
    there = shutil.which(python) is not None
    if not there and python.is_absolute():
        return (shlex.join([*create, "--dir", str(python.parents[1])]),)
    if there and (setup is None or asked.python != sys.executable):
        return by_hand
    use = ["headrace", "run", "JOB", "--set", f"{asked.key}={interpreter(home(name)).absolute()}"]
    return (shlex.join(create), shlex.join(use))  # its lock would change what this interpreter has
