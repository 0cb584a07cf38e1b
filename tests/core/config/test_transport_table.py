"""``[weights]``: the transport that a job names, or that fits it, and what is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.config import check_job, load_job, transport_of
from headrace.config import network as network_check
from headrace.errors import WiringError

JOB = Path(__file__).parents[3] / "examples" / "sort_symbols" / "job.toml"
AWAY = ("network.transport=tcp", "network.host=192.0.2.7")
"""Nodes serve at an address that other machines reach."""


@pytest.fixture(autouse=True)
def _any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_check, "_unusable", lambda host: "")


def chosen(*overrides: str) -> str:
    return transport_of(load_job(JOB, overrides)).use


def findings(*overrides: str) -> list[str]:
    return [str(finding) for finding in check_job(load_job(JOB, overrides))]


def test_a_job_on_one_machine_that_names_no_transport_gets_the_one_with_the_fewest_copies() -> None:
    assert chosen() == chosen("weights.use=auto") == "shared_memory"
    assert chosen("network.transport=tcp", "network.host=127.0.0.1") == "shared_memory"
    assert findings() == []


def test_a_job_whose_nodes_may_be_on_other_machines_gets_one_that_reaches_them_with_keys() -> None:
    assert chosen(*AWAY) == "zmq"
    assert findings(*AWAY) == []


def test_settings_say_which_transport_is_meant() -> None:
    assert chosen("weights.window=2") == "zmq"
    assert chosen("weights.full_every=3") == "disk"
    assert chosen("weights.path=/tmp", *AWAY) == "disk"


def test_a_transport_that_a_job_names_is_taken_as_it_is() -> None:
    assert [chosen(f"weights.use={use}") for use in ("zmq", "disk", "collective")] == ["zmq", "disk", "collective"]


def test_settings_that_no_transport_has_are_refused_with_their_neighbour() -> None:
    (error,) = findings("weights.windo=2")
    assert "no installed weight transport fits this job" in error
    assert "zmq: it has no setting windo" in error
    assert "from: --set weights.windo=2" in error
    assert "fix:  rename windo to window" in error


def test_a_value_that_the_only_transport_with_that_setting_refuses_is_told() -> None:
    (error,) = findings("weights.window=0")
    assert "zmq: chunk_bytes and window must be at least 1" in error


def test_a_transport_within_one_machine_is_refused_between_two_with_those_that_reach() -> None:
    (error,) = findings("weights.use=shared_memory", *AWAY)
    assert "'shared_memory' cannot connect the trainer with the engines" in error
    assert "it reaches one machine, and nodes serve at 192.0.2.7" in error
    assert "set it to one of zmq" in error
    (error,) = findings("weights.use=disk", *AWAY)
    assert "'disk' cannot connect" in error
    assert findings("weights.use=disk", "weights.path=/tmp", *AWAY) == []


def test_a_transport_without_keys_between_machines_is_told_and_never_chosen() -> None:
    (warning,) = findings("weights.use=collective", *AWAY)
    assert "'collective' has neither keys nor encryption, and nodes serve at 192.0.2.7" in warning
    assert "from: --set weights.use=collective" in warning
    assert findings("weights.use=collective") == []


def test_no_transport_that_fits_is_a_wiring_error_with_every_reason() -> None:
    with pytest.raises(WiringError, match=r"disk: it reaches one machine(?s:.*)zmq: it has no setting full_every"):
        chosen("weights.full_every=3", *AWAY)


def test_the_interpreters_of_trainer_and_engines_are_asked_for_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def ask(python: str, spec: object, places: object, *, origin: str) -> None:
        asked.append((origin.partition(".python")[0].rpartition(" ")[2], getattr(spec, "use", "")))

    monkeypatch.setattr("headrace.config.selections.check_interpreter", ask)
    assert findings(f"rollout.python={sys.executable}", f"trainer.python={sys.executable}/../python3") == []
    assert {("rollout", "shared_memory"), ("trainer", "shared_memory")} <= set(asked)


def test_a_class_of_one_s_own_that_declares_nothing_is_taken_by_name_only() -> None:
    assert chosen("weights.use=headrace.testing:FakeWeightTransport") == "headrace.testing:FakeWeightTransport"
    (error,) = findings("weights.use=headrace.testing:FakeWeightTransport", *AWAY)
    assert "it reaches one machine" in error
