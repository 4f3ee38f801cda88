"""Text token by token against the whole text at once, and stop strings against a search character by character."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import vocabularies
from tests.texts import LINES
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.tokenizer import Tokenizer
from octavo.request import SamplingParams

FFFD = "\ufffd"


def metaspace() -> Tokenizer:
    texts = ["<s>", "▁", "▁a", "b▁c", "▁▁d", "e", "é", "<x>"]
    rust = RustTokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="e"))
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens([AddedToken("<s>", special=True)])
    rust.add_tokens([AddedToken("<x>")])
    return Tokenizer(rust)


def undecoded() -> Tokenizer:
    """A tokenizer without a decoder: its tokens are joined by spaces."""
    texts = ["<s>", "one", "two", "<x>", "<y>"]
    rust = RustTokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="one"))
    rust.add_special_tokens([AddedToken("<s>", special=True)])
    rust.add_tokens([AddedToken("<x>"), AddedToken("<y>")])
    return Tokenizer(rust)


MAKERS = {
    "byte level": lambda: Tokenizer.from_gguf(vocabularies.byte_level()),
    "scored": lambda: Tokenizer.from_gguf(vocabularies.scored()),
    "scored without prefix": lambda: Tokenizer.from_gguf(vocabularies.scored_without_prefix()),
    "metaspace": metaspace,
    "undecoded": undecoded,
}
CACHE: dict[str, Tokenizer] = {}


def tokenizer_named(name: str) -> Tokenizer:
    if name not in CACHE:
        CACHE[name] = MAKERS[name]()
    return CACHE[name]


def feed(detokenizer, pushes, **last):
    """Push all, the last with `finished`. Returns the texts."""
    texts = [detokenizer.push(ids).text for ids in pushes[:-1]]
    return [*texts, detokenizer.push(pushes[-1], finished=True, **last).text]


def split(ids, cuts):
    """`ids` in pushes that end at `cuts`; empty pushes included."""
    ends = [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def reference(tokenizer: Tokenizer, ids, skip: bool) -> str:
    """The library's text, except where byte tokens are not UTF-8: there it writes a U+FFFD for each of them."""
    rust = tokenizer._tokenizer
    library = rust.decode(ids, skip_special_tokens=skip)
    special = {token.content for token in rust.get_added_tokens_decoder().values() if token.special}
    tokens = [token for token in map(rust.id_to_token, ids) if not (skip and token in special)]
    runs, data = [b""], b""
    for token in tokens:
        if is_byte := len(token) == 6 and token.startswith("<0x"):
            byte = bytes([int(token[3:5], 16)])
            data += byte
            runs[-1] += byte
        else:
            runs.append(b"")
            data += token.replace("▁", " ").encode()
        del is_byte
    try:
        for run in runs:
            run.decode()
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if tokenizer.strips_leading_space else text
    return library


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_sum_of_the_deltas_is_the_decoded_text(name, data):
    # DET-02, DET-03: random ids (parts of characters, special and added tokens, byte tokens), any pushes.
    tokenizer = tokenizer_named(name)
    size = tokenizer.vocab_size
    early = st.integers(0, min(size, 300) - 1)  # special tokens, byte tokens and single characters
    late = st.integers(max(0, size - 8), size - 1)  # added tokens
    ids = data.draw(st.lists(st.one_of(st.integers(0, size - 1), early, late), max_size=30))
    skip = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=8))
    expected = reference(tokenizer, ids, skip)
    assert tokenizer.decode(ids, skip) == expected
    texts = feed(IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=skip)), split(ids, cuts))
    assert "".join(texts) == expected
    watching = SamplingParams(skip_special_tokens=skip, stop=("\x00never", expected[-3:] + "\x00never"))
    assert "".join(feed(IncrementalDetokenizer(tokenizer, watching), split(ids, cuts))) == expected


# In SentencePiece, special tokens and ▁ in plain text do not come back as they were.
PLAIN_LINES = [line for line in LINES if "▁" not in line and "<unk>" not in line]


@pytest.mark.parametrize(
    ("name", "line"),
    [("byte level", line) for line in LINES]
    + [(name, line) for name in ("scored", "scored without prefix") for line in PLAIN_LINES],
)
def test_each_character_comes_once_it_is_whole(name, line):
    # DET-02: one token a step; flags, ZWJ families, CJK, combining marks.
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode(line, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False))
    text = ""
    for token_id in ids:
        text += detokenizer.push((token_id,)).text
        assert line.startswith(text)
    assert text + detokenizer.push((), finished=True).text == line


