"""Messages between processes: typed, bounded, without pickle, and nobody unauthenticated.

``rpc``, ``Server`` and ``Client`` carry calls; a run's ``Network`` makes them. For transports that own a socket of
another kind there are ``encode`` and ``decode``, values to frames and back, and sockets made as safe as those of calls.
The room knows no roles.
"""

from headrace.wire.address import ipc_address, tcp_address
from headrace.wire.arrays import array_bytes
from headrace.wire.blocking import BlockingClient, Meanwhile, Sent, first_answered
from headrace.wire.checksum import manifest_digest, tensor_checksum, tensor_info
from headrace.wire.client import Client
from headrace.wire.codec import decode, encode
from headrace.wire.failures import from_failure, to_failure
from headrace.wire.gate import Gate
from headrace.wire.keys import Keys
from headrace.wire.limits import DEFAULT_LIMITS, Limits
from headrace.wire.messages import Failure, check_deadline
from headrace.wire.methods import rpc
from headrace.wire.network import Network
from headrace.wire.own_directory import OwnDirectory, unlocked, write_private
from headrace.wire.promise import Promise
from headrace.wire.record_file import RecordWriter, read_records, sync
from headrace.wire.refusal import RefusedError
from headrace.wire.server import Server
from headrace.wire.sockets import bind_socket, bound_address, close_context, connect_socket, open_context

__all__ = [
    "DEFAULT_LIMITS",
    "BlockingClient",
    "Client",
    "Failure",
    "Gate",
    "Keys",
    "Limits",
    "Meanwhile",
    "Network",
    "OwnDirectory",
    "Promise",
    "RecordWriter",
    "RefusedError",
    "Sent",
    "Server",
    "array_bytes",
    "bind_socket",
    "bound_address",
    "check_deadline",
    "close_context",
    "connect_socket",
    "decode",
    "encode",
    "first_answered",
    "from_failure",
    "ipc_address",
    "manifest_digest",
    "open_context",
    "read_records",
    "rpc",
    "sync",
    "tcp_address",
    "tensor_checksum",
    "tensor_info",
    "to_failure",
    "unlocked",
    "write_private",
]
