"""What a person reads after each mistake: what happened, where, what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import check_job, load_job, raise_errors
from headrace.errors import ConfigError, StalenessError, WiringError

WriteJob = Callable[..., Path]
ErrorsOf = Callable[..., list[str]]

PLUGINS = Path(__file__).parents[2] / "small_plugins.py"
PHASE = '[[phase]]\nname = "only"\nsteps = 2\n'
WITHOUT_STEPS = ("steps = 10\n", "")


@pytest.mark.parametrize(
    ("old", "new", "message", "fix"),
    [
        ("steps = 10", "steps = 10\nsed = 1", "unknown key 'sed'; known here: name, runs, seed", "rename it to seed"),
        ("groups = 8", "group = 8", "unknown key 'group'", "rename it to groups"),
        ("[storage]", "[storag]", "unknown key 'storag'", "rename it to storage"),
        ("groups = 8", 'groups = "8"', 'groups should be a valid integer; found "8"', "whole number, without quotes"),
        ("groups = 8", "groups = true", "groups should be a valid integer; found true", "a whole number"),
        ("groups = 8", "groups = 0", "groups should be greater than or equal to 1; found 0", "value of at least 1"),
        ("max_new_tokens = 8", "max_new_token = 8", "max_new_tokens is missing. Is it 'max_new_token'?", "rename"),
        ("groups = 8\n", "", "groups is missing", "add groups = ..."),
        ("steps = 10\n", "", "steps is missing", "to [job]"),
        ('name = "small"', 'name = "a b"', "name should match pattern", 'letters, digits, ".", "_" and "-"'),
        ("[rollout]\nuse", "[rollout]\nused", "use is missing: it names the inference_engine", "headrace plugins"),
        ("[trainer]\nuse", "[trainer]\nused", "use is missing: it names the training_engine", "headrace plugins"),
        ("observers = []", 'observers = "console"', "observers should be a list", 'observers = ["console"]'),
        ("observers = []", "observers = [3]", "use should be text", "headrace plugins observer"),
        ("observers = []", "checkpoint = 3", "checkpoint should be a table", "[checkpoint]"),
        ("[model.scratch]\nlayers = 1", "[model]", "model has neither path nor scratch", "write path"),
        ("[model.scratch]", '[model]\npath = "m"\n[model.scratch]', "model has both path and scratch", "not both"),
        ("mini_batches = 2", "mini_batches = 3", "8 groups of 4 cannot be split into 3 equal", "one of 1, 2, 4, 8"),
        ("group_size = 4", "group_size = 1", "group_size must be at least 2, it is 1", "to 2 or more"),
        (
            f'"{PLUGINS}:Relative"\n\n[batch]\ngroups = 8\ngroup_size = 4',
            f'"{PLUGINS}:Alone"\n\n[batch]\ngroups = 8\ngroup_size = 1\ndynamic_sampling = true',
            "those of one member always are",
            "to 2 or more",
        ),
        ("max_staleness = 1", "max_staleness = 9", "max_staleness 9 > batch_groups 8", ""),
        (
            "learning_rate = 0.1",
            'learning_rate = "fast"',
            'learning_rate should be a valid number; found "fast"',
            "a number,",
        ),
        ("learning_rate", "learning_rat", "unknown key 'learning_rat'", "rename it to learning_rate"),
        (
            "largest = 9",
            'largest = 9\noperator = "plux"',
            "operator should be 'plus' or 'minus'",
            "did you mean 'plus'?",
        ),
        (
            "largest = 9",
            'largest = 9\noperator = "times"',
            "operator should be 'plus' or 'minus'",
            "one of plus, minus",
        ),
        (
            "largest = 9",
            "largest = 9\noperator = 3",
            "operator should be 'plus' or 'minus'; found 3",
            "one of plus, minus",
        ),
        ("learning_rate = 0.1", "learning_rate = 0.1\nbetas = 3", "betas should be a list", "write a list"),
        ("largest = 9", "largest = 9\nworker = 2", "unknown key 'worker'", "rename it to workers"),
        ("learning_rate = 0.1", "learning_rate = 0.1\nbetas = [0.9]", "betas[1] is missing", ""),
        ("[storage]", "[network]\nport = 1\n[storage]", "unknown key 'port'", "known here: host, metrics, transport"),
        ("[storage]", '[network]\ntransport = "udp"\n[storage]', "transport should be 'ipc' or 'tcp'", ""),
        ('Relative"', 'Relative"\nclip = 0', "clip must be above 0, it is 0", "correct it"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_its_fix(
    errors_of: ErrorsOf, old: str, new: str, message: str, fix: str
) -> None:
    errors = errors_of((old, new))
    assert len(errors) == 1, errors
    assert message in errors[0]
    assert "\n  from: " in errors[0]
    assert "small.toml" in errors[0]
    assert fix in errors[0]


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "nodes cannot listen on host 192.0.2.1: Cannot assign requested address"),
        ("localhost", "host 'localhost' is not an IP address"),
        ("0.0.0.0", "host 0.0.0.0 means every address of this machine"),
        ("::", "host :: means every address of this machine"),
    ],
)
def test_a_host_that_nodes_cannot_serve_at_is_named_with_its_place(
    errors_of: ErrorsOf, host: str, message: str
) -> None:
    (error,) = errors_of(("[storage]", f'[network]\ntransport = "tcp"\nhost = "{host}"\n[storage]'))
    assert message in error
    assert "[network] host" in error
    assert 'such as "127.0.0.1"' in error


def test_tcp_on_this_machine_s_own_address_is_sound(errors_of: ErrorsOf) -> None:
    assert errors_of(("[storage]", '[network]\ntransport = "tcp"\n[storage]')) == []


def test_every_mistake_of_a_phase_is_found_where_it_was_written(errors_of: ErrorsOf) -> None:
    errors = errors_of(WITHOUT_STEPS, extra=PHASE + "step = 3\n[phase.trainer]\npython = 'p'\nlearning_rate = true\n")
    text = "\n".join(errors)
    assert "unknown key 'step'" in text
    assert "a phase cannot change python of the trainer" in text
    assert "[phase.trainer] python" in text


def test_a_setting_wrong_in_one_phase_points_into_that_phase(errors_of: ErrorsOf) -> None:
    (error,) = errors_of(WITHOUT_STEPS, extra=PHASE + "[phase.trainer]\nlearning_rate = true\n")
    assert "[phase.trainer] learning_rate = true" in error


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (PHASE, "steps stands beside phases"),
        ("[phase]\nname = 'x'\n", "phase should be a list of tables"),
        (PHASE + PHASE, "two phases are named 'only'"),
        (PHASE + "[phase.trainer]\nuse = 'other'\n", "a phase cannot change use of the trainer"),
    ],
)
def test_phases_that_contradict_themselves_are_refused(errors_of: ErrorsOf, extra: str, message: str) -> None:
    assert any(message in error for error in errors_of(extra=extra))


@pytest.mark.parametrize(
    ("until", "evaluation", "message", "fix"),
    [
        ("evaluation/sampled_acuracy", "every = 2", "cannot end by", 'set metric = "evaluation/sampled_accuracy"'),
        ("reward/mean", "every = 2", "what can end it: evaluation/greedy_accuracy, evaluation/sampled", "set metric"),
        ("evaluation/sampled_accuracy", "every = 0", "evaluation.every is 0", "set until.every"),
        ("evaluation/greedy_accuracy", "every = 2\ngreedy = false", "evaluation.greedy is false", "greedy = true"),
    ],
)
def test_a_phase_ends_only_by_what_evaluation_measures(
    errors_of: ErrorsOf, until: str, evaluation: str, message: str, fix: str
) -> None:
    phase = f'{PHASE}until = {{ metric = "{until}", at_least = 0.5 }}\n[evaluation]\n{evaluation}\n'
    (error,) = errors_of(WITHOUT_STEPS, extra=phase)
    assert message in error
    assert fix in error


def test_a_phase_that_evaluates_for_its_own_end_needs_no_other_evaluation(write_job: WriteJob) -> None:
    until = 'until = { metric = "evaluation/sampled_accuracy", at_least = 0.5, every = 1 }\n'
    assert check_job(load_job(write_job(WITHOUT_STEPS, extra=f"[evaluation]\nprompts = 4\n{PHASE}{until}"))) == []


@pytest.mark.parametrize(
    ("replacements", "message"),
    [
        ([(":Trainer", ":PlainTrainer")], "cannot create a model from scratch"),
        (
            [(":Trainer", ":PlainTrainer"), ('Relative"', 'Relative"\nreference_weight = 0.1')],
            "needs reference log-probs, and training engine",
        ),
        (
            [(':Sums"\nlargest = 9', ':Riddles"'), (":Relative", ":Imitation")],
            "imitates demonstrations, and environment",
        ),
        ([(":Engine", ":Boaster")], "Boaster declares live_versions without being a MultiVersion"),
        ([(":Relative", ":Careless")], "needs raised KeyError: 'clip'"),
        ([(':Sums"\nlargest = 9', ':Nervous"')], "preflight raised KeyError: 'tokenizer'"),
        ([("observers = []", f'observers = ["{PLUGINS}:Clashing"]')], "are named like keys of core: use"),
        ([("observers = []", f'observers = [{{ use = "{PLUGINS}:Diary", page = 2 }}]')], "Did you mean 'pages'?"),
        ([(":Bounded", ":Sums")], "cannot be the staleness: that must be a class derived from"),
        ([(":Dictionary", ":Dictionry")], "Did you mean 'Dictionary'?"),
    ],
)
def test_impossible_combinations_and_broken_plugins_are_refused(
    errors_of: ErrorsOf, replacements: list[tuple[str, str]], message: str
) -> None:
    errors = errors_of(*replacements)
    assert any(message in error for error in errors), errors


def test_a_plugin_of_another_interpreter_is_asked_there_whether_it_could_start(errors_of: ErrorsOf) -> None:
    (error,) = errors_of((':Sums"\nlargest = 9', f':Nervous"\npython = "{sys.executable}"'))
    assert f"interpreter {sys.executable}: environment '{PLUGINS}:Nervous': preflight raised KeyError" in error
    assert "[environment] python" in error
    assert "correct Nervous.preflight" in error


def test_what_a_plugin_says_of_its_settings_in_another_interpreter_has_their_place(errors_of: ErrorsOf) -> None:
    jsonl = f'"jsonl"\npython = "{sys.executable}"\npath = "gone.jsonl"\nprompt = "{{q}}"\nanswer = "{{a}}"'
    (error,) = errors_of((f'"{PLUGINS}:Sums"\nlargest = 9', jsonl))
    assert f"interpreter {sys.executable}: " in error
    assert '[environment] path = "gone.jsonl"' in error


def test_a_wrong_value_that_every_phase_overrides_is_wrong_all_the_same(
    errors_of: ErrorsOf, write_job: WriteJob
) -> None:
    phase = PHASE + "[phase.trainer]\nlearning_rate = 0.3\n"
    (error,) = errors_of(WITHOUT_STEPS, ("rate = 0.1", 'rate = "fast"'), extra=phase)
    assert 'learning_rate should be a valid number; found "fast"' in error
    assert '[trainer] learning_rate = "fast"' in error
    (warning,) = check_job(load_job(write_job(WITHOUT_STEPS, extra=phase)))
    assert "trainer.learning_rate is ignored: every phase sets its own" in str(warning)


def test_a_bound_that_phases_share_is_refused_once_and_where_it_is_written(errors_of: ErrorsOf) -> None:
    policy = (f'policy = "{PLUGINS}:Bounded"\nmax_staleness = 1', 'policy = "multi_version"\nmax_staleness = 2\nOUT')
    phases = PHASE + PHASE.replace("only", "more") + "batch = { groups = 4 }\n"
    for out, message in (("outstanding_batches = 3", "= 3 · 8 = 24 > max"), ("outstanding_batches = 0.5", "= 0.5 < 1")):
        (error,) = errors_of(WITHOUT_STEPS, (policy[0], policy[1].replace("OUT", out)), extra=phases)
        assert message in error
        assert f"[staleness] {out}" in error


def test_keys_and_values_are_kept_only_by_an_engine_that_can_give_them_out(
    errors_of: ErrorsOf, write_job: WriteJob
) -> None:
    bounded = f'policy = "{PLUGINS}:Bounded"\nmax_staleness = 1'
    keeps, recomputes = (f'policy = "partial_rollout"\nmax_staleness = 1\nkeep_kv = {kv}' for kv in ("true", "false"))
    (error,) = errors_of((bounded, keeps))
    assert f"inference engine '{PLUGINS}:Engine' cannot give them out: it does not declare kv_migration" in error
    assert "[staleness] keep_kv = true" in error
    assert "set staleness.keep_kv = false" in error
    assert check_job(load_job(write_job((bounded, recomputes)))) == []


def test_a_policy_that_is_unknown_is_named_by_its_key(errors_of: ErrorsOf) -> None:
    (error,) = errors_of((f'policy = "{PLUGINS}:Bounded"', 'policy = "multi_versio"'))
    assert "no staleness policy named 'multi_versio'" in error
    assert 'set policy = "multi_version"' in error


def test_a_model_folder_must_exist_and_hold_a_model(errors_of: ErrorsOf, tmp_path: Path) -> None:
    model = ("[model.scratch]\nlayers = 1", '[model]\npath = "weights"')
    assert "is not a folder" in errors_of(model)[0]
    (tmp_path / "weights").mkdir()
    assert "has no config.json" in errors_of(model)[0]
    (tmp_path / "weights" / "config.json").write_text("{}")
    assert errors_of(model) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the job file: No such file") as caught:
        load_job(tmp_path / "missing.toml")
    assert caught.value.origin == str(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="it is a directory"):
        load_job(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[job]\nname = "\xe9"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_job(tmp_path / "latin.toml")


def test_invalid_toml_is_refused_with_its_line(write_job: WriteJob) -> None:
    with pytest.raises(ConfigError, match="not valid TOML: Invalid value") as caught:
        load_job(write_job(("group_size = 4", "group_size = four")))
    number = write_job().read_text().splitlines().index("group_size = 4") + 1
    assert caught.value.origin.endswith(f"small.toml:{number}  group_size = four")


def test_toml_that_stops_in_the_middle_is_refused_with_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[job]\nname = """open\n')
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        load_job(tmp_path / "job.toml")
    assert ":2  name" in caught.value.origin


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[storage]", "[evaluation]\nprompts = 9\n[storage]", "prompts is ignored: evaluation.every is 0"),
        ("[storage]", '[network]\nhost = "127.0.0.1"\n[storage]', "host is ignored: ipc sockets have none"),
        (":Relative", ":Imitation", "rollout is ignored: no phase generates and evaluation is off"),
        (
            "[storage]",
            "[evaluation]\nevery = 1\ngreedy = false\nsampled = false\n[storage]",
            "evaluation measures nothing",
        ),
        (
            "group_size = 4",
            "group_size = 4\nmax_generated_batches = 3",
            "max_generated_batches is ignored: no phase samples dynamically",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_warned_about(write_job: WriteJob, old: str, new: str, message: str) -> None:
    (finding,) = check_job(load_job(write_job((old, new))))
    assert finding.severity == "warning"
    assert str(finding).startswith("Warning: ")
    assert message in str(finding)


def test_a_shared_table_that_every_phase_replaces_is_warned_about(write_job: WriteJob) -> None:
    phase = f'{PHASE}[phase.algorithm]\nuse = "{PLUGINS}:Imitation"\n[phase.staleness]\nmax_staleness = 0\n'
    warnings = [str(f) for f in check_job(load_job(write_job(WITHOUT_STEPS, extra=phase)))]
    assert any("algorithm is ignored: every phase has another" in warning for warning in warnings)
    assert any("learns from demonstrations, never stale" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        ("algorithm.use=grop", "no algorithm named 'grop'", 'set use = "grpo"'),
        ("staleness.policy=synchronus", "no staleness policy named 'synchronus'", 'set policy = "synchronous"'),
        ("algorithm.use=3", "no algorithm named '3'", "headrace plugins algorithm"),
    ],
)
def test_an_unknown_plugin_is_an_error_also_where_every_phase_has_another(
    errors_of: ErrorsOf, override: str, message: str, fix: str
) -> None:
    phase = f'{PHASE}[phase.algorithm]\nuse = "{PLUGINS}:Imitation"\n[phase.staleness]\npolicy = "{PLUGINS}:Bounded"\n'
    (error,) = errors_of(WITHOUT_STEPS, extra=phase, overrides=[override])
    assert message in error
    assert f"  from: --set {override}\n" in error
    assert fix in error


