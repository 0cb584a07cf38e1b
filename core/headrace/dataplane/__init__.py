"""The data plane: rows stream between the stages of a run, each given to each consumer exactly once.

A *partition* is a table of rows × columns with its consumers. A *storage unit* keeps column values and never knows who
reads them; the *ledger* knows what is where, who may read it and who has it on lease, and never sees a value. Producers
and consumers talk to both: ``put`` goes to a unit, which tells the ledger before it answers; ``lease`` is answered by
the ledger, and the values are then fetched from the units. Several ledgers can each own groups of a data plane
(``shards``), and all of it can be written to a file and brought back (``snapshot``).

A run makes its own. To have one alone, serve the ledger in a process, with a storage of its own or with further units
(:mod:`headrace.dataplane.serve`), and talk to it from any other; docs/data_plane.md says more::

    until_stopped(serve_ledger(ipc_address(directory, "ledger"), MemoryStorage(None)))

    with_tokens = {"tokens": ColumnSchema("int32", ragged=True)}
    partition = DataPlane(address).create(PartitionSpec("phase", with_tokens, {"train": ("tokens",)}))
    partition.put({"tokens": Ragged.from_arrays(answers)})
    held, batch = partition.take("train", 32, at_least=1)
    partition.acknowledge(held)
"""

from headrace.dataplane.async_plane import AsyncPlane
from headrace.dataplane.consumer import AsyncConsumer
from headrace.dataplane.ledger import LedgerService
from headrace.dataplane.links import RemoteLedger
from headrace.dataplane.messages import ColumnSchema, Note, Noted, PartitionSpec, Share
from headrace.dataplane.ordering import Candidates, Order
from headrace.dataplane.partition import PartitionLedger
from headrace.dataplane.partition_client import Partition
from headrace.dataplane.plane import DataPlane
from headrace.dataplane.rows import Rows
from headrace.dataplane.stream import Stream
from headrace.dataplane.unit import UnitService

__all__ = [
    "AsyncConsumer",
    "AsyncPlane",
    "Candidates",
    "ColumnSchema",
    "DataPlane",
    "LedgerService",
    "Note",
    "Noted",
    "Order",
    "Partition",
    "PartitionLedger",
    "PartitionSpec",
    "RemoteLedger",
    "Rows",
    "Share",
    "Stream",
    "UnitService",
]
