"""A folder that stands for a pretrained model which can chat: its tokenizer and template, and no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<eos>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_chat_model(folder: Path, **config: object) -> Path:
    """Every byte is a token. ``config``: what its ``config.json`` says; returns ``folder``."""
    words = {token: number for number, token in enumerate([END, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
