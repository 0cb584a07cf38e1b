"""Rows of steps that were not finite are kept for a person to look at."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.contract import Batch, Ragged
from headrace.services.dumps import MOST, dump

BATCH = Batch(
    rows=np.array([4, 9], dtype=np.int64),
    columns={
        "tokens": Ragged.from_arrays([np.array([1, 2, 3], dtype=np.int32), np.array([4], dtype=np.int32)]),
        "reward": np.array([0.5, np.nan], dtype=np.float32),
    },
)


def test_a_dump_holds_every_row_and_column_and_reads_without_pickle(tmp_path: Path) -> None:
    with np.load(dump(BATCH, tmp_path / "new", "version-00000003-step-1"), allow_pickle=False) as found:
        assert found["rows"].tolist() == [4, 9]
        assert found["tokens.values"].tolist() == [1, 2, 3, 4]
        assert found["tokens.offsets"].tolist() == [0, 3, 4]
        np.testing.assert_array_equal(found["reward"], BATCH.dense("reward"))


def test_a_run_that_goes_wrong_again_and_again_fills_no_disk(tmp_path: Path) -> None:
    paths = [dump(BATCH, tmp_path, f"step-{number}") for number in range(MOST + 3)]
    assert paths[MOST:] == ["", "", ""]
    assert len(list(tmp_path.iterdir())) == MOST
