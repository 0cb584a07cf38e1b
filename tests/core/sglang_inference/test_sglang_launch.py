"""What a server is started with, and what is refused before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import EngineError, PluginError
from headrace_sglang import server
from headrace_sglang.attaching import Attachment, require_arguments
from headrace_sglang.inference import SglangInferenceEngine, SglangInferenceSettings
from headrace_sglang.launch import OWN, served_as


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize("cuda", [True, False])
def test_stand_ins_are_on_the_path_where_there_is_no_cuda_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    arguments = server.prepare({"dtype": "float32", "mem_fraction_static": 0.2})
    assert (server.STAND_INS in sys.path) is not cuda
    assert (server.STAND_INS in os.environ.get("PYTHONPATH", "")) is not cuda
    assert (arguments.get("device") == "cpu") is not cuda
    assert arguments["mem_fraction_static"] == 0.2


def test_a_stand_in_can_be_imported_and_says_what_it_is_when_it_is_used() -> None:
    code = (
        "import torchvision.transforms.v2.functional as deep, torchvision.ops\n"
        "from torchvision.transforms import Compose, InterpolationMode\n"
        "assert InterpolationMode.BICUBIC and deep.resize\n"
        "import sgl_kernel, torch\n"
        "keys, values = [torch.arange(4.0)], [torch.arange(4.0) * 2]\n"
        "sgl_kernel.copy_all_layer_kv_cache_cpu(keys, values, torch.tensor([3]), torch.tensor([0]))\n"
        "assert (keys[0][0], values[0][0]) == (3.0, 6.0)\n"
        "for use in (lambda: Compose([]), lambda: sgl_kernel.top_k(1)):\n"
        "    try: use()\n"
        "    except (RuntimeError, NotImplementedError) as error: print(error)\n"
        "try: import sgl_kernel.scalar_type\n"
        "except ImportError: print('no package')\n"
    )
    environment = {**os.environ, "PYTHONPATH": server.STAND_INS}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "this environment of SGLang is for text: it has no torchvision",
        "sgl_kernel.top_k is a kernel for GPUs, and this environment of SGLang is for CPUs",
        "no package",
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slots": 0}, "slots must be 1 to"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"kv_tokens": 6}, "kv_tokens must be more than 6"),
        ({"engine": {"dtype": "half", "tp_size": 2}}, "engine must not set dtype:"),
        ({"address": "http://10.0.0.7:30000"}, "of a server on this machine"),
        ({"address": "127.0.0.1:30000"}, "address must be http"),
        ({"address": "http://127.0.0.1:30000", "kv_tokens": 100}, "for a server that is started"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SglangInferenceSettings(**settings)


def test_an_interpreter_without_sglang_is_refused_unless_the_server_is_there_already(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sglang").mkdir()  # looks like a package where the command is given
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(PluginError, match="needs SGLang") as refused:
        SglangInferenceEngine.preflight(SglangInferenceSettings(), directory=".", origin=str)
    assert "headrace env create sglang" in refused.value.fix
    there = SglangInferenceSettings(address="http://127.0.0.1:30000")
    SglangInferenceEngine.preflight(there, directory=".", origin=str)


def test_a_server_that_was_started_otherwise_is_told_what_it_needs() -> None:
    expected = served_as(slots=4, length=100, dtype="float32")
    require_arguments({**expected, "max_running_requests": 8}, expected, "http://127.0.0.1:30000")
    with pytest.raises(EngineError, match=r"serves with \{'sampling_backend': 'pytorch'\}") as refused:
        require_arguments({**expected, "sampling_backend": "pytorch"}, expected, "http://127.0.0.1:30000")
    assert "--sampling-backend headrace --skip-tokenizer-init" in refused.value.fix
    assert set(expected) <= OWN


async def test_a_server_is_one_instances_at_a_time() -> None:
    addresses = ("http://127.0.0.1:1", "http://localhost:2")
    first, second = Attachment(addresses), Attachment(addresses)
    assert (first.address, second.address) == addresses
    with pytest.raises(EngineError, match="is another instance's") as refused:
        Attachment(addresses)
    assert "for each instance" in refused.value.fix
    await first.close()
    third = Attachment(addresses)
    assert third.address == addresses[0]
    await third.close()
    await second.close()
