"""All of it at once: the data plane, a producer, a scorer and a trainer, each a process. python run.py"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """How the first failed that did; 0 when none did."""
    with tempfile.TemporaryDirectory() as directory, start("serve.py", directory, stdout=subprocess.PIPE) as plane:
        assert plane.stdout is not None
        address = plane.stdout.readline().strip()  # it says where it serves, once it does
        programs = [start(name, address) for name in ("train.py", "score.py", "generate.py")]
        codes = [program.wait() for program in programs]
        plane.terminate()
    return next(filter(None, codes), plane.returncode)


def start(program: str, argument: str, stdout: int | None = None) -> subprocess.Popen[str]:
    """Of this directory."""
    return subprocess.Popen([sys.executable, HERE / program, argument], stdout=stdout, text=True)


if __name__ == "__main__":
    sys.exit(main())
