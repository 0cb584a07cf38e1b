"""Run by an interpreter that has only the wheel: every package is in it, and core brings no engine along."""

import importlib
import sys
import tomllib
from pathlib import Path

HEAVY = ("torch", "transformers", "ray", "vllm", "sglang", "tokenizers", "safetensors", "plotly")


def main() -> None:
    """Exit with what is wrong, or print the verdict."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    packages = [Path(path).name for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    for name in packages:
        importlib.import_module(name)
    for room in (
        "cli",
        "config",
        "contract",
        "flow",
        "graph",
        "hooks",
        "observe",
        "registry",
        "run",
        "services",
        "wire",
    ):
        importlib.import_module(f"headrace.{room}")
    found = sorted(set(HEAVY) & set(sys.modules))
    if found:
        sys.exit(f"importing headrace brings along {', '.join(found)}")
    print(f"the wheel holds {len(packages)} packages and needs no engine")


if __name__ == "__main__":
    main()
