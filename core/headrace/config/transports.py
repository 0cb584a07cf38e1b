"""Which weight transport a job has: the one that it names, or the one that fits it best.

A transport fits when it reaches from the trainer's machine to the engines', lets nobody else read or change weights on
the way, and has the settings that the job gives. Of those that fit the one with the fewest copies is taken.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headrace.config.schema import Job
from headrace.contract import TransportCapabilities, WeightTransport
from headrace.errors import HeadraceError, WiringError
from headrace.registry import PluginSpec, judge_settings, listing, load
from headrace.validation import keys_at, near_miss

AUTO = "auto"
"""In place of a transport's name."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    able: TransportCapabilities
    lacks: str
    """Why it does not fit; empty: it does."""


def transport_of(job: Job) -> PluginSpec:
    """The job's weight transport, by name. WiringError when it is left to be chosen and none fits."""
    spec = job.weights.spec
    return replace(spec, use=_choose(job)) if spec.use == AUTO else spec


def one_machine(job: Job) -> bool:
    """Whether all of its nodes are on one machine for certain: they have no address that others reach."""
    if job.network.transport == "ipc":
        return True
    try:
        return ipaddress.ip_address(job.network.host).is_loopback
    except ValueError:  # the network's own check says so
        return False


def out_of_reach(job: Job, able: TransportCapabilities) -> str:
    """Why a transport cannot connect the trainer's machine with the engines'; empty when it can."""
    if able.across_machines or one_machine(job):
        return ""
    return f"it reaches one machine, and nodes serve at {job.network.host}"


def fitting(job: Job) -> list[str]:
    """The installed transports that fit, those with the fewest copies first."""
    found = [candidate for candidate in _candidates(job) if not candidate.lacks]
    return [candidate.name for candidate in sorted(found, key=lambda found: (found.able.copies or 0, found.name))]


def _choose(job: Job) -> str:
    names = fitting(job)
    if names:
        return names[0]
    reasons = [f"{candidate.name}: {candidate.lacks}" for candidate in _candidates(job)]
    raise WiringError(
        f"no installed weight transport fits this job; {'; '.join(reasons) or 'there is none'}",
        origin=job.weights.spec.origin,
        fix=_fix(job),
    )


def _fix(job: Job) -> str:
    known = {key for listed in listing("weight_transport") for key in _keys(listed.name)}
    strange = sorted(job.weights.spec.settings.keys() - known)
    if strange:
        meant = near_miss(strange[0], known)
        return f"rename {strange[0]} to {meant}" if meant else f"remove {strange[0]} from [weights]"
    return "name one with weights.use, and give what it lacks; list them with: headrace plugins weight_transport"


def _keys(name: str) -> frozenset[str]:
    try:
        return frozenset(keys_at(load("weight_transport", name).Settings))
    except HeadraceError:  # one that cannot be loaded has none
        return frozenset()


def _candidates(job: Job) -> Iterator[_Candidate]:
    settings = job.weights.spec.settings
    for listed in listing("weight_transport"):
        try:
            able, lacks = _judged(listed.name, settings)
        except HeadraceError as error:
            able, lacks = TransportCapabilities(), error.message
        yield _Candidate(
            listed.name, able, (listed.missing and f"it needs {listed.missing}") or lacks or _unfit(job, able)
        )


def _judged(name: str, table: dict[str, Any]) -> tuple[TransportCapabilities, str]:
    """What it can do with the job's settings, and what is wrong with these."""
    cls = load("weight_transport", name)
    assert issubclass(cls, WeightTransport), "load checks the class"
    if strange := sorted(table.keys() - keys_at(cls.Settings)):
        return TransportCapabilities(), f"it has no setting {', '.join(strange)}"
    settings, problems = judge_settings(cls, table)
    if problems:
        return TransportCapabilities(), problems[0].message
    return cls.capabilities(settings), ""


def _unfit(job: Job, able: TransportCapabilities) -> str:
    if able.copies is None:
        return "it is only taken by name"
    if not able.private:
        return "others could read weights on the way"
    return out_of_reach(job, able)
