"""Messages between processes: typed, bounded, without pickle, and nobody unauthenticated.

``rpc``, ``Server`` and ``Client`` carry calls; ``encode`` and ``decode`` turn values into frames for whoever
owns a socket of another kind. The room knows no roles.
"""

from headrace.wire.address import ipc_address, tcp_address
from headrace.wire.checksum import manifest_digest, tensor_checksum, tensor_info
from headrace.wire.client import Client
from headrace.wire.codec import decode, encode
from headrace.wire.keys import Keys
from headrace.wire.limits import Limits
from headrace.wire.methods import rpc
from headrace.wire.server import Server

__all__ = [
    "Client",
    "Keys",
    "Limits",
    "Server",
    "decode",
    "encode",
    "ipc_address",
    "manifest_digest",
    "rpc",
    "tcp_address",
    "tensor_checksum",
    "tensor_info",
]
