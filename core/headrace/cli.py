"""The ``headrace`` command: parses arguments, calls one function, turns errors into text and exit codes.

Invariant: a mistake of the user's never shows a traceback. Rooms are imported when their command is given, so that
``headrace --help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import headrace
from headrace.errors import ConfigError, HeadraceError, PluginError, RunError, StalenessError, WiringError

if TYPE_CHECKING:
    from headrace.config import Job

UNFINISHED, INTERRUPTED = 3, 130
STATUSES = """Exit status: 0 done; 1 a run or an audit failed, or an engine does not work; 2 the job or the command
cannot be run as written; 3 an audit found nothing wrong, in the log of a run that has not ended; 130 interrupted, and
it is said."""
REFUSED = (ConfigError, PluginError, WiringError, StalenessError)
"""Errors of a job that should be changed before it is tried again."""
SCREEN, WIDTH, LONGEST = 24, 100, 600
"""Lines of a screen and characters of a line that errors should fit, and the most characters of one part of one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = command_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except HeadraceError as error:
        print(_text(error), file=sys.stderr)
        return 2 if isinstance(error, REFUSED) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def command_parser() -> argparse.ArgumentParser:
    """Every command with its arguments."""
    parser = argparse.ArgumentParser(prog="headrace", description=headrace.__doc__, epilog=STATUSES)
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = _command(commands, "run", _run, "run a job; its directory is printed and made under runs/")
    _job_arguments(run, optional=True)
    run.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue a run from its newest checkpoint, in its place"
    )
    run.add_argument("--run-dir", type=Path, metavar="DIR", help="directory of this run, instead of a new one")
    _job_arguments(_command(commands, "check", _check, "say what is wrong with a job, without starting anything"))
    graph = _command(commands, "graph", _graph, "show a job's processes, who talks to whom, and each phase's stages")
    _job_arguments(graph)
    graph.add_argument("--svg", type=Path, metavar="FILE", help="draw the phases' stages into this file instead")
    plugins = _command(commands, "plugins", _plugins, "list the installed plugins")
    plugins.add_argument("role", nargs="?", metavar="ROLE", help="only this role's")
    doctor = _command(commands, "doctor", _doctor, "try every installed engine, or those of a job, where it lives")
    _job_arguments(doctor, optional=True)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    env = _command(commands, "env", _create, "make the environment of an engine")
    env.add_argument("action", choices=["create"], help="the one thing that can be done")
    env.add_argument("engine", metavar="ENGINE", help="name of an installed engine, such as vllm")
    env.add_argument("--dir", type=Path, metavar="DIR", help="where, instead of venvs/ENGINE; nothing may be there")
    env.add_argument("--python", default="", metavar="PYTHON", help="the Python that makes it, instead of this one")
    env.add_argument("--lock", type=Path, metavar="FILE", help="requirements file, instead of the one that was tested")
    audit = _command(commands, "audit", _audit, "prove from a run's event log that nothing was lost or trained twice")
    audit.add_argument("run", type=Path, metavar="RUN", help="run directory")
    simulation = _command(commands, "simulate", _simulate, "try a job's policies on a virtual clock")
    _simulation_arguments(simulation)
    simulation.add_argument(
        "--policies", default="", metavar="A,B:K", help="policies to compare, such as synchronous,multi_version:2"
    )
    simulation.add_argument("--instances", type=_positive, metavar="N", help="rollout instances, instead of the job's")
    simulation.add_argument("--gantt", type=Path, metavar="FILE", help="draw what happened into this HTML page")
    plan = _command(commands, "plan", _plan, "divide devices between rollout and trainer by simulation")
    _simulation_arguments(plan)
    plan.add_argument("--devices", type=_positive, required=True, metavar="N", help="of which an instance takes one")
    plan.add_argument(
        "--trainer-devices", type=_positive, default=1, metavar="N", help="on which training costs what is measured (1)"
    )
    report = _command(commands, "report", _report, "write a run's report, one HTML page")
    report.add_argument("run", type=Path, metavar="RUN", help="run directory")
    scale = _command(commands, "scale", _scale, "have a running run reach another number of rollout instances")
    scale.add_argument("run", type=Path, metavar="RUN", help="run directory")
    scale.add_argument("--rollout", type=int, required=True, metavar="N", help="rollout instances there are to be")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    function: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=STATUSES)
    parser.set_defaults(command=function)
    return parser