@pytest.mark.parametrize("name", ["byte level", "scored", "scored without prefix"])
def test_a_text_cut_inside_a_character_ends_in_one_replacement(name):
    # DET-09
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode("ab🦚", add_special_tokens=False)
    parts = [token_id for token_id in ids if FFFD in tokenizer.token_text(token_id)]
    assert len(parts) >= 2, "the emoji must be spread over tokens"
    for count in range(1, len(parts)):
        cut = ids[: len(ids) - count]
        assert feed(IncrementalDetokenizer(tokenizer, SamplingParams()), [cut[:1], cut[1:]])[-1].endswith(FFFD)
        assert tokenizer.decode(cut) == "ab" + FFFD
        stops = SamplingParams(stop=("zzz", FFFD + "x"))
        assert "".join(feed(IncrementalDetokenizer(tokenizer, stops), [cut[:2], cut[2:], []])) == "ab" + FFFD


def test_random_bytes_are_always_text_that_json_can_carry():
    # DET-09
    tokenizer = tokenizer_named("byte level")
    source = random.Random(1)
    for _ in range(300):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(12)]
        text = "".join(feed(IncrementalDetokenizer(tokenizer, SamplingParams()), [[token_id] for token_id in ids]))
        text.encode()
        assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_text_continues_its_prompt(name, data):
    # DET-03: the space after "LLMs." stays although the answer begins with it.
    tokenizer = tokenizer_named(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=16))
    at = data.draw(st.integers(0, len(ids)))
    skip = data.draw(st.booleans())
    before, whole = tokenizer.decode(ids[:at], skip), tokenizer.decode(ids, skip)
    if before.endswith(FFFD) or not whole.startswith(before):
        return  # the prompt ends within a character: see the next test
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=skip), ids[:at])
    assert "".join(feed(detokenizer, [ids[at:]])) == whole[len(before) :]


@pytest.mark.parametrize("name", ["byte level", "scored"])
def test_a_character_that_the_prompt_began_is_completed_or_dropped(name):
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode("a🦚", add_special_tokens=False)
    b = tokenizer.encode("b", add_special_tokens=False)[-1]
    for cut in range(len(ids) - 1, 0, -1):
        if not tokenizer.decode(ids[:cut]).endswith(FFFD):
            break
        prompt = ids[:cut]
        assert feed(IncrementalDetokenizer(tokenizer, SamplingParams(), prompt), [ids[cut:]]) == ["🦚"]
        assert feed(IncrementalDetokenizer(tokenizer, SamplingParams(), prompt), [[b]]) == [tokenizer.token_text(b)]
        assert feed(IncrementalDetokenizer(tokenizer, SamplingParams(), prompt), [[]]) == [""]
    else:
        pytest.fail("the emoji is one token")


def test_the_space_before_the_first_word_is_dropped_only_at_the_start_of_a_text():
    tokenizer = tokenizer_named("scored")
    hello = tokenizer.encode("Hello", add_special_tokens=False)
    bos = tokenizer.bos_token_id
    for prompt, expected in {(): "Hello", (bos,): "Hello", tuple(hello): " Hello"}.items():
        assert feed(IncrementalDetokenizer(tokenizer, SamplingParams(), prompt), [hello]) == [expected]
    shown = SamplingParams(skip_special_tokens=False)
    assert feed(IncrementalDetokenizer(tokenizer, shown, (bos,)), [hello]) == [" Hello"]


def test_spaces_between_added_tokens_are_a_choice():
    tokenizer = tokenizer_named("undecoded")
    ids = [1, 3, 4, 0, 2]  # one <x> <y> <s> two
    for skip, spaces, expected in [
        (False, True, "one <x> <y> <s> two"),
        (False, False, "one <x><y><s> two"),
        (True, True, "one <x> <y> two"),
        (True, False, "one <x><y> two"),
    ]:
        sampling = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        assert "".join(feed(IncrementalDetokenizer(tokenizer, sampling), [ids[:2], ids[2:]])) == expected
        assert tokenizer.decode(ids, skip, spaces) == expected


def test_ids_beyond_the_vocabulary_are_no_text():
    # SMP-10: padding rows are no tokens; should one come, nothing breaks.
    tokenizer = tokenizer_named("byte level")
    a = tokenizer.encode("a")[0]
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    assert feed(detokenizer, [[a, tokenizer.vocab_size + 5, a]]) == ["aa"]


