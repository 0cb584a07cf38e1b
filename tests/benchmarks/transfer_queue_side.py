"""TransferQueue's side of ``data_plane.py``, which starts it in an interpreter that has ``transfer_queue``.

    python tests/benchmarks/transfer_queue_side.py FOLDER

``FOLDER/NAME.npz`` holds the columns of one put; ``NAME_offsets`` beside a column says that it is ragged. Every line
of input asks for one round, and every line of output answers:

    {"name": "batch", "repeat": 100, "amount": 64}    {"put": RATE, "get": RATE}     amount a second
    {"name": "latency", "repeat": 100}                {"latency": SECONDS}           p50

The first line of output says that it is ready: ``{"version": VERSION}``. It ends when its input does.

A get is ``get_meta`` and ``get_data``; rows are cleared after the round. Its controller runs with ``polling_mode``,
without which a consumer that waits holds up every other request: so a consumer asks again every ``POLL_SECONDS``.
(No ``transfer_queue.py``: Ray puts this folder on the path of its workers, which would import that.)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from timing import latency, rate

UNITS = 2
CONSUMER = "train"
POLL_SECONDS = 0.001
LARGE_ROW_BYTES = 1 << 20
SETTINGS = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": UNITS}},
}


def start(folder: Path) -> Any:
    """Ray, TransferQueue's controller and its storage units; their files go into ``folder``. Settings to connect."""
    ray.init(
        num_cpus=UNITS + 2,  # slots, of which each actor of TransferQueue takes one
        include_dashboard=False,
        object_store_memory=100_000_000,  # unused: the units keep the rows
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=str(folder),
    )
    return transfer_queue.init(OmegaConf.create(SETTINGS))


def connect(name: str, settings: Any) -> transfer_queue.TransferQueueClient:
    """One thread's client."""
    client = transfer_queue.TransferQueueClient(name, settings.controller.zmq_info)
    client.initialize_storage_manager("SimpleStorage", settings.backend.SimpleStorage)
    return client


def columns(file: Path) -> TensorDict:
    """One put, each column in the form that TransferQueue moves fastest."""
    arrays: dict[str, np.ndarray[Any, Any]] = dict(np.load(file))
    tensors = {
        name: column(torch.from_numpy(values), arrays.get(f"{name}_offsets"))
        for name, values in arrays.items()
        if not name.endswith("_offsets")
    }
    return TensorDict(tensors, batch_size=len(next(iter(tensors.values()))))


def column(values: torch.Tensor, offsets: np.ndarray[Any, Any] | None) -> torch.Tensor:
    """Plain where all rows are equally long, which is one frame; nested where rows are large, which saves a copy."""
    if offsets is None:
        return (
            values if values[0].nbytes < LARGE_ROW_BYTES else torch.nested.as_nested_tensor(values, layout=torch.jagged)
        )
    lengths = np.diff(offsets)
    if (lengths == lengths[0]).all():
        return values.reshape(len(lengths), -1)
    return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets))


def taker(client: Any, partition: str, data: TensorDict) -> Callable[[], TensorDict]:
    """Takes as many rows as one put of ``data`` has; asks until they are there."""
    fields, rows = list(data.keys()), data.batch_size[0]

    def take() -> TensorDict:
        while True:
            meta = client.get_meta(
                data_fields=fields, batch_size=rows, partition_id=partition, mode="fetch", task_name=CONSUMER
            )
            if meta.size:
                return client.get_data(meta)
            time.sleep(POLL_SECONDS)  # its API has no other way to wait

    return take


def measure(client: Any, data: TensorDict, request: dict[str, Any]) -> dict[str, float]:
    name, repeat, amount = request["name"], request["repeat"], request["amount"]
    take = taker(client, name, data)
    rates = {
        "put": rate(amount, repeat, lambda: client.put(data=data, partition_id=name)),
        "get": rate(amount, repeat, take),
    }
    client.clear_partition(name)
    return rates


def measure_latency(client: Any, consumer: Any, data: TensorDict, request: dict[str, Any]) -> dict[str, float]:
    name = request["name"]
    take = taker(consumer, name, data)
    seconds = latency(lambda: client.put(data=data, partition_id=name), take, request["repeat"])
    client.clear_partition(name)
    return {"latency": seconds}


def answer(request: dict[str, Any], folder: Path, client: Any, consumer: Any) -> dict[str, float]:
    data = columns(folder / f"{request['name']}.npz")
    if request["name"] == "latency":
        return measure_latency(client, consumer, data, request)
    return measure(client, data, request)


def main() -> int:
    """Answer the rounds that stdin asks for."""
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    settings = start(folder / "ray")
    client, consumer = connect("producer", settings), connect("consumer", settings)
    print(json.dumps({"version": transfer_queue.__version__}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), folder, client, consumer)), file=answers)
    for used in (client, consumer):
        used.close()
    transfer_queue.close()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
