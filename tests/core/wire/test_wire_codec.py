from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headrace.contract import (
    Array,
    Batch,
    Column,
    EngineHealth,
    GenerationOutput,
    GenerationRequest,
    Metric,
    Ragged,
    Sampling,
    Task,
    TensorInfo,
    VersionSpan,
    WeightManifest,
)
from headrace.errors import WireError
from headrace.wire import Limits, RefusedError, decode, encode
from headrace.wire.arrays import INLINE_BYTES

LARGE = INLINE_BYTES + 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    name: str
    batch: Batch | None = None
    more: list[Batch] = field(default_factory=list)
    by_name: Mapping[str, Column] = field(default_factory=dict)


class Envelope(msgspec.Struct, tag="envelope", array_like=True):
    id: int
    rows: Rows
    note: str = "none"


class Tree(msgspec.Struct):
    value: int = 0
    left: Tree | None = None


def same(one: Column, other: Column) -> bool:
    if isinstance(one, Ragged):
        return isinstance(other, Ragged) and same(one.values, other.values) and same(one.offsets, other.offsets)
    assert isinstance(other, np.ndarray)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def batch_of(count: int) -> Batch:
    columns: dict[str, Column] = {
        "tokens": Ragged.from_arrays([np.arange(i + 1, dtype=np.int32) for i in range(count)]),
        "reward": np.linspace(0, 1, count, dtype=np.float32),
    }
    return Batch(rows=np.arange(count), columns=columns)


def copied(value: Any) -> list[bytearray]:
    """Frames as another process gets them."""
    return [bytearray(frame) for frame in encode(value)]


@settings(max_examples=40)
@given(
    npst.arrays(
        dtype=npst.integer_dtypes() | npst.floating_dtypes() | npst.boolean_dtypes() | npst.complex_number_dtypes(),
        shape=npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12),
    )
)
def test_every_array_of_numbers_survives_the_trip_bit_for_bit(array: Array) -> None:
    assert same(decode(copied(array), Array), array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int4", "uint4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (LARGE,), (2, LARGE)])
def test_small_floats_and_integers_survive_the_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, getattr(ml_dtypes, dtype))
    assert same(decode(copied(array), Array), array)


def test_an_array_that_is_not_contiguous_arrives_in_its_logical_order() -> None:
    array = np.arange(4 * LARGE).reshape(4, LARGE)[::-1, ::2].T
    assert same(decode(copied(array), Array), np.ascontiguousarray(array))


def test_a_received_array_may_be_written_whether_it_came_inline_or_in_a_frame() -> None:
    for array in (np.zeros(3), np.zeros(LARGE)):
        received = decode(copied(array), Array)
        received[:] = 1
        assert received.sum() == len(array)


def test_a_received_large_array_is_a_view_on_its_frame() -> None:
    frames = copied(np.zeros(LARGE, np.uint8))
    frames_array = decode(frames, Array)
    frames[1][0] = 7
    assert frames_array[0] == 7


def test_a_frame_at_an_odd_address_gives_an_aligned_array() -> None:
    header, frame = encode(np.arange(LARGE, dtype=np.float64))
    buffer = bytearray(len(frame) + 1)
    buffer[1:] = frame
    received = decode([header, memoryview(buffer)[1:]], Array)
    assert received.flags.aligned
    assert received[-1] == LARGE - 1


def test_a_large_array_takes_one_frame_and_is_not_copied() -> None:
    array = np.zeros(LARGE, np.uint8)
    header, frame = encode({"array": array})
    array[0] = 9
    assert len(header) < 100
    assert frame[0] == 9


def test_a_batch_of_256_ragged_rows_takes_one_frame_per_large_column() -> None:
    lengths = np.random.default_rng(0).integers(20, 60, 256)
    columns: dict[str, Column] = {
        name: Ragged.from_arrays([np.zeros(n, np.float32) for n in lengths]) for name in ("a", "b", "c")
    }
    assert len(encode(Batch(rows=np.arange(256), columns=columns))) == 1 + 3


