"""Benchmarks are scripts: they find each other because a script's folder is on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