@pytest.mark.parametrize("name", MAKERS)
def test_offsets_count_the_characters_before_each_token(name):
    tokenizer = tokenizer_named(name)
    source = random.Random(2)
    for _ in range(30):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(10)]
        one_by_one = IncrementalDetokenizer(tokenizer, SamplingParams())
        offsets, text = [], ""
        for token_id in ids:
            delta = one_by_one.push((token_id,))
            offsets += delta.text_offsets
            assert delta.text_offsets == (len(text),)
            text += delta.text
        for stop in ((), ("\x00never",)):
            delta = IncrementalDetokenizer(tokenizer, SamplingParams(stop=stop)).push(ids)
            assert (list(delta.text_offsets), delta.num_tokens) == (offsets, len(ids))


# -- stop strings ---------------------------------------------------------------------------------------------


def letters() -> Tokenizer:
    """Tokens that are short texts, and special tokens whose texts mix with them."""
    texts = ["<|", "a", "b", "c", "ab", "bc", "abc", "cab", "|>", "<|eot|>", "abab"]
    rust = RustTokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="a"))
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<|eot|>", special=True), AddedToken("abab", special=True)])
    return Tokenizer(rust)


LETTERS = letters()
EOT, ABAB = 9, 10


def search(ids, stops, skip, min_tokens):
    """Character by character: (text before the stop string, stop string or None, number of tokens)."""
    shown = ""
    written: list[bool] = []  # of each character that was written, whether it is shown
    raw = ""
    for count, token_id in enumerate(ids, 1):
        is_hidden = skip and LETTERS.is_special(token_id)
        for char in LETTERS.token_text(token_id):
            raw += char
            written.append(not is_hidden)
            shown += "" if is_hidden else char
            if count <= min_tokens:
                continue
            found = [(sum(written[: len(raw) - len(stop)]), -len(stop), stop) for stop in stops if raw.endswith(stop)]
            if not is_hidden:
                found += [(len(shown) - len(stop), -len(stop), stop) for stop in stops if shown.endswith(stop)]
            if found:
                start, _, stop = min(found)
                return shown[:start], stop, count
    return shown, None, len(ids)


def cut_from(data, text):
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    return text[start : start + data.draw(st.integers(1, 9))] or "x"


@given(data=st.data())
@settings(max_examples=600, deadline=None, derandomize=True)
def test_stop_strings_end_a_text_as_a_search_by_character_does(data):
    # DET-04, DET-08
    ids = data.draw(st.lists(st.one_of(st.integers(0, LETTERS.vocab_size - 1), st.just(ABAB)), max_size=14))
    raw = LETTERS.decode(ids, skip_special_tokens=False)
    stops = [cut_from(data, text) for text in (raw, LETTERS.decode(ids), raw[1:] + "b")]
    stops = data.draw(st.lists(st.sampled_from(stops), min_size=1, max_size=3))
    cuts = data.draw(st.lists(st.integers(0, 14), max_size=6))
    skip, includes = data.draw(st.booleans()), data.draw(st.booleans())
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 4]))
    before, stop, count = search(ids, stops, skip, min_tokens)
    expected = before + stop if includes and stop else before
    sampling = SamplingParams(
        stop=tuple(stops), skip_special_tokens=skip, min_tokens=min_tokens, include_stop_str_in_output=includes
    )
    detokenizer = IncrementalDetokenizer(LETTERS, sampling)
    text, num_tokens, found = "", 0, None
    pushes = split(ids, cuts)
    for index, push in enumerate(pushes):
        delta = detokenizer.push(push, finished=index == len(pushes) - 1)
        text += delta.text
        num_tokens += delta.num_tokens
        found = delta.stop
        assert expected.startswith(text), "text was shown that is withdrawn later"
        assert len(delta.text_offsets) == delta.num_tokens
        if found is not None:
            break
    assert (text, found, num_tokens) == (expected, stop, count)


