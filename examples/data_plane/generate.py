"""The producer: answers as they come, four to a prompt. python generate.py ADDRESS"""

import sys

import numpy as np
from table import GROUP_SIZE, GROUPS, SPEC

from headrace.contract import Ragged
from headrace.dataplane import DataPlane

chance = np.random.default_rng(0)
partition = DataPlane(sys.argv[1]).create(SPEC)
for _ in range(GROUPS):
    answers = [chance.integers(0, 1000, chance.integers(5, 50), dtype=np.int32) for _ in range(GROUP_SIZE)]
    partition.put({"tokens": Ragged.from_arrays(answers)})
print(f"generated {GROUPS} groups of {GROUP_SIZE}")
