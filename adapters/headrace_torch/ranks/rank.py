"""The process of a rank above 0: ``python -m headrace_torch.ranks.rank SOCKET``.

It does what it is told until nobody is there.

Invariant: after a failure that the ranks have not agreed on it says so and ends, since it is out of step.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

import msgspec

from headrace.errors import EngineError, HeadraceError
from headrace.wire import Failure, encode, to_failure
from headrace_torch.ranks.channel import Channel, Closed
from headrace_torch.ranks.orders import DONE, Done, Order, Setup, Shard, shard_class

log = logging.getLogger("headrace.rank")


def main(descriptor: int) -> int:
    """Entry point: the number of the socket's inherited descriptor. Exit status 1 after a failure."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the whole group: rank 0 ends first, in its own time
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        _serve(channel)
    except Closed:
        pass
    except Exception as error:  # whatever it was, rank 0 must hear of it
        log.exception("this rank ends")
        channel.send(encode(_failure(error)))
        return 1
    return 0


def _serve(channel: Channel) -> None:
    setup: Setup = channel.receive(Setup)
    sys.path[:] = setup.import_path
    from headrace_torch.ranks.group import RefusedOrderError

    make = shard_class(setup.shard)
    setup = msgspec.structs.replace(setup, settings=msgspec.convert(setup.settings, make.Settings))
    channel.send(encode(DONE))  # here: from now on rank 0 may wait for this rank in collectives
    shard: Shard = make(setup)
    channel.send(encode(DONE))
    while True:
        order: Order = channel.receive(Order)
        try:
            reply: Done | Failure = shard.do(order)
        except RefusedOrderError as refused:
            reply = DONE if refused.__cause__ is None else _failure(refused.__cause__, rank=setup.rank)
        channel.send(encode(reply))


def _failure(error: BaseException, *, rank: int | None = None) -> Failure:
    if isinstance(error, HeadraceError):
        return to_failure(0, error)
    who = "" if rank is None else f"rank {rank}: "
    return to_failure(0, EngineError(f"{who}{type(error).__name__}: {error}", fix="the node's log has the traceback"))


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: there is nothing to tidy up that ends with the process anyhow