def test_batches_travel_at_any_depth_of_dataclasses_structs_and_containers() -> None:
    batch = batch_of(5)
    rows = Rows(name="x", batch=batch, more=[batch, batch], by_name={"r": batch.columns["tokens"], "d": np.zeros(5)})
    received = decode(copied(Envelope(3, rows)), Envelope)
    assert type(received) is Envelope
    assert (received.id, received.note, received.rows.name) == (3, "none", "x")
    for other in (received.rows.batch, *received.rows.more):
        assert isinstance(other, Batch)
        assert same(other.ragged("tokens"), batch.ragged("tokens"))
        assert same(other.dense("reward"), batch.dense("reward"))
    assert same(received.rows.by_name["r"], batch.ragged("tokens"))
    assert len(received.rows.more) == 2
    assert decode(copied(Rows(name="y")), Rows).batch is None


class Levels(msgspec.Struct, array_like=True, frozen=True):
    columns: dict[str, Array | Ragged]
    level: int = 0

    def __post_init__(self) -> None:
        if self.level < 0:
            raise ValueError(f"a level of {self.level}")


def test_a_struct_with_columns_is_received_as_one_and_its_constructor_is_asked() -> None:
    received = decode(copied(Levels({"tokens": batch_of(2).ragged("tokens"), "reward": np.zeros(2)}, 3)), Levels)
    assert isinstance(received, Levels)
    assert received.level == 3
    assert isinstance(received.columns["tokens"], Ragged)
    assert isinstance(received.columns["reward"], np.ndarray)
    with pytest.raises(RefusedError, match="a level of -1"):
        decode(copied([{}, -1]), Levels)
    with pytest.raises(RefusedError, match="wrong type"):
        decode(copied([{"tokens": "none"}, 1]), Levels)


def test_a_recursive_type_is_decoded() -> None:
    tree = Tree(left=Tree(value=1))
    assert decode(copied(tree), Tree) == tree


def test_the_contract_s_own_messages_travel() -> None:
    span = VersionSpan(version=1, start=0, stop=2)
    output = GenerationOutput(
        request_id="a", token_ids=np.arange(2, dtype=np.int32), logprobs=np.zeros(2, np.float32), spans=(span,)
    )
    received = decode(copied(output), GenerationOutput)
    assert same(received.token_ids, output.token_ids)
    assert received.spans == (span,)
    assert received.finish_reason is None
    request = GenerationRequest(
        request_id="a", prompt=np.arange(3, dtype=np.int32), sampling=Sampling(max_new_tokens=4), version=2
    )
    assert decode(copied(request), GenerationRequest).sampling == request.sampling
    info = TensorInfo(name="w", dtype="bfloat16", shape=(2, 3), checksum="00")
    for value in (
        WeightManifest(version=1, tensors=(info,), nbytes=12, digest="ff"),
        Task(id="t", data={"question": "1+1", "answer": [2, 2.0, None]}),
        EngineHealth(versions=(1,), running=0, waiting=0, kv_used=0.5, generated_tokens=3, digests={1: "ab"}),
        Metric(total=2.0, count=3, reduction="mean"),
    ):
        assert decode(copied(value), type(value)) == value


def test_numpy_scalars_travel_as_numbers() -> None:
    assert decode(copied({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}), dict) == {
        "a": 0.5,
        "b": 3,
        "c": True,
    }


@pytest.mark.parametrize("value", [object(), {"f": print}, np.array(["a"]), np.array([object()]), np.zeros(2, "f4,f4")])
def test_what_is_no_number_text_or_record_does_not_travel(value: object) -> None:
    with pytest.raises(TypeError, match="travel"):
        encode(value)


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        ("text", int, "wrong type"),
        ([1, "2"], list[int], "wrong type"),
        ({"values": 1}, Array, "wrong type"),
        (3, Batch, "wrong type"),
        ({"rows": np.zeros(2, np.int64), "columns": {"a": np.zeros(3)}}, Batch, "wrong type"),
        ({"rows": np.zeros(1, np.int64), "columns": {"a": [1]}}, Batch, "wrong type"),
        ({"values": np.zeros(3), "offsets": np.array([0, 5])}, Ragged, "wrong type"),
        ({"name": "a"}, TensorInfo, "wrong type"),
    ],
)
def test_a_value_of_another_type_is_refused(value: object, kind: type, reason: str) -> None:
    with pytest.raises(RefusedError) as refused:
        decode(copied(value), kind)
    assert refused.value.reason == reason
    assert isinstance(refused.value, WireError)