@given(
    ids=st.lists(st.integers(0, 8), max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1),
    min_tokens=st.sampled_from([0, 20]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_more_is_held_back_than_could_begin_a_stop_string(ids, stops, min_tokens):
    # DET-04
    detokenizer = IncrementalDetokenizer(
        LETTERS, SamplingParams(stop=tuple(stops), min_tokens=min_tokens, max_tokens=None)
    )
    text, written = "", ""
    for token_id in ids:
        delta = detokenizer.push((token_id,))
        if delta.stop is not None:
            break
        text += delta.text
        written += LETTERS.token_text(token_id)
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        sizes = range(len(written) + 1)
        held = max((size for size in sizes if written[len(written) - size :] in beginnings), default=0)
        assert text == written[: len(written) - held]


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),  # over several tokens
        (["EF", "EFG"], "ABCD", "EF"),  # the first to end
        (["FG", "EFG"], "ABCD", "EFG"),  # the longest of those that end together
        (["G"], "ABCDEF", "G"),  # inside a token
        (["ABCDEFGHIJKL"], "", "ABCDEFGHIJKL"),  # the whole text
        (["XYZ", "JK", "KZ", "Q"], "ABCDEFGHI", "JK"),
        (["LM"], "ABCDEFGHIJKL", None),  # unmatched: what was held comes out
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_stop_strings_however_they_are_spread(stops, text, stop, size):
    # DET-04, DET-06
    tokenizer = tokenizer_named("byte level")
    ids = [tokenizer.token_id(char) for char in "ABCDEFGHIJKL"]
    sampling = SamplingParams(stop=tuple(stops))
    detokenizer = IncrementalDetokenizer(tokenizer, sampling)
    got, num_tokens = "", 0
    for start in range(0, len(ids), size):
        delta = detokenizer.push(ids[start : start + size], finished=start + size >= len(ids))
        got += delta.text
        num_tokens += delta.num_tokens
        if delta.stop is not None:
            break
    assert (got, delta.stop) == (text, stop)
    assert num_tokens == (len(ids) if stop is None else "ABCDEFGHIJKL".index(stop[-1]) + 1)


@pytest.mark.parametrize("ended_by_token", [True, False])
def test_held_back_text_comes_out_however_the_choice_ends(ended_by_token):
    # DET-06: by EOS, by length, by abort.
    tokenizer = tokenizer_named("byte level")
    ids = [tokenizer.token_id(char) for char in "was"]
    eos = [tokenizer.eos_token_id] if ended_by_token else []
    sampling = SamplingParams(stop=("assistant!!",))
    detokenizer = IncrementalDetokenizer(tokenizer, sampling)
    assert detokenizer.push(ids).text == "w"
    delta = detokenizer.push(eos, finished=True, ended_by_token=ended_by_token)
    assert (delta.text, delta.stop, delta.num_tokens) == ("as", None, len(eos))


def test_a_special_token_that_is_not_shown_stops():
    # DET-08
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(LETTERS, SamplingParams(stop=("<|eot|>",), skip_special_tokens=skip))
        delta = detokenizer.push([1, 2, EOT, 3])
        assert (delta.text, delta.stop, delta.num_tokens) == ("ab", "<|eot|>", 3)


def test_the_token_that_ends_a_choice_is_counted_but_not_shown():
    for includes, expected in {False: "a", True: "a<|eot|>"}.items():
        sampling = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=includes)
        delta = IncrementalDetokenizer(LETTERS, sampling).push([1, EOT], finished=True, ended_by_token=True)
        assert (delta.text, delta.num_tokens, delta.text_offsets) == (expected, 2, (0, 1))


def test_stop_strings_wait_for_min_tokens():
    sampling = SamplingParams(stop=("b",), min_tokens=3)
    delta = IncrementalDetokenizer(LETTERS, sampling).push([1, 2, 2, 1, 2, 3], finished=True)
    assert (delta.text, delta.num_tokens) == ("abba", 5)


def test_a_push_after_the_end_is_a_bug():
    detokenizer = IncrementalDetokenizer(LETTERS, SamplingParams(stop=("b",)))
    detokenizer.push([2])
    with pytest.raises(AssertionError, match="after the end"):
        detokenizer.push([1])


def test_many_long_stop_strings_cost_no_more_per_character():
    # 64 stop strings of 1,024 characters that all nearly match: a search per stop string would take minutes.
    stops = tuple("a" * 1023 + chr(0x100 + index) for index in range(64))
    detokenizer = IncrementalDetokenizer(LETTERS, SamplingParams(stop=stops))
    text = "".join(detokenizer.push((1,)).text for _ in range(5000))
    assert text == "a" * (5000 - 1023)
    assert detokenizer.push((), finished=True).text == "a" * 1023
