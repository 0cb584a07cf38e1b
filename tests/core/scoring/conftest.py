"""An environment whose every score runs the code in its task, and pools over it."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from headrace.contract import EnvironmentContext, Episode, Task, VersionSpan
from headrace.services.scoring import ScoringPool

FACTORY = """
import os, sys
from pathlib import Path
from headrace.contract import Environment, Score
from headrace.errors import ConfigError

class Scripted(Environment):
    def start(self, context): self.context = context
    def size(self, split): return None
    def task(self, index, *, split): raise NotImplementedError
    async def run(self, task, session): raise NotImplementedError
    def score(self, task, episode):
        values = {"os": os, "sys": sys, "Path": Path, "Score": Score, "task": task, "episode": episode,
                  "here": Path(self.context.directory), "result": Score(reward=1.0)}
        exec(task.data["code"], values)
        return values["result"]

def make(*, context, code="pass"):
    exec(code, {"os": os, "ConfigError": ConfigError, "here": Path(context.directory)})
    environment = Scripted(None)
    environment.start(context)
    return environment
"""


@asynccontextmanager
async def pools(folder: Path) -> AsyncIterator[Callable[..., ScoringPool]]:
    (folder / "scripted.py").write_text(FACTORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        async with AsyncExitStack() as stack:

            def make(**settings: Any) -> ScoringPool:
                context = EnvironmentContext(model_path="", seed=0, directory=str(folder))
                defaults = {"factory": "scripted:make", "arguments": {}, "workers": 1, "deadline": 60.0}
                made = ScoringPool(**{"python": sys.executable, "context": context, **defaults, **settings})
                stack.push_async_callback(made.close)
                return made

            yield make


@pytest_asyncio.fixture(loop_scope="function")
async def pool(tmp_path: Path) -> AsyncIterator[Callable[..., ScoringPool]]:
    """Make a pool of one worker with a long deadline, unless told otherwise; it is closed at the end."""
    async with pools(tmp_path) as make:
        yield make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ScoringPool]:
    """One started pool for the tests of a module that leave it as it was. They run in the module's event loop."""
    async with pools(tmp_path_factory.mktemp("shared")) as make:
        scoring = make()
        await scoring.start()
        yield scoring


@pytest.fixture
def scripted(tmp_path: Path) -> dict[str, str]:
    """The variables of a process that makes such pools itself, with ``tmp_path`` as their directory."""
    (tmp_path / "scripted.py").write_text(FACTORY)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.fixture
def task() -> Callable[..., Task]:
    """A task that is scored by running ``code``."""
    return lambda code="pass", **data: Task(id="t", data={"code": code, **data})


@pytest.fixture
def episode() -> Episode:
    return Episode(
        tokens=np.array([4, 5, 6], dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0, -1, -2], dtype=np.float32),
        spans=(VersionSpan(version=3, start=1, stop=3),),
        finish_reason="stop",
        text="answer",
    )


@pytest.fixture
def ends() -> Callable[[int], bool]:
    """Whether a process has ended, or does within 20 seconds."""

    def wait(pid: int) -> bool:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([descriptor], [], [], 20.0)[0])
        finally:
            os.close(descriptor)

    return wait
