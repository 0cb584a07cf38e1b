"""What the trainer cannot write is named, with what to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.errors import RunError
from headrace.registry import PluginSpec
from headrace.services.messages import ScratchModel, TrainerSetup
from headrace.services.node_messages import NodeSpec
from headrace.services.trainer import TrainerService
from headrace.wire import Network

FULL = """
from pathlib import Path

from headrace.testing import FakeTrainingEngine


class Full(FakeTrainingEngine):
    @classmethod
    def create_model(cls, path, *, settings, seed):
        Path("/dev/full").write_text("weights")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A private directory, as a run has, with the plugin."""
    tmp_path.chmod(0o700)
    (tmp_path / "full.py").write_text(FULL)
    return tmp_path


async def test_a_model_that_a_full_disk_refuses_is_said_to_be_so(folder: Path) -> None:
    setup = TrainerSetup(
        transport=PluginSpec(role="weight_transport", use="zmq"),
        ledger=f"ipc://{folder}/ledger",
        threads=1,
        seed=0,
        dumps="",
    )
    spec = NodeSpec(
        name="trainer",
        role="trainer",
        start=0,
        controller="ipc://nowhere",
        network=Network.create(str(folder)),
        setup=msgspec.msgpack.encode(setup),
    )
    trainer = TrainerService(spec)
    engine = PluginSpec(role="training_engine", use="./full.py:Full", directory=str(folder))
    try:
        with pytest.raises(RunError, match="initial cannot be written: No space left on device") as caught:
            await trainer.create_model(ScratchModel(engine=engine, path=str(folder / "initial"), settings={}, seed=0))
    finally:
        await trainer.close()
    assert caught.value.origin == "node trainer"
    assert "free disk space" in caught.value.fix