def extension(code: int, dtype: object, shape: object, rest: int | bytes) -> bytes:
    """An array's layout and what follows it: its bytes, or the number of their frame."""
    layout = msgspec.msgpack.encode((dtype, shape))
    end = rest if isinstance(rest, bytes) else rest.to_bytes(4, "big")
    return packed(code, bytes([len(layout)]) + layout + end)


def packed(code: int, payload: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, payload))


@pytest.mark.parametrize(
    "frames",
    [
        [extension(1, "<f4", [2], 0)],
        [extension(1, "<f4", [2], 1), bytes(8)],
        [extension(1, "<f4", [2], (1 << 32) - 1), bytes(8)],
        [extension(1, "<f4", [2], bytes(3)), bytes(8)],
        [extension(1, "<f4", [2], bytes(5)), bytes(8)],
        [extension(1, "<f4", [2], 0), bytes(7)],
        [extension(1, "<f4", [2], 0), bytes(9)],
        [extension(1, "<f4", [-2], 0), bytes(8)],
        [extension(1, "<f4", [-1, -2], 0), bytes(8)],
        [extension(1, "<f4", [1 << 62, 1 << 62], 0), bytes(8)],
        [extension(1, "<f4", [1] * 64, 0), bytes(4)],
        [extension(1, "|O", [1], 0), bytes(8)],
        [extension(1, "O8", [1], 0), bytes(8)],
        [extension(1, "<a8", [1], 0), bytes(8)],
        [extension(1, "f4,f4", [1], 0), bytes(8)],
        [extension(1, "<M8[s]", [1], 0), bytes(8)],
        [extension(1, "nonsense)(", [1], 0), bytes(8)],
        [extension(2, "<f4", [2], bytes(4))],
        [extension(3, "<f4", [2], bytes(8))],
        [extension(2, 4, [2], bytes(8))],
        [extension(2, "<f4", ["2"], bytes(8))],
        [packed(1, b""), bytes(8)],
        [packed(2, b"")],
        [packed(2, b"\xff<f4")],
        [packed(2, b"\x04\xff\xff\xff\xff")],
    ],
)
def test_an_array_that_does_not_fit_its_bytes_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(RefusedError) as refused:
        decode(frames, Array)
    assert refused.value.reason == "bad frame"


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_is_refused_and_never_raises_anything_else(frames: list[bytes]) -> None:
    for kind in (Batch, GenerationRequest, Array, dict, Rows):
        with contextlib.suppress(RefusedError):
            decode(frames, kind)


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_message_is_refused_or_decodes_to_its_type(data: st.DataObject) -> None:
    header = bytearray(encode(batch_of(3))[0])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(header)))
    with contextlib.suppress(RefusedError):
        assert isinstance(decode([header[:cut]], Batch), Batch)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RefusedError):
        decode([b"\x91" * 100_000], dict)
    with pytest.raises(RefusedError):
        decode([b"\x91" * 100_000], object)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(header_bytes=10), "header too large"),
        (Limits(frames=1), "too many frames"),
        (Limits(frame_bytes=LARGE - 1), "frame too large"),
    ],
)
def test_a_message_over_a_bound_is_refused(limits: Limits, reason: str) -> None:
    frames = copied({"one": np.zeros(LARGE, np.uint8), "two": np.zeros(LARGE, np.uint8)})
    with pytest.raises(RefusedError) as refused:
        decode(frames, dict, limits=limits)
    assert refused.value.reason == reason


def test_bounds_are_positive() -> None:
    with pytest.raises(ValueError, match="frames must be at least 1"):
        Limits(frames=0)
