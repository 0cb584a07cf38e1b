"""Run by an interpreter that has only the wheel: every package is in it, no engine is needed to look at plugins, and
a job whose engine is absent is refused with the command that brings it.
"""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "ray", "vllm", "sglang", "tokenizers", "safetensors", "plotly")
ROOMS = (
    "cli",
    "config",
    "contract",
    "engines",
    "flow",
    "graph",
    "hooks",
    "observe",
    "registry",
    "run",
    "services",
    "wire",
)


def main() -> None:
    """Exit with what is wrong, or print the verdict."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [Path(path).name for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    for name in [*packages, *(f"headrace.{room}" for room in ROOMS)]:
        importlib.import_module(name)
    plugins = load_every_plugin()
    if found := sorted(set(HEAVY) & set(sys.modules)):
        sys.exit(f"importing headrace and its plugins brings along {', '.join(found)}")
    refuse_a_job_without_its_engine()
    say_how_engines_are_set_up()
    print(f"the wheel holds {len(packages)} packages; its {plugins} plugins are loaded without an engine")


def load_every_plugin() -> int:
    """How many there are."""
    from headrace.registry import listing, load

    found = listing()
    for item in found:
        load(item.role, item.name)
    return len(found)


def refuse_a_job_without_its_engine() -> None:
    """The demo needs torch, which is not here."""
    command = [Path(sys.executable).parent / "headrace", "check", ROOT / "examples" / "sort_symbols" / "job.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 2 or 'pip install "headrace[torch]"' not in done.stderr or "Traceback" in done.stderr:
        sys.exit(f"a job without its engine should be refused with the fix, not with: {done.stdout}{done.stderr}")


def say_how_engines_are_set_up() -> None:
    """Each is missing here, which is no failure, and told with commands; the locks are in the wheel."""
    from headrace.registry import listing, load

    command = [Path(sys.executable).parent / "headrace", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["engines"]
    if done.returncode != 0 or any(each["status"] != "missing" or not each["commands"] for each in found):
        sys.exit(f"engines that are missing should be told with the commands that set them up: {done.stdout}")
    setups = [load(each.role, each.name).setup() for each in listing() if each.role.endswith("_engine")]
    if absent := [setup.lock for setup in setups if setup is not None and not Path(setup.lock).is_file()]:
        sys.exit(f"the wheel lacks {', '.join(absent)}")


if __name__ == "__main__":
    main()