def test_a_single_error_is_raised_as_itself(write_job: WriteJob) -> None:
    wiring = check_job(load_job(write_job((":Trainer", ":PlainTrainer"))))
    with pytest.raises(WiringError, match="cannot create a model from scratch"):
        raise_errors([finding.error for finding in wiring])
    staleness = check_job(load_job(write_job(("max_staleness = 1", "max_staleness = 9"))))
    with pytest.raises(StalenessError, match="max_staleness 9 > batch_groups 8"):
        raise_errors([finding.error for finding in staleness])


def test_no_error_raises_nothing() -> None:
    raise_errors([])


def test_a_place_where_metrics_cannot_be_served_is_named_with_what_to_say(errors_of: ErrorsOf) -> None:
    (error,) = errors_of(("[storage]", '[network]\nmetrics = "9464"\n[storage]'))
    assert "metrics cannot be served at '9464': it is neither HOST:PORT, with a port below 65536, nor unix:" in error
    assert "[network] metrics" in error
    assert "127.0.0.1:9464" in error


def test_a_storage_that_no_batch_fits_is_refused_with_the_inequality(errors_of: ErrorsOf) -> None:
    rows = 8 * 4
    (error,) = errors_of(("[storage]", f"[storage]\nunits = 2\ncapacity = {rows * 31 // 2 - 1}"))
    assert f"2 x {rows * 31 // 2 - 1} bytes < {rows} rows x 31 bytes" in error
    assert "[storage] capacity" in error
    assert "raise storage.capacity" in error
    assert errors_of(("[storage]", f"[storage]\nunits = 2\ncapacity = {rows * 31 // 2}")) == []
