"""Tokenizers from folders and GGUF metadata: ids as transformers gives them, bytes of every token, refusals."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import transformers
from tests import vocabularies
from tests.texts import LINES, mixed_lines
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import ContextLengthExceeded, InvalidRequest, TokenizerError
from octavo.loader.gguf_tokenizer import build_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer.from_gguf(vocabularies.byte_level())


@pytest.fixture(scope="module")
def scored():
    return Tokenizer.from_gguf(vocabularies.scored())


@pytest.fixture
def folder(tmp_path):
    """Writes a model folder: a byte-level tokenizer.json and the configuration that is given."""

    def write(config=None, change=None, **files):
        build_tokenizer(vocabularies.byte_level()).tokenizer.save(str(tmp_path / "tokenizer.json"))
        if change is not None:
            content = json.loads((tmp_path / "tokenizer.json").read_text())
            change(content)
            (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
            )
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


@pytest.mark.parametrize(
    "config",
    [
        None,
        NAMED,
        NAMED | {"add_bos_token": False},
        NAMED | {"eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"}},
        NAMED | {"bos_token": "<think>"},
    ],
)
def test_a_folder_gives_the_ids_and_texts_of_transformers(folder, config):
    path = folder(config)
    ours = Tokenizer.from_folder(path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    for line in mixed_lines(80):
        for add_special_tokens in (True, False):
            ids = ours.encode(line, add_special_tokens)
            assert ids == theirs.encode(line, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.pad_token_id == theirs.pad_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("has_bos", [False, True])
def test_bos_and_eos_that_the_config_wants_are_added_once(folder, has_bos):
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [*([bos] if has_bos else []), {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    for flags, before, after in [
        ({}, [0] * has_bos, []),
        ({"add_bos_token": False}, [0] * has_bos, []),
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
    ]:
        path = folder(NAMED | flags, change=lambda content: content.update(post_processor=template))
        tokenizer = Tokenizer.from_folder(path)
        for text in ("", "Hello"):
            plain = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.encode(text) == [*before, *plain, *after]
        assert tokenizer.adds_bos is (before == [0])


def test_tokens_that_only_the_config_knows_get_their_ids(folder):
    size = len(vocabularies.byte_level()["tokenizer.ggml.tokens"])
    entry = {"content": "<tool>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = Tokenizer.from_folder(folder({"added_tokens_decoder": {str(size): entry}}))
    assert tokenizer.encode("a<tool>")[-1] == size
    assert tokenizer.is_special(size)
    with pytest.raises(TokenizerError, match=rf"'<tool>' is number {size}, but {size + 7} in tokenizer_config.json"):
        Tokenizer.from_folder(folder({"added_tokens_decoder": {str(size + 7): entry}}))
    with pytest.raises(TokenizerError, match="bad entry at '5'"):
        Tokenizer.from_folder(folder({"added_tokens_decoder": {"5": "x"}}))


def test_the_special_tokens_map_counts_where_the_config_is_silent(folder):
    path = folder({"eos_token": "<|endoftext|>"}, special_tokens_map={"eos_token": "<think>", "pad_token": "<think>"})
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.token_text(tokenizer.eos_token_id) == "<|endoftext|>"
    assert tokenizer.token_text(tokenizer.pad_token_id) == "<think>"


def test_a_named_token_outside_of_the_vocabulary_is_none(folder):
    tokenizer = Tokenizer.from_folder(folder(NAMED | {"pad_token": "[PAD]"}))
    assert tokenizer.pad_token_id is None
    with pytest.raises(TokenizerError, match=r"add_bos_token, but its bos_token '\[BOS\]' is not in the vocabulary"):
        Tokenizer.from_folder(folder({"bos_token": "[BOS]", "add_bos_token": True}))


def test_truncation_and_padding_of_the_file_are_off(folder):
    def cut(content):
        content["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        content["padding"] = {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }

    plain = Tokenizer.from_folder(folder())
    cutting = Tokenizer.from_folder(folder(change=cut))
    for line in ("a", "a long line of many words"):
        assert cutting.encode(line) == plain.encode(line)


@pytest.mark.parametrize(
    ("decoder", "step"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "Fuse"),
        ({"type": "Strip", "content": " ", "start": 2, "stop": 0}, "only one leading space"),
    ],
)
def test_a_decoder_that_cannot_work_token_by_token_is_named(folder, decoder, step):
    with pytest.raises(TokenizerError, match=step):
        Tokenizer.from_folder(folder(change=lambda content: content.update(decoder=decoder)))


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_without_tokens_is_refused():
    with pytest.raises(TokenizerError, match="no tokens"):
        Tokenizer(RustTokenizer(models.BPE()))


@pytest.mark.parametrize("name", ["byte_level", "scored", "scored_without_prefix"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(name):
    tokenizer = Tokenizer.from_gguf(getattr(vocabularies, name)())
    for line in LINES:
        if name != "byte_level" and "▁" in line:
            continue
        data = b"".join(map(tokenizer.token_bytes, tokenizer.encode(line, add_special_tokens=False)))
        prefix = b" " if name == "scored" and line and not line.startswith("<s>") else b""
        assert name == "scored" and "<" in line or data == prefix + line.encode()


def test_tokens_have_texts_and_special_ones_their_names(byte_level, scored):
    assert byte_level.token_text(byte_level.eos_token_id) == "<|im_end|>"
    assert byte_level.is_special(byte_level.eos_token_id)
    assert not byte_level.is_special(byte_level.token_id("<think>"))
    half = byte_level.encode("🦚")[0]
    assert byte_level.token_text(half) == "\ufffd"
    assert byte_level.token_bytes(half) == "🦚".encode()[: len(byte_level.token_bytes(half))]
    assert scored.token_bytes(scored.token_id("<0xE2>")) == b"\xe2"
    assert scored.token_text(scored.token_id("▁t")) == " t"
    assert byte_level.token_bytes(10**6) == byte_level.token_bytes(-1) == b""


def test_decoding_refuses_ids_outside_of_the_vocabulary(byte_level):
    # SMP-10: padded rows of the model are no tokens.
    for token_id in (-1, byte_level.vocab_size, 2**40):
        with pytest.raises(InvalidRequest, match=f"{token_id} is outside the vocabulary of {byte_level.vocab_size}"):
            byte_level.decode([5, token_id])


def test_the_vocabulary_size_counts_gaps():
    # SMP-10
    rust = RustTokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer = Tokenizer(rust)
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([0, 3, 7]) == "a b"


def test_spaces_before_punctuation_are_kept(folder):
    """What transformers calls cleaning up changes what the model wrote, and cannot be done token by token."""
    tokenizer = Tokenizer.from_folder(folder(NAMED | {"clean_up_tokenization_spaces": True}))
    assert tokenizer.decode(tokenizer.encode("Hello , world ! do n't")) == "Hello , world ! do n't"


# API-18


def test_there_is_one_bos_however_the_text_begins(scored, byte_level):
    bos = scored.bos_token_id
    assert scored.encode("Hello").count(bos) == 1
    assert scored.encode("<s>Hello").count(bos) == 1
    assert scored.encode("<s>Hello", add_special_tokens=False).count(bos) == 1
    assert scored.encode("Hello", add_special_tokens=False).count(bos) == 0
    assert scored.encode("") == [bos]
    assert scored.encode("<s>") == [bos]
    assert byte_level.encode("") == []


def test_rendered_chats_have_the_ids_of_transformers(folder):
    template = "{{ bos_token }}" + CHATML
    path = folder(NAMED | {"add_bos_token": True, "chat_template": template})
    ours, theirs = Tokenizer.from_folder(path), transformers.PreTrainedTokenizerFast.from_pretrained(path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🦚"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = ours.encode(ours.render_chat(messages), add_special_tokens=False)
    assert ids == expected
    assert ids.count(ours.bos_token_id) == 1
    assert ours.encode(ours.render_chat(messages)) == ids  # as a completions prompt


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "at"), [("\ud800", 0), ("ab\udc00c", 2), ("🦚\udbff", 1)])
def test_a_lone_surrogate_is_refused(byte_level, text, at):
    with pytest.raises(InvalidRequest, match=f"at character {at}"):
        byte_level.encode(text)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(byte_level):
    longest = max(len(text) for text in byte_level._tokenizer.get_vocab())
    assert len(byte_level.encode("x" * longest, max_tokens=1)) > 1, "what could fit is encoded"
    with pytest.raises(ContextLengthExceeded, match=r"1000000 characters, which cannot fit into 5 tokens"):
        byte_level.encode("a" * 1_000_000, max_tokens=5)
    assert byte_level.encode("a" * (20 * longest), max_tokens=20)


def test_bad_words_count_with_and_without_a_space_before_them(byte_level, scored):
    a, space_a = byte_level.encode("the"), byte_level.encode(" the")
    assert byte_level.bad_words_token_ids(["the"]) == (tuple(a), *([tuple(space_a)] if len(a) == len(space_a) else []))
    for tokenizer in (byte_level, scored):
        for word in ["world", " world", "a", "žluťoučký", "日本"]:
            expected = []  # as vLLM does it
            for prefix in ("", " "):
                ids = tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)
                if not prefix or (ids[0] != expected[-1][0] and len(ids) == len(expected[-1])):
                    expected.append(tuple(ids))
            assert tokenizer.bad_words_token_ids([word, word]) == tuple(expected)
    with pytest.raises(InvalidRequest, match="bad_words holds ' ', which has no tokens"):
        byte_level.bad_words_token_ids([" "])


def test_threads_share_a_tokenizer():
    tokenizer = Tokenizer.from_gguf(vocabularies.byte_level())
    lines = mixed_lines(200)
    expected = [(ids := tokenizer.encode(line), tokenizer.decode(ids)) for line in lines]
    fresh = Tokenizer.from_gguf(vocabularies.byte_level())
    order = list(range(len(lines)))
    random.Random(3).shuffle(order)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda i: (fresh.encode(lines[i]), fresh.decode(expected[i][0])), order))
    assert results == [expected[index] for index in order]


# -- load_tokenizer ----------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_file(tmp_path):
    metadata = vocabularies.byte_level()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist())
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHATML)
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_tokenizer_is_loaded_from_a_file_or_the_folder_around_it(gguf_file, byte_level):
    for path in (gguf_file, gguf_file.parent):
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode("Hello") == byte_level.encode("Hello")
        assert tokenizer.render_chat(MESSAGES) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_operator_names_another_tokenizer_and_template(gguf_file, tmp_path_factory, byte_level):
    other = tmp_path_factory.mktemp("other")
    build_tokenizer(vocabularies.scored()).tokenizer.save(str(other / "tokenizer.json"))
    for override in (other, other / "tokenizer.json"):
        tokenizer = load_tokenizer(gguf_file, override)
        assert tokenizer.encode("Hello") != byte_level.encode("Hello")
        assert tokenizer.has_chat_template, "the model's own template stays"
    (other / "own.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert load_tokenizer(gguf_file, chat_template=other / "own.jinja").render_chat(MESSAGES) == "[hi]"
    with pytest.raises(TokenizerError, match=r"none\.jinja cannot be read"):
        load_tokenizer(gguf_file, chat_template=other / "none.jinja")


def test_an_override_without_a_tokenizer_is_named(gguf_file, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        load_tokenizer(gguf_file, empty)


def test_a_base_model_has_no_chat(byte_level):
    assert not byte_level.has_chat_template
    with pytest.raises(InvalidRequest, match="base model without a chat template.*--chat-template FILE"):
        byte_level.render_chat(MESSAGES)


def test_smollm2_speaks_chatml(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    ids = tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False)
    im_start = tokenizer.token_id("<|im_start|>")
    assert ids.count(im_start) == 3
    assert tokenizer.eos_token_ids == (tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>"))
    assert not tokenizer.adds_bos
    assert tokenizer.vocab_size == 49152
