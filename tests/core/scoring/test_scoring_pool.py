"""Every episode gets one outcome, whatever a reward does, and costs no other its own."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Episode, Score, Task
from headrace.errors import ConfigError, ContractError, RunError
from headrace.services import scoring_process
from headrace.services.scoring import ScoringFailure, ScoringPool

Pool = Callable[..., ScoringPool]
MakeTask = Callable[..., Task]

in_module_loop = pytest.mark.asyncio(loop_scope="module")


def told(outcome: object) -> object:
    """A score's reward, or a failure's (reason, kind)."""
    return outcome.reward if isinstance(outcome, Score) else (outcome.reason, outcome.kind)  # type: ignore[attr-defined]


@in_module_loop
async def test_a_score_arrives_with_its_parts(shared: ScoringPool, task: MakeTask, episode: Episode) -> None:
    code = """
import numpy as np
assert episode.tokens.tolist() == [4, 5, 6] and episode.tokens.dtype == np.int32
assert episode.loss_mask.tolist() == [False, True, True] and episode.spans[0].version == 3
assert task.data["record"] == {"list": [1, 2.5, None]}
result = Score(reward=np.float32(0.5), correct=np.bool_(True), components={"length": len(episode.text), "half": 0.5})
"""
    score = await shared.score(task(code, record={"list": [1, 2.5, None]}), episode)
    assert score == Score(reward=0.5, correct=True, components={"length": 6.0, "half": 0.5})


async def test_outcomes_keep_the_order_and_a_failure_touches_no_other(
    pool: Pool, task: MakeTask, episode: Episode
) -> None:
    scoring = pool(workers=2)
    await scoring.start()
    tasks = [task(f"result = Score(reward={i})") for i in range(40)]
    tasks[3], tasks[9], tasks[20] = task("{}['key']"), task("os._exit(7)"), task("sys.exit('enough')")
    outcomes = [told(o) for o in await scoring.score_many([(t, episode) for t in tasks])]
    expected: list[object] = [float(i) for i in range(40)]
    expected[3], expected[9], expected[20] = (
        ("KeyError", "exception"),
        ("crash", "crash"),
        ("SystemExit", "exception"),
    )
    assert outcomes == expected


async def test_a_failure_says_what_happened_and_last_words_reach_the_log(
    pool: Pool, task: MakeTask, episode: Episode, tmp_path: Path
) -> None:
    scoring = pool(deadline=2.0, log_path=str(tmp_path / "scoring.log"))
    await scoring.start()
    for code, detail in [
        ("raise ValueError('no digits')", "ValueError: no digits"),
        ("import ctypes; ctypes.string_at(0)", "the scoring process ended: killed by SIGSEGV"),
        ("while True: pass", "no score within 2 s"),
    ]:
        with pytest.raises(ScoringFailure, match=detail):
            await scoring.score(task(code), episode)
    assert "Fatal Python error: Segmentation fault" in (tmp_path / "scoring.log").read_text()


async def test_a_failure_shows_the_users_frames_and_the_log_has_all(
    pool: Pool, task: MakeTask, episode: Episode, tmp_path: Path
) -> None:
    scoring = pool(log_path=str(tmp_path / "scoring.log"))
    await scoring.start()
    with pytest.raises(ScoringFailure) as raised:
        await scoring.score(task("{}['key']"), episode)
    assert "scorer.py" not in raised.value.detail
    with pytest.raises(ScoringFailure) as long:
        await scoring.score(task("raise RuntimeError('boo ' * 5000)"), episode)
    assert long.value.detail.count("  File ") == 2
    assert "\nRuntimeError: boo boo" in long.value.detail
    assert raised.value.detail.count("  File ") == 2, "the environment's score, and the code that it runs"
    with pytest.raises(ScoringFailure) as refused:
        await scoring.score(task("result = None"), episode)
    assert refused.value.detail.startswith("headrace.errors.ContractError: score() returned NoneType")
    await scoring.close()
    log = (tmp_path / "scoring.log").read_text()
    assert log.count("scorer.py") >= 2
    assert "KeyError: 'key'" in log


@in_module_loop
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("result = Score(reward=float('nan'))", ("unscored", "unscored")),
        ("result = None", ("ContractError", "exception")),
        ("result = 1.0", ("ContractError", "exception")),
        ("result = Score(reward=None)", ("ContractError", "exception")),
        ("result = Score(reward=float('inf'))", ("ContractError", "exception")),
        ("result = Score(reward=1.0, components={'part': 'x'})", ("ContractError", "exception")),
        ("raise KeyboardInterrupt", ("KeyboardInterrupt", "exception")),
        ("def deeper(): deeper()\ndeeper()", ("RecursionError", "exception")),
        ("raise ValueError('x' * 10_000_000)", ("ValueError", "exception")),
        ("raise ValueError('\\ud800')", ("ValueError", "exception")),
        ("raise type('Mute', (Exception,), {'__module__': 'm', '__str__': lambda self: 1 / 0})", ("Mute", "exception")),
        ("result = Score(reward=1.0, components={'\\ud800': 1.0})", ("UnicodeEncodeError", "exception")),
        ("os.close(1); os.close(2); print('gone')", ("OSError", "exception")),
        ("[os.close(d) for d in range(3, 64) if os.path.exists(f'/proc/self/fd/{d}')]", ("crash", "crash")),
        ("sys.stdin.read()", 1.0),
        ("os.fork()", 1.0),
    ],
)
async def test_every_misbehaviour_has_its_outcome_and_the_next_episode_its_score(
    shared: ScoringPool, task: MakeTask, episode: Episode, code: str, outcome: object
) -> None:
    results = await shared.score_many([(task(code), episode), (task("result = Score(reward=2.0)"), episode)])
    assert [told(r) for r in results] == [outcome, 2.0]


@in_module_loop
async def test_what_cannot_travel_costs_only_its_own_score(
    shared: ScoringPool, task: MakeTask, episode: Episode
) -> None:
    results = await shared.score_many([(task(odd=object()), episode), (task(), episode)])
    assert [told(r) for r in results] == [("TypeError", "exception"), 1.0]


async def test_output_goes_to_the_log_up_to_a_bound(
    pool: Pool, task: MakeTask, episode: Episode, tmp_path: Path
) -> None:
    log = tmp_path / "scoring.log"
    scoring = pool(log_path=str(log))
    await scoring.start()
    noisy = "print('a first line')\nfor _ in range(64): print('x' * 2**20)\nprint('the end', file=sys.stderr)"
    assert told(await scoring.score(task(noisy), episode)) == 1.0
    assert told(await scoring.score(task(), episode)) == 1.0
    await scoring.close()
    written = log.read_bytes()
    assert written.startswith(b"a first line\nxxx")
    assert written.endswith(b"[the log is full: further output of scoring workers is dropped]\n")
    assert len(written) < 4.1 * 2**20


async def test_a_cancelled_caller_has_its_waiting_episodes_withdrawn(
    pool: Pool, task: MakeTask, episode: Episode, tmp_path: Path
) -> None:
    for gate in ("begun", "go on"):
        os.mkfifo(tmp_path / gate)
    scoring = pool()
    await scoring.start()
    note = "(here / 'done').open('a').write({!r})"
    first = task("(here / 'begun').open('w').close()\n(here / 'go on').read_bytes()\n" + note.format("first "))
    caller = asyncio.create_task(scoring.score_many([(first, episode), (task(note.format("never ")), episode)]))
    await asyncio.to_thread((tmp_path / "begun").read_bytes)  # returns when the first is being scored
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.to_thread((tmp_path / "go on").write_bytes, b"")
    await scoring.score(task(note.format("last")), episode)
    assert (tmp_path / "done").read_text() == "first last"


async def test_closing_gives_waiting_episodes_an_outcome(
    pool: Pool, task: MakeTask, episode: Episode, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "gate")
    scoring = pool()
    await scoring.start()
    loop = task("(here / 'gate').open('w').close()\nwhile True: pass")
    caller = asyncio.create_task(scoring.score_many([(loop, episode), (task(), episode)]))
    await asyncio.to_thread((tmp_path / "gate").read_bytes)
    await scoring.close()
    await scoring.close()
    assert [told(o) for o in await caller] == [("closed", "crash")] * 2
    with pytest.raises(ValueError, match="not running"):
        await scoring.score(task(), episode)


async def test_a_worker_that_cannot_be_replaced_fails_episodes_instead_of_holding_them(
    pool: Pool, task: MakeTask, episode: Episode, tmp_path: Path
) -> None:
    (tmp_path / "data").touch()
    scoring = pool(arguments={"code": "if not (here / 'data').exists(): raise ConfigError('the data is gone')"})
    await scoring.start()
    with pytest.raises(ScoringFailure, match="ConfigError: no worker: the data is gone"):
        await scoring.score(task("(here / 'data').unlink(); os.kill(os.getpid(), 9)"), episode)
    (tmp_path / "data").touch()
    # The replacement that was tried before the data came back may still fail one episode, but no second.
    outcomes = [await scoring.score_many([(task(), episode)]) for _ in range(2)]
    assert told(outcomes[1][0]) == 1.0


async def test_an_environment_that_cannot_start_raises_its_own_error(pool: Pool) -> None:
    code = "raise ConfigError('no such file', origin='job.toml:3', fix='write it')"
    with pytest.raises(ConfigError, match="no such file") as caught:
        await pool(workers=2, arguments={"code": code}).start()
    assert (caught.value.origin, caught.value.fix) == ("job.toml:3", "write it")


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("{}['x']", ContractError, "could not start: KeyError: 'x'"),
        ("os._exit(9)", RunError, r"ended \(exit code 9\) before its environment was started"),
        ("while True: pass", RunError, "said nothing for 1 s before its environment was started"),
    ],
)
async def test_a_failing_start_says_how(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, code: str, error: type[Exception], message: str
) -> None:
    if "while" in code:
        monkeypatch.setattr(scoring_process, "START_DEADLINE", 1.0)
    with pytest.raises(error, match=message):
        await pool(arguments={"code": code}).start()


async def test_a_missing_interpreter_is_named(pool: Pool) -> None:
    with pytest.raises(RunError, match=r"could not be started: .*no-python"):
        await pool(python="/no-python").start()


async def test_a_factory_that_gives_no_environment_breaks_the_contract(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def make(*, context): return 3")
    with pytest.raises(ContractError, match="wrong:make gave int, expected an Environment"):
        await pool(factory="wrong:make").start()


def test_impossible_sizes_are_refused(pool: Pool) -> None:
    for settings in ({"workers": 0}, {"deadline": 0.0}, {"deadline": math.nan}):
        with pytest.raises(ValueError, match="workers >= 1 and deadline > 0"):
            pool(**settings)


@in_module_loop
async def test_long_episodes_pass_whole(shared: ScoringPool, task: MakeTask) -> None:
    length = 1 << 20
    long = Episode(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, dtype=bool),
        logprobs=np.zeros(length, dtype=np.float32),
        spans=(),
        finish_reason="length",
    )
    score = await shared.score(task("result = Score(reward=int(episode.tokens[-1]))"), long)
    assert score.reward == length - 1


@in_module_loop
async def test_children_that_a_reward_left_behind_are_let_go_when_they_have_ended(
    shared: ScoringPool, task: MakeTask, episode: Episode
) -> None:
    forks = "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)"
    counts = (
        "me = os.getpid()\n"
        "result = Score(reward=float(len(Path(f'/proc/{me}/task/{me}/children').read_text().split())))"
    )
    results = await shared.score_many([(task(forks), episode), (task(counts), episode)])
    assert [told(r) for r in results] == [1.0, 0.0]


async def test_an_episode_whose_worker_was_killed_is_scored_once_more_and_the_loss_is_told(
    pool: Pool, task: MakeTask, episode: Episode, tmp_path: Path
) -> None:
    lost: list[str] = []
    scoring = pool(lost=lost.append)
    await scoring.start()
    for pid in ("os.getpid()", "os.getppid()"):  # the scorer's, and its guard's
        mark = f"mark = here / '{pid}'\nif not mark.exists():\n    mark.touch()\n"
        once = f"{mark}    os.kill({pid}, 9)\n    while True: pass"
        assert told(await scoring.score(task(once), episode)) == 1.0
    assert lost == ["the scoring process ended: killed by SIGKILL"] * 2
    with pytest.raises(ScoringFailure, match="killed by SIGKILL"):
        await scoring.score(task("os.kill(os.getpid(), 9)"), episode)
    assert len(lost) == 4


async def test_the_loss_of_a_worker_that_was_stopped_and_did_not_answer_is_told_once(
    pool: Pool, task: MakeTask, episode: Episode
) -> None:
    lost: list[str] = []
    scoring = pool(deadline=2.0, lost=lost.append)
    await scoring.start()
    with pytest.raises(ScoringFailure, match="no score within 2 s"):
        await scoring.score(task("import signal; os.kill(os.getpid(), signal.SIGSTOP)"), episode)
    assert told(await scoring.score(task(), episode)) == 1.0
    assert lost == ["no score within 2 s ([environment] scoring_deadline)"]


@pytest.mark.parametrize("end", ["os._exit(3)", "os.abort()"])
async def test_an_episode_that_ends_its_worker_by_itself_is_not_scored_again(
    pool: Pool, task: MakeTask, episode: Episode, end: str
) -> None:
    lost: list[str] = []
    scoring = pool(lost=lost.append)
    await scoring.start()
    with pytest.raises(ScoringFailure, match="the scoring process ended"):
        await scoring.score(task(end), episode)
    assert len(lost) == 1


@pytest.mark.parametrize("fails", ["1 / 0", "os.kill(os.getpid(), 9)"])
async def test_a_failure_is_told_before_the_rest_is_scored(
    pool: Pool, task: MakeTask, episode: Episode, tmp_path: Path, fails: str
) -> None:
    os.mkfifo(tmp_path / "gate")
    scoring = pool()
    await scoring.start()
    told_early = asyncio.Event()
    waits = task("(here / 'gate').open().read()")
    caller = asyncio.create_task(
        scoring.score_many([(task(fails), episode), (waits, episode)], failed=lambda failure: told_early.set())
    )
    await told_early.wait()
    assert not caller.done()
    await asyncio.to_thread((tmp_path / "gate").write_bytes, b"")
    assert told((await caller)[1]) == 1.0
