"""The process that runs foreign reward code: builds the environment, then scores what it is sent.

Invariant: one reply per episode, in order, whatever the reward does short of ending the process: an exception, an
exit, a wrong result and a fork that comes back here are all told apart from a score.
"""

from __future__ import annotations

import faulthandler
import importlib
import math
import os
import re
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from headrace.contract import Environment, Episode, Score, Task
from headrace.errors import ContractError, HeadraceError
from headrace.services.failures import DETAIL_CHARACTERS, excerpt, without_middle
from headrace.services.scoring_messages import Raised, Ready, Scored, ScoringRequest, ScoringSetup, pack, received
from headrace.wire import decode

LOGGED_CHARACTERS = 4 * DETAIL_CHARACTERS
"""Of a traceback in the log; its middle is left out."""

_PACKAGES = re.compile(r"headrace(_\w+)?\.")
"""Headrace's modules; a file beside a job is a module without a package."""


def score_until_closed(socket_fd: int) -> int:
    """Serve one pool over ``socket_fd``. Returns the process's exit code."""
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file, as python starts with
    with socket.socket(fileno=socket_fd) as connection:
        messages = received(connection)
        setup = next(messages, None)
        if setup is None:
            return 0
        environment = _build(decode(setup, ScoringSetup))
        if isinstance(environment, Raised):
            connection.sendall(pack(environment))
            return 1
        connection.sendall(pack(Ready()))
        me = os.getpid()
        for frames in messages:
            request = decode(frames, ScoringRequest)
            reply = _score(environment, request.task, request.episode)
            if os.getpid() != me:
                os._exit(0)  # a reward forked and its child returned: only the parent may answer
            connection.sendall(reply)
            _reap()
    return 0


def _reap() -> None:
    """Let go of children that a reward left behind and that have ended: a thousand answers would leave as many."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _build(setup: ScoringSetup) -> Environment | Raised:
    module, _, name = setup.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
        environment = factory(context=setup.context, **setup.arguments)
    except BaseException as error:  # foreign code may raise anything, SystemExit too; the pool tells the user
        return _raised(error)
    if not isinstance(environment, Environment):
        return _raised(ContractError(f"{setup.factory} gave {type(environment).__name__}, expected an Environment"))
    return environment


def _score(environment: Environment, task: Task, episode: Episode) -> bytes:
    """The reply, packed: what cannot travel is no score either."""
    try:
        return pack(Scored(score=checked_score(environment.score(task, episode), episode)))
    except BaseException as error:  # as in _build; a reward that exits has no score either
        return pack(_raised(error))


def checked_score(score: object, episode: Episode) -> Score:
    """``score`` with plain numbers. ContractError when it is not a Score of numbers, or of another number of turns."""
    if not isinstance(score, Score):
        raise ContractError(f"score() returned {type(score).__name__}, expected a Score", fix="return Score(reward=…)")
    parts: Mapping[str, Any] = score.components
    reward, components = _number(score.reward, "reward"), {str(n): _number(v, n) for n, v in parts.items()}
    if math.isinf(reward):
        raise ContractError(f"score() gave reward {reward}", fix="return a finite reward, or NaN for unscored")
    correct = None if score.correct is None else bool(score.correct)
    turns = () if math.isnan(reward) else tuple(_number(value, "turns") for value in score.turns)
    if turns:
        _check_turns(turns, reward, episode)
    return Score(reward=reward, correct=correct, components=components, turns=turns)


def _check_turns(turns: tuple[float, ...], reward: float, episode: Episode) -> None:
    played = len(episode.turn_ends)
    if len(turns) != played:
        raise ContractError(
            f"score() gave rewards of {len(turns)} turns; the episode has {played}",
            fix="give one number for each run of sampled tokens, or none at all",
        )
    if not math.isclose(math.fsum(turns), reward, rel_tol=1e-6, abs_tol=1e-6):
        raise ContractError(
            f"score() gave reward {reward:g}, and turns that add up to {math.fsum(turns):g}",
            fix="return Score(reward=sum(turns), turns=turns)",
        )


def _number(value: object, name: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # anything that is a number in Python's eyes
    except (TypeError, ValueError):
        raise ContractError(f"score() gave {name} = {value!r:.200}", fix="give a number") from None


def _raised(error: BaseException) -> Raised:
    """What the pool is told; the log gets the whole traceback."""
    with suppress(Exception):  # foreign code may have closed standard error
        print(without_middle("".join(traceback.format_exception(error)), LOGGED_CHARACTERS), file=sys.stderr)
    detail = "".join(traceback.format_exception(type(error), error, _foreign(error)))
    known = error if isinstance(error, HeadraceError) else HeadraceError(_text(error))
    return Raised(
        error=type(error).__name__,
        message=_sendable(known.message),
        origin=_sendable(known.origin),
        fix=_sendable(known.fix),
        detail=_sendable(excerpt(detail)),
    )


def _foreign(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame of the user's own code: what called it helps nobody to correct it. The whole
    of it where no frame is the user's, nothing of it where Headrace itself refuses what the user's code returned."""
    frames = error.__traceback__
    while frames is not None and _PACKAGES.match(frames.tb_frame.f_globals.get("__name__", "")):
        frames = frames.tb_next
    return frames if frames is not None or isinstance(error, HeadraceError) else error.__traceback__


def _text(error: BaseException) -> str:
    """``Class: message``, also of an exception that cannot say its message."""
    return "".join(traceback.format_exception_only(error)).strip()


def _sendable(text: str) -> str:
    """Bounded, and without the halves of characters that a model's bytes may leave in a message."""
    return without_middle(text, DETAIL_CHARACTERS).encode(errors="backslashreplace").decode()
