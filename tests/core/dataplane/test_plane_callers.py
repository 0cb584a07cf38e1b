"""What somebody may write who has the data plane and no type checker: each is taken, or refused at once in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec, Stream
from headrace.dataplane.messages import Noted, Put
from headrace.errors import ContractError, DeadlineError, HeadraceError, RunError, SilenceError, WireError
from support.data_plane import Services, soon
from support.plane_world import World

COLUMNS = {"tokens": ColumnSchema("int32", ragged=True), "reward": ColumnSchema("float32")}
READS: dict[str, tuple[str, ...]] = {"score": ("tokens",), "train": ("tokens", "reward")}
READS_AB = {"train": ("a", "b")}
Said = tuple[Callable[[Partition], object], type[HeadraceError], str]


def spec(**said: Any) -> PartitionSpec:
    return PartitionSpec(**{"name": "phase", "columns": COLUMNS, "consumers": READS, **said})


@pytest.fixture
def partition(world: World) -> Partition:
    world.unit()
    return world.plane().create(spec())


def tokens(*answers: list[int]) -> Any:
    return {"tokens": Ragged.from_arrays([np.array(answer, np.int32) for answer in answers])}


@pytest.mark.parametrize("seconds", [None, float("inf"), float("nan"), -1, "5", 1j])
def test_a_time_to_wait_is_a_number_of_seconds(partition: Partition, seconds: Any) -> None:
    for wait in (
        lambda: partition.lease("score", 1, deadline=seconds),
        lambda: partition.take("score", 1, deadline=seconds),
        lambda: partition.lost(wait=seconds),
        lambda: partition.put(tokens([1]), deadline=seconds),
        lambda: partition.lease("score", 1, seconds=seconds),
    ):
        with pytest.raises(ContractError, match=re.escape(str(seconds)) + r"(.|\n)*fix: "):
            wait()
    assert partition.stats().rows == 0


@pytest.mark.parametrize("seconds", [1e7, 1e300, 1 << 70])
def test_nobody_waits_longer_than_a_socket_can(partition: Partition, seconds: Any) -> None:
    for wait in (
        lambda: partition.lease("score", 1, deadline=seconds),
        lambda: partition.lost(wait=seconds),
        lambda: partition.put(tokens([1]), deadline=seconds),
    ):
        with pytest.raises(ContractError, match="2,000,000"):
            wait()


WRONG_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "a partition named ''"),
    ({"name": 3}, "a partition named 3"),
    ({"group_size": 10**12}, "group_size = 1000000000000"),
    ({"group_size": 1 << 70}, "from 1 to 65,536"),
    ({"columns": {"a": ColumnSchema("int32", (1 << 40, 1 << 70))}}, "at most 2,147,483,648 bytes travels"),
    ({"columns": {"": ColumnSchema("int32")}}, "give columns by their names"),
    ({"columns": {"a": "float32"}}, 'ColumnSchema("float32")'),
    ({"columns": {"a": ColumnSchema(np.int32)}}, "name it as numpy does: 'int32'"),  # type: ignore[arg-type]
    ({"columns": {"a": ColumnSchema(np.dtype("f4"))}}, "name it as numpy does: 'float32'"),  # type: ignore[arg-type]
    ({"columns": {"a": ColumnSchema(3)}}, "name it as numpy does: 'float32'"),  # type: ignore[arg-type]
    ({"columns": {"a": ColumnSchema("int32", 3)}}, "give a tuple of int"),  # type: ignore[arg-type]
    ({"consumers": {"train": "tokens"}}, "what consumer 'train' of partition 'phase' reads is 'tokens'"),
    ({"consumers": {"train": {"tokens"}}}, "give a tuple of names"),
    ({"consumers": {}}, "nobody reads partition 'phase'"),
    ({"consumers": None}, "consumers of partition 'phase' are None"),
    ({"writes": {"score": "reward"}}, "what consumer 'score' of partition 'phase' writes is 'reward'"),
    ({"by_row": "score"}, "by_row of partition 'phase' is 'score'"),
    ({"group_size": "2"}, "group_size of partition 'phase' is '2'"),
    ({"length_of": None}, "length_of of partition 'phase' is None"),
    ({"columns": {"a": ColumnSchema("int32", ragged=1)}}, "ragged of column 'a' of partition 'phase' is 1"),  # type: ignore[arg-type]
    ({"columns": {"a": ColumnSchema("int32", by_content=None)}}, "by_content of column 'a'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("said", "answer"), WRONG_SPECS, ids=[answer for _, answer in WRONG_SPECS])
def test_a_partition_that_cannot_be_is_refused_before_anybody_hears_of_it(
    world: World, said: dict[str, Any], answer: str
) -> None:
    with pytest.raises(ContractError, match=re.escape(answer)):
        world.plane().create(spec(**said))
    assert not world.bytes_to


def test_a_partition_is_described_by_a_spec_and_lists_of_names_are_as_good_as_tuples(world: World) -> None:
    world.unit()
    with pytest.raises(ContractError, match="described by dict"):
        world.plane().create({"name": "phase"})
    partition = world.plane().create(spec(consumers={"score": ["tokens"]}))
    assert partition.spec.consumers == {"score": ("tokens",)}


WRONG_CALLS: list[Said] = [
    (lambda p: p.put([np.ones(1)]), ContractError, "put columns by name"),  # type: ignore[arg-type]
    (lambda p: p.put({"reward": [1.0]}), ContractError, "put numpy arrays"),  # type: ignore[dict-item]
    (lambda p: p.put({"reward": np.array([None])}), ContractError, "column 'reward' of a put has the dtype object"),
    (lambda p: p.put({"reward": np.array(["a"])}), ContractError, "only numbers and bool are kept"),
    (lambda p: p.put({"tokens": Ragged.from_arrays([])}), ContractError, 'Ragged.from_arrays(rows, dtype="int32")'),
    (lambda p: p.put(tokens([1]), rows=3), ContractError, "a list of int"),  # type: ignore[arg-type]
    (lambda p: p.put(tokens([1]), rows=[0.5]), ContractError, "a list of int"),  # type: ignore[list-item]
    (lambda p: p.drop(1), ContractError, "groups that are 1"),  # type: ignore[arg-type]
    (lambda p: p.lease("score", "1"), ContractError, "LeaseCall.groups"),  # type: ignore[arg-type]
    (lambda p: p.take("score", 1, columns="tokens"), ContractError, 'columns=["tokens"]'),
    (lambda p: p.take("score", 1, columns=5), ContractError, "the columns 5"),  # type: ignore[arg-type]
    (lambda p: p.lease("score", 1, order=5), ContractError, "order=5 cannot be called"),  # type: ignore[arg-type]
    (lambda p: p.first_batch("zz"), ContractError, "its consumers are score, train"),
    (lambda p: p.acknowledge(None), ContractError, "the Rows of lease or take"),  # type: ignore[arg-type]
    (lambda p: p.get(None), ContractError, "the Rows of lease or take"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "answer"), WRONG_CALLS, ids=[answer for *_, answer in WRONG_CALLS])
def test_a_call_that_means_nothing_is_refused_in_words(
    partition: Partition, call: Callable[[Partition], object], error: type[HeadraceError], answer: str
) -> None:
    with pytest.raises(error, match=re.escape(answer)):
        call(partition)
    assert partition.stats().rows == 0


@pytest.mark.parametrize("shards", [1, 2])
def test_a_column_that_is_one_number_is_refused_wherever_it_stands(shards: int) -> None:
    world = World(shards=shards)
    unit = world.unit()
    partition = world.plane().create(spec(columns={"a": COLUMNS["reward"], "b": COLUMNS["reward"]}, consumers=READS_AB))
    one, both = np.ones(1, np.float32), np.ones(2, np.float32)
    rows = np.concatenate([partition.put({"a": one}), partition.put({"a": one})])
    number = np.array(2, np.float32)
    for columns, known in (({"a": both, "b": number}, None), ({"b": number}, rows), ({"a": both, "b": number}, rows)):
        with pytest.raises(ContractError, match="column 'b' of a put is one number") as told:
            partition.put(columns, rows=known)
        assert "an entry for each row" in told.value.fix
        with pytest.raises(ContractError, match="column 'b' of a put is one number"):  # of another kind of client
            world.outcome(world.say(unit, "put", Put("phase", known, columns, 0), Noted))
    assert partition.stats().nbytes == one.nbytes * 2, "nothing was kept"
    world.close()


def test_rows_are_named_by_a_list_as_well_as_by_an_array(partition: Partition) -> None:
    rows = partition.put(tokens([1], [2, 3]))
    first, second = rows.tolist()
    assert partition.put({"reward": np.ones(1, np.float32)}, rows=[first]).tolist() == [first]
    partition.put({"reward": np.ones(1, np.float32)}, rows=range(second, second + 1))
    assert partition.lease("train", 2).rows.tolist() == rows.tolist()


def test_rows_that_never_were_are_no_rows_to_put_to(partition: Partition) -> None:
    (row,) = partition.put(tokens([1])).tolist()
    for stranger in (row + 1, -1):
        with pytest.raises(ContractError, match=f"partition 'phase' never had row {stranger}"):
            partition.put({"reward": np.ones(2, np.float32)}, rows=[row, stranger])
    partition.put({"reward": np.ones(1, np.float32)}, rows=[row])
    assert partition.lease("train", 1).rows.tolist() == [row], "what was right of them is kept, and put again ignored"


def test_an_old_partition_is_not_taken_for_another_of_its_name_though_it_looks_alike(
    world: World, partition: Partition
) -> None:
    partition.put(tokens([1]))
    plane = world.plane()
    plane.remove("phase")
    plane.create(spec()).put(tokens([2]))
    for use in (
        lambda: partition.put(tokens([1])),
        lambda: partition.lease("score", 1),
        lambda: partition.lease("score", 1, order=lambda ready: np.arange(len(ready.ids))),
        lambda: partition.lost(),
    ):
        with pytest.raises(ContractError, match="partition 'phase' is another by now: it was removed"):
            use()
    assert plane.partition("phase").stats().rows == 1


def test_a_snapshot_is_at_a_path_of_text_too(world: World, partition: Partition, tmp_path: Path) -> None:
    partition.put(tokens([1]))
    world.plane().snapshot(str(tmp_path / "snapshot"))
    assert (tmp_path / "snapshot").exists()
    for nowhere in (None, ""):
        with pytest.raises(ContractError, match=f"a snapshot at {nowhere!r}"):
            world.plane().restore(nowhere)


@pytest.mark.parametrize("address", ["", [], None, 5, [5]])
def test_a_data_plane_has_a_ledger(address: Any) -> None:
    with pytest.raises(ContractError, match=re.escape(f"a data plane whose ledger is {address!r}")):
        DataPlane(address)


def test_a_closed_data_plane_is_not_connected_anew(services: Services) -> None:
    services.unit()
    plane = services.plane()
    partition = plane.create(spec())
    partition.put(tokens([1]))
    held = partition.lease("score", 1)
    plane.close()
    for use in (
        lambda: plane.partition("phase"),
        lambda: partition.put(tokens([1])),
        lambda: partition.get(held),
        lambda: partition.acknowledge(held),
    ):
        with pytest.raises(WireError, match=r"the data plane of .* was closed"):
            use()


def test_threads_that_share_a_partition_are_told_to_have_one_each(services: Services) -> None:
    services.unit()
    partition, other = services.plane().create(spec()), services.plane().partition("phase")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(partition.lease, "score", 1)
        soon(lambda: other.stats().waiting["score"] == 1)
        with pytest.raises(ContractError, match="give each thread its own: a DataPlane"):
            partition.stats()
        other.put(tokens([1]))
        assert len(waits.result(30)) == 1
    assert partition.stats().leases == 1, "one after another they may"


SENT: list[tuple[Callable[[Partition], object], str]] = [
    (lambda p: p.put(tokens([1]), version=None), "Put.version"),  # type: ignore[arg-type]
    (lambda p: p.put(tokens([1]), version=1.5), "Put.version"),  # type: ignore[arg-type]
    (lambda p: p.put(tokens([1]), once=None), "Put.once"),  # type: ignore[arg-type]
    (lambda p: p.put(tokens([1]), once="\ud800"), r"put: '\ud800' is no text"),
    (lambda p: p.lease("score", "2"), ".groups"),  # type: ignore[arg-type]
    (lambda p: p.lease("score", 2, token_budget=None), ".token_budget"),  # type: ignore[arg-type]
    (lambda p: p.take("score", 1, columns=[1]), ".columns"),  # type: ignore[list-item]
    (lambda p: p.drop(np.array([0.0])), "Groups.groups"),  # type: ignore[arg-type]
    (lambda p: p.drop(np.zeros((1, 1), np.int64)), "Groups.groups"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("shards", [1, 2])
def test_what_a_service_cannot_read_is_its_caller_s_own_mistake_and_says_what_to_mend(
    tmp_path: Path, shards: int
) -> None:
    tmp_path.chmod(0o700)
    with closing(Services(tmp_path, shards=shards)) as services:
        services.unit()
        plane = services.plane()
        partition = plane.create(spec())
        for call, answer in [
            *SENT,
            (lambda _: plane.partition(None), "describe: a message of the wrong type"),  # type: ignore[arg-type]
            (lambda _: plane.partition("\ud800"), r"describe: '\ud800' is no text"),
            (lambda _: plane.create(spec(name="\ud800")), r"create: '\ud800' is no text"),
        ]:
            with pytest.raises(ContractError, match=re.escape(answer)) as told:
                call(partition)
            assert told.value.fix
        assert partition.stats().rows == 0


def test_a_shape_is_of_whole_numbers_of_any_kind(world: World) -> None:
    columns = {"a": ColumnSchema("int32", (np.int64(2), 3))}  # type: ignore[arg-type]
    assert world.plane().create(spec(columns=columns, consumers={"x": ("a",)})).spec.columns["a"].shape == (2, 3)


# ------------------------------------------------------------ streams


def test_a_stream_is_of_a_partition(services: Services) -> None:
    with pytest.raises(ContractError, match="connect of a stream gave a DataPlane") as told:
        Stream(services.plane, "train", step_groups=1)  # type: ignore[arg-type]
    assert 'DataPlane(address).partition("phase")' in told.value.fix


@pytest.mark.parametrize("groups", ["8", 1.5, None])
def test_a_step_is_a_number_of_groups(services: Services, groups: Any) -> None:
    with pytest.raises(ContractError, match="both are at least 1"):
        Stream(lambda: services.plane().partition("phase"), "train", step_groups=groups)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 0), (1, 1), (-1, 2), (0, "2")])
def test_a_rank_is_one_of_its_ranks(services: Services, rank: int, ranks: Any) -> None:
    with pytest.raises(ContractError, match=f"a stream of rank {rank} of {ranks}"):
        Stream(lambda: services.plane().partition("phase"), "train", step_groups=8, rank=rank, ranks=ranks)


def test_a_rank_hears_at_once_that_its_stream_was_closed(services: Services) -> None:
    services.unit()
    services.plane().create(spec()).put({**tokens([1]), "reward": np.ones(1, np.float32)})
    stream = Stream(lambda: services.plane().partition("phase"), "train", step_groups=1)
    list(stream.step())
    stream.close()
    for use in (lambda: list(stream.step()), stream.acknowledge):
        with pytest.raises(RunError, match="the stream of train was closed"):
            use()
    with pytest.raises(ContractError, match="a wait of None seconds"):
        list(stream.step(deadline=None))  # type: ignore[arg-type]


def test_a_rank_is_told_who_is_silent_when_the_ledger_is_gone(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dataplane.partition_client.GRACE", 0.1)
    monkeypatch.setattr("headrace.dataplane.stream._TURN_SECONDS", 0.1)
    services.unit()
    services.plane().create(spec())
    with Stream(lambda: services.plane().partition("phase"), "train", step_groups=1) as stream:
        services.lose_ledger()
        with pytest.raises(SilenceError, match=r"no reply to lease from ipc://.*ledger-0.*1 groups for train"):
            list(stream.step())


def test_values_may_take_longer_to_come_than_rows_are_waited_for(world: World) -> None:
    """A stream asks for rows twice a second, and a micro-batch may be gigabytes."""
    unit = world.unit()
    partition = world.plane().create(spec())
    partition.put(tokens([1]))
    world.delay(unit, "get", 2.0)
    held, batch = partition.take("score", 1, deadline=0.5)
    assert batch.ragged("tokens")[0].tolist() == [1]
    with pytest.raises(DeadlineError, match="storage unit 1 does not answer, and the ledger has not given it up"):
        partition.get(held, deadline=0.5)
