"""The consumer at the end: whole groups in micro-batches, acknowledged a step at a time. python train.py ADDRESS"""

import sys

from table import GROUPS, SPEC, STEP_GROUPS

from headrace.dataplane import DataPlane, Stream

ADDRESS = sys.argv[1]
seen: set[int] = set()
with Stream(lambda: DataPlane(ADDRESS).create(SPEC), "train", step_groups=STEP_GROUPS, token_budget=600) as stream:
    for step in range(GROUPS // STEP_GROUPS):
        tokens = micro_batches = 0
        for batch in stream.step(deadline=60):  # here the gradient adds up
            assert seen.isdisjoint(batch.rows.tolist())
            seen.update(batch.rows.tolist())
            tokens += len(batch.ragged("tokens").values)
            micro_batches += 1
        stream.acknowledge()  # after the optimiser step
        print(f"step {step}: {tokens} tokens in {micro_batches} micro-batches")
print(f"trained {len(seen)} answers, each once")