def _job_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?" if optional else None, help="job file (TOML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="A.B=VALUE",
        help="override a key, for example --set rollout.instances=4 or --set phase.warm-up.steps=10; repeatable",
    )


def _simulation_arguments(parser: argparse.ArgumentParser) -> None:
    _job_arguments(parser)
    parser.add_argument("--phase", metavar="NAME", help="the phase, instead of the last one that rolls out")
    parser.add_argument("--batches", type=_positive, metavar="N", help="training batches to simulate")
    parser.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help="response lengths: lognormal:median=M,sigma=S,cap=C, bimodal:short=S,long=L,share=P, constant:tokens=T, "
        "a file of numbers, or a run directory",
    )
    parser.add_argument("--calibrate", type=Path, metavar="RUN", help="take costs and lengths from this run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return value


def _run(options: argparse.Namespace) -> int:
    if options.resume is not None:
        return _resume(options)
    try:
        job = _checked(options)
        from headrace.run import run_job
    except KeyboardInterrupt:
        print("interrupted before the run began: nothing was started", file=sys.stderr)
        return INTERRUPTED
    return run_job(job, run_dir=options.run_dir)


def _resume(options: argparse.Namespace) -> int:
    if options.job is not None or options.overrides or options.run_dir is not None:
        raise ConfigError(
            "a run is resumed as it was: --resume stands alone", fix=f"headrace run --resume {options.resume}"
        )
    from headrace.run import resume_job

    return resume_job(options.resume, _refuse_faults)


def _check(options: argparse.Namespace) -> int:
    job = _checked(options)
    steps = sum(phase.steps for phase in job.phases)
    print(f"{options.job}: no errors. {job.job.name} has {_count(job.phases, 'phase')} of {steps} batches at most")
    return 0


def _graph(options: argparse.Namespace) -> int:
    job = _checked(options)
    from headrace.graph import describe, draw

    if options.svg is None:
        print(describe(job))
        return 0
    try:
        options.svg.write_text(draw(job), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"the picture cannot be written: {error.strerror or error}",
            origin=f"--svg {options.svg}",
            fix="name a file in a folder that is there and may be written to",
        ) from error
    print(options.svg)
    return 0


def _plugins(options: argparse.Namespace) -> int:
    from headrace.registry import ROLES, listing
    from headrace.validation import near_miss

    if options.role is not None and options.role not in ROLES:
        meant = near_miss(options.role, ROLES)
        hint = f". Did you mean {meant!r}?" if meant else ""
        raise ConfigError(
            f"there is no role {options.role!r}; roles: {', '.join(ROLES)}{hint}", fix="headrace plugins [ROLE]"
        )
    rows = [
        (item.role, item.name, item.target, f"{item.distribution} {item.version}", item.missing)
        for item in listing(options.role)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for role, name, target, distribution, missing in rows:
        cells = (role, name, target, distribution)
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        print(f"{line}  needs {missing}" if missing else line.rstrip())
    if not rows:
        print("no plugin is installed")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from headrace.config import load_job
    from headrace.engines import as_plain, as_text, diagnose_installed, diagnose_job

    if options.job is None and options.overrides:
        raise ConfigError("which job? --set overrides the keys of one", fix="headrace doctor JOB --set A.B=VALUE")
    installed = options.job is None
    found = []
    for diagnosis in diagnose_installed() if installed else diagnose_job(load_job(options.job, options.overrides)):
        found.append(diagnosis)
        if not options.json:
            print(as_text(diagnosis), flush=True)
    well = all(diagnosis.ok for diagnosis in found)
    if options.json:
        print(json.dumps({"ok": well, "engines": [as_plain(diagnosis) for diagnosis in found]}))
    return 0 if well else 1


def _create(options: argparse.Namespace) -> int:
    from headrace.engines import create

    python = create(
        options.engine, directory=options.dir, python=options.python, lock=options.lock, tell=lambda text: print(text)
    )
    print(f'made {python.parents[1]}; a job uses it with python = "{python}" in the table of its engine')
    return 0


def _audit(options: argparse.Namespace) -> int:
    from headrace.observe.audit import audit_run

    result = audit_run(options.run)
    print(result)
    if not result.ok:
        return 1
    return 0 if result.finished else UNFINISHED


def _report(options: argparse.Namespace) -> int:
    from headrace.observe.report import write_report

    print(write_report(options.run))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    job, room = _checked(options), _simulator("simulate")
    policies = [name for name in options.policies.split(",") if name]
    prepared = room.prepare(job, _wishes(room, options, instances=options.instances, policies=policies))
    outcomes = room.simulate(prepared, gantt=options.gantt)
    print(json.dumps(room.as_plain(prepared, outcomes)) if options.json else room.as_text(prepared, outcomes))
    return 0


def _plan(options: argparse.Namespace) -> int:
    job, room = _checked(options), _simulator("plan")
    found = room.plan(job, _wishes(room, options), devices=options.devices, trainer_devices=options.trainer_devices)
    print(json.dumps(room.plan_as_plain(found)) if options.json else room.plan_as_text(found))
    return 0


def _wishes(room: ModuleType, options: argparse.Namespace, **others: Any) -> Any:
    return room.Wishes(
        phase=options.phase, batches=options.batches, lengths=options.lengths, calibrate=options.calibrate, **others
    )


def _simulator(command: str) -> ModuleType:
    try:
        import headrace.simulate
    except ModuleNotFoundError as error:
        if error.name != "simpy":
            raise
        raise PluginError(
            "the simulator's clock is simpy, which is not installed",
            origin=f"headrace {command}",
            fix='pip install "headrace[simulation]"',
        ) from error
    return headrace.simulate


def _scale(options: argparse.Namespace) -> int:
    from headrace.run import scale

    try:
        instances = scale(options.run, options.rollout, tell=lambda text: print(text, file=sys.stderr))
    except KeyboardInterrupt:
        print("what has begun goes on; give the command again to see how it stands", file=sys.stderr)
        return INTERRUPTED
    print(f"{_count(instances, 'rollout instance')}: {', '.join(instances)}")
    return 0


def _checked(options: argparse.Namespace) -> Job:
    """The job, free of errors; its warnings are printed."""
    from headrace.config import load_job

    if options.job is None:
        raise ConfigError("which job? A job file is missing", fix="headrace run JOB, or headrace run --resume RUN")
    job = load_job(options.job, options.overrides)
    _refuse_faults(job, run_dir=getattr(options, "run_dir", None))
    return job


def _refuse_faults(job: Job, run_dir: Path | None = None) -> None:
    """Print a job's warnings and raise its errors."""
    from headrace.config import JobErrors, check_job

    findings = check_job(job, run_dir=run_dir)
    for finding in findings:
        if finding.severity == "warning":
            print(finding, file=sys.stderr)
    if errors := [finding.error for finding in findings if finding.severity == "error"]:
        raise JobErrors(errors)  # one alone too: whoever must act, this job cannot be run as written


def _text(error: HeadraceError) -> str:
    """Errors with their class, which says who acts. Several at once are each introduced by their own."""
    errors: Sequence[HeadraceError] = getattr(error, "errors", ()) or (error,)
    texts: list[str] = []
    room = SCREEN - 1
    for each in errors:
        shown = HeadraceError(_short(each.message), origin=_short(each.origin), fix=_short(each.fix))
        text = f"{type(each).__name__}: {shown}"
        room -= sum(1 + len(line) // WIDTH for line in text.splitlines())
        if texts and room < 0:
            texts.append(f"... and {_count(errors[len(texts) :], 'more error')}, shown when these are mended")
            break
        texts.append(text)
    return "\n".join(texts)


def _short(text: str) -> str:
    """``text`` as a terminal can show it, without its middle when it is long."""
    text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


def _count(items: Sequence[object], name: str) -> str:
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"
