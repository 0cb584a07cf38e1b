"""How a command finds the controller of a running run, and speaks with it.

``RUN/controller.json`` says on which host it is, and where its private directory is; addresses and keys are only there,
in a file that no other user can read.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.errors import RunError, WireError
from headrace.run.directory import RunDirectory
from headrace.run.scaling import ANSWER_SECONDS, Scale, ScaleCall
from headrace.services.messages import Message
from headrace.wire import BlockingClient, Network, unlocked, write_private

ACCESS_FILE = "access.json"
ANSWER_DEADLINE = ANSWER_SECONDS + 25.0


class Whereabouts(Message, frozen=True):
    """What anybody may read."""

    host: str
    directory: str
    """The private one."""


class Access(Message, frozen=True):
    """What the run's own user may read."""

    controller: str
    """Address."""
    network: Network


def offer(run: RunDirectory, access: Access) -> None:
    """From now on commands find the controller."""
    directory = access.network.directory
    write_private(Path(directory) / ACCESS_FILE, msgspec.json.encode(access))
    run.controller.write_bytes(msgspec.json.encode(Whereabouts(host=socket.gethostname(), directory=directory)))


def withdraw(run: RunDirectory) -> None:
    """Nobody finds it any more."""
    run.controller.unlink(missing_ok=True)


def scale(path: Path, instances: int, *, tell: Callable[[str], None]) -> list[str]:
    """Have a running run reach so many rollout instances; ``tell`` hears what is under way. Returns who is there then.
    RunError when it cannot be reached, refuses, or an instance could not be started."""
    access = _access(path)
    client = BlockingClient(access.controller, keys=access.network.keys)
    told = ""
    try:
        while True:
            found = client.call(
                "scale",
                ScaleCall(instances=instances),
                reply=Scale,
                deadline=ANSWER_DEADLINE,
                awaiting="the controller to scale the run",
            )
            if found.given_up:
                raise RunError(
                    f"{len(found.instances)} rollout instances are there, {instances} were asked for",
                    origin="\n".join(found.given_up),
                    fix="mend that and ask again; the run goes on with those it has",
                )
            if not found.joining and not found.leaving:
                return found.instances
            under_way = ", ".join([*(f"{n} joins" for n in found.joining), *(f"{n} leaves" for n in found.leaving)])
            if under_way != told:
                tell(under_way)
                told = under_way
    except WireError as error:
        raise _over(path) if unlocked(path / "lock") else error from error
    finally:
        client.close()


def _access(path: Path) -> Access:
    run = RunDirectory(path.resolve())
    if not run.job.is_file():
        raise RunError(
            f"{path} is not the directory of a run: it has no {run.job.name}",
            fix="name the directory that `headrace run` printed",
        )
    if not run.controller.is_file():
        if unlocked(run.path / "lock"):
            raise _over(path)
        raise RunError(f"the run in {path} is starting or ending", fix="ask again when it trains")
    whereabouts = msgspec.json.decode(run.controller.read_bytes(), type=Whereabouts)
    if whereabouts.host != socket.gethostname():
        raise RunError(
            f"the run in {path} is on host {whereabouts.host}, and this is {socket.gethostname()}",
            fix=f"give the command on {whereabouts.host}",
        )
    if unlocked(run.path / "lock"):
        raise _over(path)
    try:
        return msgspec.json.decode((Path(whereabouts.directory) / ACCESS_FILE).read_bytes(), type=Access)
    except OSError as error:
        raise RunError(
            f"the controller of the run in {path} cannot be reached: {error.strerror}",
            origin=whereabouts.directory,
            fix="give the command as the user, and in the container, that runs it",
        ) from error


def _over(path: Path) -> RunError:
    return RunError(
        f"the run in {path} is not running",
        fix=f"`headrace audit {path}` says how it ended; `headrace run --resume {path}` continues one that was stopped",
    )
