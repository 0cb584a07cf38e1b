"""A job that cannot work is refused before anything starts: one screen, the place, what is allowed, what to do."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.contract import CONTRACT_VERSION

WriteJob = Callable[..., Path]

PLUGINS = Path(__file__).parents[2] / "small_plugins.py"
SUMS = f'use = "{PLUGINS}:Sums"\nlargest = 9'
BOUNDED = f'policy = "{PLUGINS}:Bounded"\nmax_staleness = 1'
SCRATCH = f'[trainer]\nuse = "{PLUGINS}:Trainer"\nlearning_rate = 0.1'
MODEL = "[model.scratch]\nlayers = 1"
SIZES = """[model.scratch]
architecture = "llama"
alphabet = "0123456789"
hidden_size = 64
layers = 2
intermediate_size = 172
max_length = 64
"""
SCREEN = 24
"""Lines."""

FILES = {
    "mine.py": "def reward(answer):\n    return 1\n",
    "broken.py": "def reward(answer) return 1\n",
    "empty.jsonl": "",
    "torn.jsonl": '{"q": "1", "a": "2"}\n{"q": \n',
    "rows.jsonl": '{"q": "1", "a": "2"}\n',
    "old.py": "from headrace.hooks import Observer, hookimpl\nclass Old(Observer):\n"
    f"    contract_version = {CONTRACT_VERSION + 1}\n    @hookimpl\n    def event(self, event): ...\n",
    "bare/python": "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'headrace'\" >&2\nexit 1\n",
}

Mistake = tuple[list[tuple[str, str]], str, str, str]
"""Replacements in the small job; then what must be read: the place, what is allowed or wrong, what to do."""


def jsonl(keys: str) -> tuple[str, str]:
    return SUMS, f'use = "jsonl"\nevaluation_share = 0.0\nprompt = "{{q}}"\nanswer = "{{a}}"\n{keys}'


def torch(keys: str) -> list[tuple[str, str]]:
    return [(MODEL, SIZES + keys), (SCRATCH, '[trainer]\nuse = "torch"')]


MISTAKES: dict[str, Mistake] = {
    "unknown_key": (
        [("groups = 8", "group = 8")],
        "[batch] group = 8",
        "known here: group_size, groups, micro_batch_tokens, mini_batches. Did you mean 'groups'?",
        "rename it to groups",
    ),
    "wrong_type": (
        [("groups = 8", 'groups = "8"')],
        '[batch] groups = "8"',
        "should be a valid integer",
        "write a whole number, without quotes",
    ),
    "wrong_choice": (
        [(SCRATCH, '[trainer]\nuse = "torch"\noptimizer = "sgdx"')],
        '[trainer] optimizer = "sgdx"',
        "should be 'adamw' or 'muon'",
        "choose one of adamw, muon",
    ),
    "near_choice": (
        [(SCRATCH, '[trainer]\nuse = "torch"\noptimizer = "adam"')],
        '[trainer] optimizer = "adam"',
        "should be 'adamw' or 'muon'",
        "did you mean 'adamw'?",
    ),
    "unknown_plugin": (
        [(SUMS, 'use = "sort_symbol"')],
        '[environment] use = "sort_symbol"',
        "installed: jsonl, reasoning_gym, sort_symbols. Did you mean 'sort_symbols'?",
        'set use = "sort_symbols"',
    ),
    "unknown_policy": (
        [(BOUNDED, 'policy = "multi_versions"')],
        '[staleness] policy = "multi_versions"',
        "no staleness policy named 'multi_versions'; installed: multi_version, synchronous",
        'set policy = "multi_version"',
    ),
    "impossible_pair": (
        [(":Trainer", ":PlainTrainer")],
        "[model.scratch]",
        "cannot create a model from scratch",
        'write path = "FOLDER"',
    ),
    "no_demonstrations": (
        [(":Relative", ":Imitation"), (SUMS, f'use = "{PLUGINS}:Riddles"')],
        "[algorithm] use",
        "imitates demonstrations",
        "choose an environment with demonstrations",
    ),
    "bound_that_deadlocks": (
        [(BOUNDED, 'policy = "multi_version"\nmax_staleness = 2\noutstanding_batches = 0.5')],
        "[staleness] outstanding_batches = 0.5",
        "outstanding_batches = 0.5 < 1",
        "at least 1",
    ),
    "bound_that_overshoots": (
        [(BOUNDED, 'policy = "multi_version"\nmax_staleness = 2\noutstanding_batches = 3')],
        "[staleness] outstanding_batches = 3",
        "max(max_staleness, 1)",
        "at most 2, or raise max_staleness",
    ),
    "lag_of_the_synchronous_policy": (
        [(BOUNDED, "max_staleness = 1")],
        "[staleness] max_staleness = 1",
        "it is 0 by definition",
        'set policy = "multi_version"',
    ),
    "missing_model": (
        [(MODEL, '[model]\npath = "gone"')],
        '[model] path = "gone"',
        "expected a Hugging Face-format folder",
        "relative to the job file",
    ),
    "missing_plugin_file": (
        [(SUMS, 'use = "./gone.py:Gone"')],
        "[environment] use",
        "there is no Python file",
        "starts at the job file's folder",
    ),
    "missing_reward_file": (
        [jsonl('path = "rows.jsonl"\nreward = "./gone.py:reward"')],
        '[environment] reward = "./gone.py:reward"',
        "there is no reward file",
        "starts at the job file's folder",
    ),
    "missing_reward_function": (
        [jsonl('path = "rows.jsonl"\nreward = "./mine.py:reword"')],
        '[environment] reward = "./mine.py:reword"',
        "it defines: reward. Did you mean 'reward'?",
        "./mine.py:reward",
    ),
    "reward_with_a_syntax_error": (
        [jsonl('path = "rows.jsonl"\nreward = "./broken.py:reward"')],
        '[environment] reward = "./broken.py:reward"',
        "SyntaxError",
        "run the file with python",
    ),
    "missing_data": (
        [jsonl('path = "gone.jsonl"')],
        '[environment] path = "gone.jsonl"',
        "there is no data file",
        "starts at the job file's folder",
    ),
    "empty_data": (
        [jsonl('path = "empty.jsonl"')],
        '[environment] path = "empty.jsonl"',
        "has no records",
        "write one JSON object per line",
    ),
    "torn_data": (
        [jsonl('path = "torn.jsonl"')],
        "torn.jsonl:2",
        "not a record",
        "write one JSON object per line",
    ),
    "data_without_the_field": (
        [(SUMS, 'use = "jsonl"\nevaluation_share = 0.0\npath = "rows.jsonl"\nprompt = "{question}"\nanswer = "{a}"')],
        'prompt = "{question}", at ',
        "which this record lacks; it has q, a",
        "write {field}",
    ),
    "unknown_data_set": (
        [(SUMS, 'use = "reasoning_gym"\ndataset = "chain_sums"')],
        '[environment] dataset = "chain_sums"',
        "Did you mean 'chain_sum'?",
        "choose one of: ab, acre, ",
    ),
    "wrong_data_set_config": (
        [(SUMS, 'use = "reasoning_gym"\ndataset = "chain_sum"\nconfig = { terms = 2 }')],
        "[environment.config]",
        "unexpected keyword argument 'terms'",
        "chain_sum has min_terms, max_terms",
    ),
    "heads_that_do_not_divide": (
        torch("heads = 3\n"),
        "[model.scratch] heads = 3",
        "hidden_size 64 is not an even number for each of 3 heads",
        "multiple of 6",
    ),
    "kv_heads_that_do_not_divide": (
        torch("heads = 4\nkv_heads = 3\n"),
        "[model.scratch] kv_heads = 3",
        "4 heads cannot share 3 kv_heads",
        "1, 2, 4",
    ),
    "unknown_size": (
        torch("heads = 4\nlayer = 2\n"),
        "[model.scratch] layer = 2",
        "Did you mean 'layers'?",
        "rename it to layers",
    ),
    "group_of_one": (
        [("group_size = 4", "group_size = 1")],
        "[batch] group_size = 1",
        "must be at least 2, it is 1",
        "to 2 or more",
    ),
    "temperature_zero": (
        [("max_new_tokens = 8", "max_new_tokens = 8\ntemperature = 0")],
        "[rollout] temperature = 0",
        "should be greater than 0",
        "evaluation samples greedily without being told",
    ),
    "batch_not_divisible": (
        [("mini_batches = 2", "mini_batches = 3")],
        "[batch] mini_batches = 3",
        "8 groups cannot be split into 3 equal",
        "one of 1, 2, 4, 8",
    ),
    "no_interpreter": (
        [("max_new_tokens", 'python = "./gone/python"\nmax_new_tokens')],
        "[rollout] python",
        "is not there",
        "give a path relative to the job file",
    ),
    "interpreter_without_headrace": (
        [("max_new_tokens", 'python = "./bare/python"\nmax_new_tokens')],
        "[rollout] python",
        "No module named 'headrace'",
        "bare/python -m pip install headrace==",
    ),
    "other_contract_version": (
        [("observers = []", 'observers = ["./old.py:Old"]')],
        "./old.py:Old",
        f"contract version {CONTRACT_VERSION + 1}, this is {CONTRACT_VERSION}",
        "install the plugin's release",
    ),
    "unwritable_runs": (
        [("steps = 10", 'steps = 10\nruns = "mine.py"')],
        '[job] runs = "mine.py"',
        "mine.py is not a folder",
        "choose another place",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the job is, with files to be wrong about; also the working directory."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "bare" / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def present(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def refused(job: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What is printed by a run that must be refused without a trace."""
    before = present(job.parent)
    assert main(["run", str(job), *options]) == 2
    assert present(job.parent) == before
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert sum(1 + len(line) // 100 for line in printed.err.splitlines()) <= SCREEN
    return printed.err[printed.err.index("Error: ") :]  # warnings come first


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_its_place_what_is_allowed_and_what_to_do(
    name: str, folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    replacements, place, allowed, fix = MISTAKES[name]
    text = refused(write_job(*replacements), capsys)
    message, _, rest = text.partition("\n  from: ")
    origin, _, advice = rest.partition("\n  fix:  ")
    assert allowed in message
    assert place in origin
    assert fix in advice
    assert text.count("\n  from: ") == 1, "one mistake is one error"


def test_a_missing_extra_is_refused_with_the_command_that_brings_it(
    folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace import registry

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(registry, "version", version)
    text = refused(write_job((f'use = "{PLUGINS}:Engine"', 'use = "torch"')), capsys)
    assert "inference_engine 'torch' needs " in text
    assert re.search(r"torch>=[\d.]+, which is not installed", text)
    assert '[rollout] use = "torch"' in text
    assert 'pip install "headrace[torch]"' in text


def test_a_run_directory_that_cannot_be_made_is_refused_even_where_the_jobs_own_could(
    folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(write_job(), capsys, "--run-dir", "mine.py/run")
    assert "no run directory can be made" in text
    assert "from: --run-dir" in text


def test_a_run_directory_of_another_run_is_refused(
    folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(write_job(), capsys, "--run-dir", "bare")
    assert "run directory bare is not empty" in text
    assert "name a new directory" in text
