"""SGLang's server as a child of the node: ``python -m headrace_sglang.server PARENT``, its arguments as JSON on stdin,
where no other user can read the key among them.

Where torch has no CUDA, SGLang is told to compute with torch on the CPU, and finds the modules that it imports only for
GPUs in :mod:`headrace_sglang.stand_ins`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from headrace.process import die_with_parent

STAND_INS = str(Path(__file__).parent / "stand_ins")
ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "mem_fraction_static": 0.05,
    "sleep_on_idle": True,
}
"""Arguments on a CPU that are not given otherwise: else SGLang takes a GPU for granted, most of the memory for keys and
values, and a core while it waits."""
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling what is small takes longer than computing it
}


def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``ServerArgs``, and an environment for this process and those it starts, as the machine has it."""
    import torch

    if torch.cuda.is_available():
        return arguments
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, STAND_INS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_INS, os.environ.get("PYTHONPATH")]))
    return {**ON_CPU, **arguments}


def main(parent: int) -> None:
    """Serve until killed."""
    die_with_parent(parent)
    arguments = prepare(json.load(sys.stdin))

    from sglang.srt.plugins import load_plugins

    load_plugins()  # before arguments are looked at: they name what plugins bring

    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**arguments))


if __name__ == "__main__":
    main(int(sys.argv[1]))
