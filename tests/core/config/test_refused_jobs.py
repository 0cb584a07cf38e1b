"""A job that cannot work is refused before anything starts: one screen, the place, what is allowed, what to do."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.contract import CONTRACT_VERSION
from support.refusals import refused, teaches

WriteJob = Callable[..., Path]

PLUGINS = Path(__file__).parents[2] / "small_plugins.py"
SUMS = f'use = "{PLUGINS}:Sums"\nlargest = 9'
BOUNDED = f'policy = "{PLUGINS}:Bounded"\nmax_staleness = 1'
ENGINE = f'use = "{PLUGINS}:Engine"'
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
        "known here: dynamic_sampling, group_size, groups, max_generated_batches, micro_batch_tokens, mini_batches, "
        "streaming. Did you mean 'groups'?",
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
        "no staleness policy named 'multi_versions'; installed: delayed_update, multi_version, partial_rollout, "
        "synchronous, windowed",
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
    "a_key_of_another_policy": (
        [(BOUNDED, 'policy = "synchronous"\noutstanding_batches = 1')],
        "[staleness] outstanding_batches = 1",
        "outstanding_batches is no setting of synchronous; those have it: multi_version, partial_rollout",
        "remove outstanding_batches, or choose one of those",
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
    "a_class_that_is_no_plugin": (
        [(SUMS, 'use = "./plain.py:Thing"')],
        '[environment] use = "./plain.py:Thing"',
        "cannot be the environment: that must be a class derived from headrace.contract.environment.Environment",
        "derive it: class Thing(Environment)",
    ),
    "a_function_that_is_no_plugin": (
        [(SUMS, 'use = "./plain.py:function"')],
        '[environment] use = "./plain.py:function"',
        "must be a class derived from",
        "derive it",
    ),
    "a_module_without_plugins": (
        [(SUMS, 'use = "json:JSONDecoder"')],
        '[environment] use = "json:JSONDecoder"',
        "must be a class derived from",
        "derive it",
    ),
    "a_plugin_of_another_role": (
        [(f'use = "{PLUGINS}:Dictionary"', f'use = "{PLUGINS}:Sums"')],
        "[storage] use",
        "must be a class derived from headrace.contract.storage.Storage",
        "name one that is: Dictionary",
    ),
    "a_plugin_file_that_ends_python": (
        [(SUMS, 'use = "./leaves.py:Thing"')],
        '[environment] use = "./leaves.py:Thing"',
        "cannot be imported: SystemExit: 3",
        "run the file with python",
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
        "such as ab, acre, advanced_geometry. Did you mean 'chain_sum' or 'decimal_chain_sum'?",
        'set dataset = "chain_sum"; all of them: python -c',
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
    "characters_that_the_model_lacks": (
        [*torch("heads = 4\n"), (SUMS, 'use = "sort_symbols"')],
        '[model.scratch] alphabet = "0123456789"',
        "the vocabulary lacks '=', 'a', 'b', ",
        "add the characters to the alphabet of [model.scratch]",
    ),
    "characters_of_a_generated_data_set": (
        [*torch("heads = 4\n"), (SUMS, 'use = "reasoning_gym"\ndataset = "chain_sum"')],
        '[model.scratch] alphabet = "0123456789"',
        "the vocabulary lacks ' '",
        "change the prompt or answer template",
    ),
    "a_chat_with_a_fresh_model": (
        [*torch("heads = 4\n"), (SUMS, 'use = "reasoning_gym"\ndataset = "chain_sum"\nchat = true')],
        "[environment] chat = true",
        "has no chat template",
        "remove chat",
    ),
    "memory_that_no_machine_has": (
        torch("heads = 4\nvocabulary_size = 100000000000000\n"),
        "[model.scratch] hidden_size = 64",
        "GB for its weights alone, and this machine has",
        "lower hidden_size, layers, intermediate_size or vocabulary_size",
    ),
    "answers_longer_than_the_model": (
        [*torch("heads = 4\n"), ("max_new_tokens = 8", "max_new_tokens = 64")],
        "[rollout] max_new_tokens = 64",
        "the model's longest sequence has 64 tokens, prompt included",
        "set max_new_tokens below 64",
    ),
    "answers_longer_than_a_pretrained_model": (
        [(MODEL, '[model]\npath = "model"'), ("max_new_tokens = 8", "max_new_tokens = 65")],
        "[rollout] max_new_tokens = 65",
        "the model's longest sequence has 64 tokens",
        "set max_new_tokens below 64",
    ),
    "sequences_longer_than_the_model": (
        [*torch("heads = 4\n"), (ENGINE, 'use = "torch"\nmax_length = 65')],
        "[rollout] max_length = 65",
        "longest sequence has 65 tokens, and the model's 64",
        "at most 64, or leave it out",
    ),
    "answers_longer_than_a_sequence": (
        [*torch("heads = 4\n"), (ENGINE, 'use = "torch"\nmax_length = 8')],
        "[rollout] max_new_tokens = 8",
        "rollout.max_length has 8 tokens, prompt included",
        "or allow longer sequences",
    ),
    "micro_batches_smaller_than_a_row": (
        [("mini_batches = 2", "mini_batches = 2\nmicro_batch_tokens = 8")],
        "[batch] micro_batch_tokens = 8",
        "cannot hold one row: an answer may have max_new_tokens = 8, after a prompt",
        "at least 9 and the length of a prompt",
    ),
    "model_without_a_configuration_that_can_be_read": (
        [(MODEL, '[model]\npath = "unmodelled"')],
        '[model] path = "unmodelled"',
        "has a config.json that is not JSON",
        "relative to the job file",
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
        "8 groups of 4 cannot be split into 3 equal",
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
    "interpreter_that_is_none": (
        [("max_new_tokens", 'python = "./mute/python"\nmax_new_tokens')],
        "[rollout] python",
        "is no Python",
        "give a Python interpreter",
    ),
    "other_contract_version": (
        [("observers = []", 'observers = ["./old.py:Old"]')],
        "./old.py:Old",
        f"contract version {CONTRACT_VERSION + 1}, this is {CONTRACT_VERSION}",
        "install the plugin's release",
    ),
    "runs_where_no_folder_can_be_made": (
        [("steps = 10", 'steps = 10\nruns = "/proc/self/runs"')],
        '[job] runs = "/proc/self/runs"',
        "takes no new folder: ",
        "choose another place",
    ),
    "unwritable_runs": (
        [("steps = 10", 'steps = 10\nruns = "mine.py"')],
        '[job] runs = "mine.py"',
        "mine.py is not a folder",
        "choose another place",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_its_place_what_is_allowed_and_what_to_do(
    name: str, folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    replacements, place, allowed, fix = MISTAKES[name]
    teaches(refused(write_job(*replacements), capsys), place, allowed, fix)


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
