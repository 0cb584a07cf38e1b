"""Text to token ids: nothing is lost on the way in, nothing hidden on the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from headrace.errors import ConfigError
from headrace_environments.tokenizer import TextTokenizer

ModelMaker = Callable[..., Path]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(["<eos>", "<bos>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    return tokenizer


def test_prompt_and_answer_are_the_characters_ids_and_the_answer_ends_with_eos(model: Path) -> None:
    tokenizer = TextTokenizer.load(str(model))
    assert tokenizer.prompt("701").tolist() == [10, 3, 4]
    assert tokenizer.answer("17").tolist() == [4, 10, 2]
    assert tokenizer.prompt("7").dtype == np.int32
    assert (tokenizer.eos, tokenizer.stops) == (2, (2,))


def test_decoding_gives_an_answer_back_without_its_stop_token(model: Path) -> None:
    tokenizer = TextTokenizer.load(str(model))
    assert tokenizer.decode(tokenizer.answer("3 + 4")) == "3 + 4"
    assert tokenizer.decode(np.array([4, 10])) == "17"
    assert tokenizer.decode(np.array([], dtype=np.int32)) == ""


def test_a_special_token_inside_an_answer_is_not_hidden(model: Path) -> None:
    tokenizer = TextTokenizer.load(str(model))
    assert tokenizer.decode(np.array([4, 0, 10, 2])) == "1<pad>7"


def test_an_id_without_a_token_is_not_hidden(model: Path) -> None:
    tokenizer = TextTokenizer.load(str(model))
    assert tokenizer.decode(np.array([4, 63, 10, 2])) == "1\ufffd7"


def test_a_fresh_model_reads_its_alphabet_after_a_bos(tmp_path: Path) -> None:
    from headrace_torch.scratch import create_model

    table = {"architecture": "llama", "alphabet": "0123=", "hidden_size": 8, "layers": 1, "heads": 2}
    create_model(str(tmp_path / "m"), settings={**table, "intermediate_size": 8, "max_length": 16}, seed=0)
    tokenizer = TextTokenizer.load(str(tmp_path / "m"))
    assert tokenizer.prompt("13=").tolist() == [1, 4, 6, 7]
    assert tokenizer.answer("31").tolist() == [6, 4, 2]
    assert tokenizer.decode(tokenizer.answer("31")) == "31"
    assert tokenizer.stops == (2,)


def test_a_missing_character_is_named(model: Path) -> None:
    tokenizer = TextTokenizer.load(str(model))
    with pytest.raises(ConfigError, match="vocabulary lacks 'A', 'é', needed for 'éA7'"):
        tokenizer.prompt("éA7")


def test_a_missing_character_is_named_where_the_vocabulary_would_drop_it(make_model: ModelMaker) -> None:
    silent = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2}, []))
    tokenizer = TextTokenizer.load(str(make_model(silent)))
    assert tokenizer.prompt("ab").tolist() == [1, 2]
    with pytest.raises(ConfigError, match="vocabulary lacks ' ', 'c', needed"):
        tokenizer.prompt("a bc")


def test_a_missing_character_is_named_where_the_vocabulary_has_an_unknown_token(make_model: ModelMaker) -> None:
    unknown = Tokenizer(models.BPE({"<eos>": 0, "<unk>": 1, "a": 2}, [], unk_token="<unk>", fuse_unk=True))
    tokenizer = TextTokenizer.load(str(make_model(unknown)))
    with pytest.raises(ConfigError, match="vocabulary lacks 'x', 'y', needed"):
        tokenizer.prompt("axyxa")


def test_a_word_that_no_characters_spell_is_named_whole(make_model: ModelMaker) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = TextTokenizer.load(str(make_model(words)))
    assert tokenizer.prompt("a b").tolist() == [2, 3]
    with pytest.raises(ConfigError, match="vocabulary lacks 'ab', needed"):
        tokenizer.prompt("a ab")


def test_a_byte_level_vocabulary_spells_everything(make_model: ModelMaker) -> None:
    tokenizer = TextTokenizer.load(str(make_model(byte_level())))
    text = "é 日本\n\t🙂"
    assert tokenizer.decode(tokenizer.answer(text)) == text


def test_what_the_tokenizer_puts_before_a_text_starts_every_prompt_and_no_answer(make_model: ModelMaker) -> None:
    source = byte_level()
    source.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 0)]
    )
    tokenizer = TextTokenizer.load(str(make_model(source)))
    assert tokenizer.prompt("ab").tolist()[0] == 1
    assert len(tokenizer.prompt("ab")) == 3
    assert tokenizer.answer("ab").tolist() == [*tokenizer.prompt("ab").tolist()[1:], 0]


def test_add_bos_token_starts_every_prompt(make_model: ModelMaker) -> None:
    settings = {"eos_token": {"content": "<eos>"}, "bos_token": {"content": "<bos>"}, "add_bos_token": True}
    tokenizer = TextTokenizer.load(str(make_model(byte_level(), settings=settings)))
    assert tokenizer.prompt("a").tolist()[0] == 1
    named = {**settings, "add_bos_token": False}
    assert len(TextTokenizer.load(str(make_model(byte_level(), settings=named))).prompt("a")) == 1


def test_prompts_are_those_of_transformers(make_model: ModelMaker) -> None:
    from transformers import PreTrainedTokenizerFast

    source = byte_level()
    source.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    folder = make_model(source)
    peer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<eos>", bos_token="<bos>")
    assert TextTokenizer.load(str(folder)).prompt("2 + 2 =").tolist() == peer("2 + 2 =")["input_ids"]


def test_every_token_that_the_model_stops_at_ends_an_answer(make_model: ModelMaker) -> None:
    folder = make_model(byte_level(), generation={"eos_token_id": [0, 7]})
    tokenizer = TextTokenizer.load(str(folder))
    assert (tokenizer.eos, tokenizer.stops) == (0, (0, 7))
    assert tokenizer.decode(np.array([40, 7])) == tokenizer.decode(np.array([40, 0]))


def test_a_saved_length_limit_does_not_cut_prompts(make_model: ModelMaker) -> None:
    source = byte_level()
    source.enable_truncation(2)
    source.enable_padding(length=9)
    assert len(TextTokenizer.load(str(make_model(source))).prompt("abcd")) == 4


def test_an_answer_that_does_not_come_back_from_its_tokens_is_refused(make_model: ModelMaker) -> None:
    spaced = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}))
    spaced.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = TextTokenizer.load(str(make_model(spaced)))
    with pytest.raises(ConfigError, match="turns 'ab' into 'a b'") as caught:
        tokenizer.check(["ab"], origin="data.jsonl")
    assert caught.value.origin == "tokenizer.json, for data.jsonl"


def test_a_directory_without_tokenizer_is_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json") as caught:
        TextTokenizer.load(str(tmp_path))
    assert "model.scratch" in caught.value.fix


def test_a_broken_tokenizer_file_is_refused(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        TextTokenizer.load(str(model))


def test_a_model_without_end_of_sequence_is_refused(make_model: ModelMaker) -> None:
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        TextTokenizer.load(str(make_model(byte_level(), settings={"pad_token": "<eos>"})))


def test_a_prompt_without_tokens_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="a prompt has no tokens"):
        TextTokenizer.load(str(model)).prompt("")
