from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace.contract import NodeLaunch, NodeProcess, NoSettings
from headrace.errors import PluginError, RunError
from headrace_launchers.local import LocalLauncher

Launch = Callable[..., Awaitable[NodeProcess]]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


async def soon(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    """Until the condition holds. Starting interpreters on a busy machine takes its time; dying does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.002)


def numbers(path: Path) -> list[int]:
    """Whole lines of a file of numbers; none when it is not there yet."""
    return [int(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    async def start(code: str, **options: str) -> NodeProcess:
        return await LocalLauncher(NoSettings()).launch(
            NodeLaunch(
                name="node",
                python=options.pop("python", sys.executable),
                arguments=("-c", textwrap.dedent(code)),
                environment=options,
                log_path=str(tmp_path / "node.log"),
            )
        )

    return start


async def test_a_node_s_output_goes_to_its_log_and_its_status_is_reported(launch: Launch, tmp_path: Path) -> None:
    code = """
        import os, sys
        print("out", os.environ["SETTING"], os.environ["PATH"] != "", flush=True)
        print("err", file=sys.stderr)
        sys.exit(7)
    """
    for _ in range(2):
        node = await launch(code, SETTING="value")
        assert await node.wait() == 7
        assert await node.wait() == 7
    assert (tmp_path / "node.log").read_text() == "out value True\nerr\n" * 2


async def test_a_node_leads_a_session_of_its_own_and_reads_nothing(launch: Launch, tmp_path: Path) -> None:
    node = await launch("import os, sys; print(os.getsid(0), os.getpid(), repr(sys.stdin.read()))")
    assert await node.wait() == 0
    session, pid, text = (tmp_path / "node.log").read_text().split()
    assert int(session) == int(pid) == node.pid
    assert text == "''"


async def test_terminate_and_kill_reach_everything_the_node_started(launch: Launch, tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(os.getpid(), child.pid, sep="\\n", flush=True)
        time.sleep(600)
    """
    for end, status in (("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL)):
        (tmp_path / "node.log").unlink(missing_ok=True)
        node = await launch(code)
        await soon(lambda: len(numbers(tmp_path / "node.log")) == 2)
        pids = numbers(tmp_path / "node.log")
        assert all(map(alive, pids))
        getattr(node, end)()
        assert await asyncio.wait_for(node.wait(), 10) == status
        for pid in pids:
            await soon(lambda pid=pid: not alive(pid))  # type: ignore[misc]  # mypy cannot infer a default's type
        node.terminate()
        node.kill()


async def test_a_node_that_ends_by_itself_leaves_nothing_behind(launch: Launch, tmp_path: Path) -> None:
    code = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
    """
    node = await launch(code)
    assert await node.wait() == 0
    (child,) = numbers(tmp_path / "node.log")
    await soon(lambda: not alive(child))


async def test_a_node_that_ignores_terminate_is_ended_by_kill(launch: Launch, tmp_path: Path) -> None:
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(1, flush=True)
        time.sleep(600)
    """
    node = await launch(code)
    await soon(lambda: numbers(tmp_path / "node.log") == [1])
    node.terminate()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(node.wait(), 0.2)
    node.kill()
    assert await node.wait() == -signal.SIGKILL


@pytest.mark.parametrize("python", ["/nowhere/python", "/", "headrace-has-no-such-interpreter"])
async def test_an_interpreter_that_cannot_be_started_is_a_plugin_error_with_a_fix(launch: Launch, python: str) -> None:
    with pytest.raises(PluginError, match=f"node node: the interpreter '{python}' cannot be started") as raised:
        await launch("", python=python)
    assert "`python`" in raised.value.fix


async def test_a_log_that_cannot_be_written_is_a_run_error(tmp_path: Path) -> None:
    node = NodeLaunch(name="node", python=sys.executable, arguments=(), log_path=str(tmp_path / "absent" / "log"))
    with pytest.raises(RunError, match="node node cannot log to"):
        await LocalLauncher(NoSettings()).launch(node)


async def test_the_caller_of_wait_may_give_up(launch: Launch) -> None:
    node = await launch("import time; time.sleep(600)")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(node.wait(), 0.05)
    node.kill()
    assert await node.wait() == -signal.SIGKILL


DRIVER = """
    import asyncio, os, signal, sys
    from headrace.contract import NodeLaunch, NoSettings
    from headrace_launchers.local import LocalLauncher

    async def main():
        nodes = []
        for number in range(3):
            launch = NodeLaunch(name=f"node-{number}", python=sys.executable, arguments=("-c", sys.argv[2]),
                                environment={"PIDS": sys.argv[1]}, log_path=os.devnull)
            nodes.append(await LocalLauncher(NoSettings()).launch(launch))
        print("launched", flush=True)
        await nodes[0].wait()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in a shell's background ignore it
    asyncio.run(main())
"""

NODE = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    scorer = ("import os, sys, time; from headrace.process import die_with_parent; die_with_parent(int(sys.argv[1]));"
              "open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\\\n'); time.sleep(600)")
    subprocess.Popen([sys.executable, "-c", scorer, str(os.getpid())])
    open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\n")
    time.sleep(600)
"""


async def driver(pids: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(DRIVER),
        str(pids),
        textwrap.dedent(NODE),
        stdout=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_no_child_and_no_grandchild_survives_the_launcher_s_process(tmp_path: Path, number: int) -> None:
    pids = tmp_path / "pids"
    process = await driver(pids)
    await soon(lambda: len(numbers(pids)) == 6)
    assert all(map(alive, numbers(pids)))
    process.send_signal(number)
    await process.communicate()
    await soon(lambda: not any(map(alive, numbers(pids))), seconds=10)


async def test_a_half_started_node_dies_with_the_launcher_s_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = await driver(pids)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"launched\n"
    group = [int(p) for p in os.listdir("/proc") if p.isdigit() and parent(int(p)) == process.pid]
    assert len(group) == 3
    process.kill()
    await process.communicate()
    await soon(lambda: not any(map(alive, [*group, *numbers(pids)])), seconds=10)


def parent(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


async def test_a_process_whose_parent_is_gone_already_ends_when_it_asks() -> None:
    code = "from headrace.process import die_with_parent; die_with_parent(1 << 22); print('lived')"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert out == b""
    assert process.returncode == -signal.SIGKILL
