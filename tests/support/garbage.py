"""What a ledger and a storage unit may be told, as the frames that say it."""

from __future__ import annotations

import numpy as np

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, PartitionSpec
from headrace.dataplane.messages import (
    Fetch,
    FirstBatch,
    Groups,
    Holder,
    LeaseCall,
    LeaseRef,
    LostCall,
    Note,
    Notes,
    Put,
    Share,
    StatsCall,
)
from headrace.wire import Limits, encode
from headrace.wire.messages import Call

SPEC = PartitionSpec(
    "phase",
    {"tokens": ColumnSchema("int32", ragged=True), "reward": ColumnSchema("float32")},
    {"train": ("tokens", "reward")},
    2,
    "tokens",
)
LIMITS = Limits(header_bytes=1 << 20, frame_bytes=1 << 20, frames=16)
PATIENCE = 60.0
NEW = None
ROWS = np.arange(4, dtype=np.int64)
LONG = Ragged.from_arrays([np.arange(5000, dtype=np.int32)] * 4)
MESSAGES: dict[str, list[tuple[str, object]]] = {
    "ledger": [
        ("create", SPEC),
        ("describe", "phase"),
        ("stats", StatsCall("phase")),
        ("lost", LostCall("phase", 0, 0.0, 0)),
        ("lease", LeaseCall("phase", "train", 1, 1, 0.01, 1.0)),
        ("lease", LeaseCall("phase", "train", 2, 2, 0.01, 1.0, share=Share(0, 1, 2))),
        ("first_batch", FirstBatch("phase", "train")),
        ("acknowledge", LeaseRef("phase", 10**6)),
        ("acknowledge", LeaseRef("phase", 10**6, holder=Holder("train", 1))),
        ("release", LeaseRef("phase", 10**6)),
        ("extend", LeaseRef("phase", 10**6, 1.0)),
        ("drop", Groups("phase", [10**6])),
        ("note", Notes(1, [Note("phase", ROWS, 4, ("reward",), ROWS, ROWS, 0)])),
    ],
    "unit": [
        ("put", Put("phase", NEW, {"tokens": LONG, "reward": np.zeros(4, np.float32)}, 0)),
        ("get", Fetch(ROWS, ("tokens",), "phase")),
        ("delete", np.arange(3000, dtype=np.int64)),
    ],
}


def frames_of(method: str, request: object, number: int = 1) -> list[bytes]:
    return [bytes(frame) for frame in encode(Call(number, method, PATIENCE, request))]
