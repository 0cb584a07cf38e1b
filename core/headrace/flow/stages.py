"""What is done to a phase's rows, as a graph: its stages, and which columns each reads and writes.

It follows from what the phase's algorithm declares, and from whether its policy interrupts trajectories. Invariant:
every column has one writer, and a stage reads only what stages before it wrote, so that the graph has no cycle whatever
is declared.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.contract import AlgorithmNeeds
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GREEDY,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD,
    TOKEN_VERSIONS,
    TOKENS,
    TRAINED,
    TRUNCATED,
    TURN_REWARDS,
    VALUES,
    VERSION,
)

GENERATE = "generate"
DEMONSTRATE = "demonstrate"
SCORE = "score"
REFERENCE = "reference"
VALUE = "value"
ADVANTAGE = "advantage"
PROXIMAL = "proximal"
TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Stage:
    """One task on rows. ``reads`` and ``writes``: names of columns, see :mod:`headrace.contract.columns`; ``by_row``:
    it need not see whole groups."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    by_row: bool = False


@dataclass(frozen=True, slots=True)
class Flowing:
    """Columns that go from the stage that writes them to one that reads them."""

    source: str
    target: str
    columns: tuple[str, ...]


_REFERENCE = Stage(REFERENCE, (TOKENS, LOSS_MASK, GROUP), (REFERENCE_LOGPROBS,), by_row=True)


def separable(stage: Stage) -> bool:
    """Whether a stage can have a process of its own. The others stay where rows are made, or where the weights of the
    moment are: in the environment workers and in the trainer."""
    return stage.name in (REFERENCE, ADVANTAGE)


def stored_first(stages: Collection[Stage]) -> tuple[str, ...]:
    """The columns that a row has when it is stored, before any separate stage has seen it."""
    return tuple(c for stage in stages if stage.name in (GENERATE, DEMONSTRATE, SCORE) for c in stage.writes)


def stages_of(needs: AlgorithmNeeds, *, interrupts: bool = False) -> tuple[Stage, ...]:
    """The stages of a phase, each after those it reads from; the last is ``train``, which reads every column.

    ``generate`` (``demonstrate`` where nothing is rolled out) makes the rows. ``reference`` needs their tokens alone,
    so that it can work while others of the group are still generated. ``value`` and ``proximal`` run with the weights
    of the moment, in the trainer, the latter on rows that the advantage stage found to have a gradient. ``advantages``
    are written where rewards are compared; an algorithm whose loss reads none writes zeros.
    """
    behaviour = (BEHAVIOUR_LOGPROBS,) if needs.behaviour_logprobs else ()
    versions = (TOKEN_VERSIONS,) if interrupts and needs.rollout else ()
    values = (VALUES,) if needs.values else ()
    rewards = (REWARD, TURN_REWARDS) if needs.turn_rewards else (REWARD,)
    greedy = (GREEDY,) if needs.greedy_reward and needs.rollout else ()
    made = (TOKENS, LOSS_MASK, *behaviour, GROUP, VERSION, *versions, *greedy, TRUNCATED)
    advantages = (ADVANTAGES,) if needs.rollout else ()
    prepared = (LOSS_WEIGHTS, DENOMINATOR, *advantages, TRAINED)
    before = [
        Stage(GENERATE if needs.rollout else DEMONSTRATE, (), made),
        Stage(SCORE, (TOKENS, LOSS_MASK, TRUNCATED), rewards),
        *([_REFERENCE] if needs.reference_logprobs else []),
        *([Stage(VALUE, (TOKENS, LOSS_MASK), values)] if needs.values else []),
        Stage(ADVANTAGE, (*made, *rewards, *values), prepared),
        *([Stage(PROXIMAL, (TOKENS, LOSS_MASK, TRAINED), (PROXIMAL_LOGPROBS,))] if needs.proximal_logprobs else []),
    ]
    return (*before, Stage(TRAIN, tuple(column for stage in before for column in stage.writes), ()))


def flowing(stages: tuple[Stage, ...]) -> tuple[Flowing, ...]:
    """The edges of the graph, in the order of their sources, then targets."""
    return tuple(
        Flowing(source.name, target.name, columns)
        for place, source in enumerate(stages)
        for target in stages[place + 1 :]
        if (columns := tuple(column for column in source.writes if column in target.reads))
    )
