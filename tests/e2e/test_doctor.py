"""`headrace doctor` without a job, as a person gives it: every installed engine is tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_installed_engine_is_tried_and_one_that_is_not_set_up_is_no_failure(tmp_path: Path) -> None:
    for name in ("sglang", "vllm"):
        (tmp_path / name).mkdir()  # looks like a package where the command is given
    command = [sys.executable, "-m", "headrace", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for engine in ("torch (inference_engine)", "torch (training_engine)", "fsdp (training_engine)"):
        assert f"{engine}: works\n" in done.stdout
    for engine in ("sglang", "vllm"):
        assert f"{engine} (inference_engine): is not set up\n" in done.stdout
        assert f"  headrace env create {engine}\n" in done.stdout
        assert f"--set rollout.python={tmp_path}/venvs/{engine}/bin/python\n" in done.stdout
