"""Incremental text: equal to decoding everything at once, for any tokens and any chunking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ssd_integrations.errors import EngineError, InvalidRequestError
from ssd_workers.engine.text_stream import TextStream

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다. 안녕하세요, 반갑습니다.",
    "naïve café — “quoted” text… 😀😂🤣 👩‍👩‍👧‍👦 日本語のテキスト",
    "Stop here. END\n\nUser: next\n### Response:",
]
Decode = Callable[[list[int]], str]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words marked with a leading space symbol, single bytes for what the vocabulary lacks."""
    words = ["▁", "▁the", "▁dog", "▁", "the", "dog", "a", "b", ".", "▁.", "é"]
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *dict.fromkeys(words)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BPE = byte_level()
SPM = sentencepiece()


def token(tokenizer: Tokenizer, piece: str) -> int:
    found = tokenizer.token_to_id(piece)
    assert found is not None
    return found


END = token(BPE, "<|end|>")


def run(
    decode: Decode,
    ids: Sequence[int],
    chunks: Sequence[int],
    stop: Sequence[str] = (),
    tail: Sequence[int] = (),
) -> tuple[str, str | None, list[int]]:
    """Text, stop string and kept ids, pushing ``chunks`` tokens at a time (then one by one)."""
    stream = TextStream(decode, stop, tail)
    text, kept, place = "", [], 0
    sizes = iter(chunks)
    while place < len(ids) and stream.stopped is None:
        size = next(sizes, 1)
        delta = stream.push(ids[place : place + size])
        place += size
        text += delta.text
        kept += delta.token_ids
        assert delta.kept_tokens == len(delta.token_ids)
        assert delta.stopped == stream.stopped
    text += stream.finish().text
    assert text == stream.text
    return text, stream.stopped, kept


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The plain way: the first character at which some stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


TOKENS = st.lists(st.integers(0, BPE.get_vocab_size() - 1), max_size=60)
WORDS = st.sampled_from([*CORPUS, "안녕 😀", "é", "😂😂", "END", " User:"])
TEXT_IDS = st.lists(WORDS, max_size=4).map(lambda words: BPE.encode("".join(words)).ids)
CHUNKS = st.lists(st.integers(1, 9), max_size=30)
STOPS = st.lists(
    st.one_of(
        st.sampled_from(["END", "D\n\nU", "\n\n", "the lazy", "😂", "하세요", "\ufffd", " "]),
        st.text("abe \ufffd", min_size=1, max_size=3),
    ),
    max_size=4,
)


class TestByteLevel:
    @settings(max_examples=300, deadline=None)
    @given(st.one_of(TOKENS, TEXT_IDS), CHUNKS, STOPS)
    def test_any_tokens_in_any_chunks(
        self, ids: list[int], chunks: list[int], stop: list[str]
    ) -> None:
        text, stopped, kept = run(BPE.decode, ids, chunks, stop)
        assert (text, stopped) == first_stop(BPE.decode(ids), stop)
        one_by_one = run(BPE.decode, ids, [], stop)
        assert (text, stopped, kept) == one_by_one
        assert kept == ids[: len(kept)]
        if stopped is None:
            assert kept == ids

    @settings(max_examples=200, deadline=None)
    @given(TEXT_IDS, st.integers(0, 400), st.integers(1, 12), CHUNKS)
    def test_kept_tokens_end_with_the_one_that_completes_the_stop(
        self, ids: list[int], start: int, length: int, chunks: list[int]
    ) -> None:
        whole = BPE.decode(ids)
        stop = whole[start : start + length]
        if not stop:
            return
        text, stopped, kept = run(BPE.decode, ids, chunks, [stop])
        assert stopped == stop
        assert text == whole[: whole.index(stop)]
        assert stop in BPE.decode(kept)
        assert stop not in BPE.decode(kept[:-1])

    def test_a_character_of_several_tokens_appears_whole(self) -> None:
        ids = BPE.encode("a🦕b").ids
        assert len(ids) > 3
        stream = TextStream(BPE.decode)
        texts = [stream.push([token]).text for token in ids]
        assert [text for text in texts if text] == ["a", "🦕", "b"]

    def test_an_unfinished_character_shows_at_the_end_only(self) -> None:
        ids = BPE.encode("a🦕").ids[:-1]
        stream = TextStream(BPE.decode)
        assert stream.push(ids).text == "a"
        assert stream.finish().text == "\ufffd"

    def test_special_tokens_are_counted_and_not_shown(self) -> None:
        dinosaur = BPE.encode("🦕").ids
        ids = [END, *dinosaur[:2], END, END, *dinosaur[2:], END]
        text, _, kept = run(BPE.decode, ids, [3, 2])
        assert text == "🦕"
        assert kept == ids


class TestSentencePiece:
    @settings(max_examples=300, deadline=None)
    @given(
        st.lists(
            st.sampled_from(
                ["▁", "▁the", "▁dog", "the", "a", ".", "▁.", "é", "</s>", "😀", "ß€", "한"]
            ),
            max_size=40,
        ),
        CHUNKS,
    )
    @example(["▁", "▁the"], [])
    @example(["</s>", "▁", "</s>", "▁", "a"], [])
    def test_whole_characters_equal_decoding_at_once(
        self, pieces: list[str], chunks: list[int]
    ) -> None:
        ids: list[int] = []
        for piece in pieces:
            known = SPM.token_to_id(piece)
            ids += [known] if known is not None else [byte + 2 for byte in piece.encode()]
        assert run(SPM.decode, ids, chunks)[0] == SPM.decode(ids)

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, SPM.get_vocab_size() - 1), max_size=60), CHUNKS)
    def test_any_tokens_give_one_text_in_any_chunks(
        self, ids: list[int], chunks: list[int]
    ) -> None:
        # Invalid bytes make this decoder take back characters, so the whole may differ here.
        assert run(SPM.decode, ids, chunks) == run(SPM.decode, ids, [])

    def test_a_valid_character_stays_when_the_bytes_after_it_are_invalid(self) -> None:
        ids = [*(byte + 2 for byte in "é".encode()), 0xE2 + 2, token(SPM, "a")]
        assert SPM.decode(ids) == "\ufffd\ufffd\ufffda"
        assert run(SPM.decode, ids, [])[0] == "é\ufffda"
        assert run(SPM.decode, ids[:3], [])[0] == "é\ufffd"

    def test_the_prompt_keeps_the_first_space(self) -> None:
        the, dog = token(SPM, "▁the"), token(SPM, "▁dog")
        assert run(SPM.decode, [dog], [])[0] == "dog"
        assert run(SPM.decode, [dog], [], tail=[the])[0] == " dog"
        assert run(SPM.decode, [dog], [], tail=[the] * 100)[0] == " dog"

    def test_a_tail_that_is_no_context_is_left_out(self) -> None:
        dog = token(SPM, "▁dog")
        assert run(SPM.decode, [dog], [], tail=[0xE2 + 2])[0] == "dog"
        assert run(SPM.decode, [dog], [], tail=[token(SPM, "</s>")])[0] == "dog"


# Tokens that begin and end inside characters, so that hardly any text ends in a whole one.
RAGGED = [b"a", b" b", b"\x80", b"\xf0", b"\x9f\x98", b"\x82\xf0", b"\xe2\x82", b"\xac\xe2"]
RAGGED += ["é€".encode(), b"\xff", b"\xf0\x9f", b"\x98", "\ufffd".encode(), b""]


def ragged_decode(ids: list[int]) -> str:
    return b"".join(RAGGED[i] for i in ids).decode("utf-8", errors="replace")


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, len(RAGGED) - 1), max_size=90), CHUNKS, STOPS)
@example([3, *([4, 5] * 40)], [], [])
@example([2] * 80, [], [])
@example([3, 10, 8] * 30, [], [])
def test_tokens_that_straddle_characters(
    ids: list[int], chunks: list[int], stop: list[str]
) -> None:
    assert run(ragged_decode, ids, chunks, stop)[:2] == first_stop(ragged_decode(ids), stop)


@pytest.mark.parametrize(
    ("decode", "ids"),
    [
        (BPE.decode, BPE.encode(CORPUS[1]).ids * 20),
        (BPE.decode, [END] * 500),
        (BPE.decode, [BPE.encode("a").ids[0], *[END] * 500]),
        (ragged_decode, [3, *([4, 5] * 300)]),
        (ragged_decode, [2] * 500),
        (ragged_decode, [3, 4, 11] * 200),
        (SPM.decode, [byte + 2 for byte in ("😀" * 100 + "한€é" * 30).encode()]),
        (SPM.decode, [0xE2 + 2] * 500),
    ],
    ids=["text", "special", "specials", "straddling", "invalid", "mixed", "bytes", "bad bytes"],
)
def test_a_push_costs_the_same_late_in_a_long_output(decode: Decode, ids: list[int]) -> None:
    longest = 0
    calls = 0

    def watched(window: list[int]) -> str:
        nonlocal longest, calls
        longest, calls = max(longest, len(window)), calls + 1
        return decode(window)

    stream = TextStream(watched)
    for token in ids:
        stream.push([token])
    text = stream.text + stream.finish().text
    if "\ufffd" not in text or decode is not SPM.decode:
        assert text == decode(ids)
    assert longest <= 32
    assert calls <= 2 * len(ids)


def test_tokens_are_forgotten_only_where_the_text_stays_the_same() -> None:
    def alternating(ids: list[int]) -> str:
        return "".join(chr(i).upper() if place % 2 else chr(i) for place, i in enumerate(ids))

    ids = list(map(ord, "abcdefghijklmnopqrstuvwxyz" * 4))
    assert run(alternating, ids, [])[0] == alternating(ids)


class TestStop:
    def test_is_found_across_tokens_and_pushes_and_cut_off(self) -> None:
        ids = BPE.encode("one END two").ids
        whole = TextStream(BPE.decode, ["END"])
        delta = whole.push(ids)
        assert (delta.text, delta.stopped) == ("one ", "END")
        assert BPE.decode(delta.token_ids) == "one END"
        assert whole.finish() == type(delta)(stopped="END")

    def test_text_that_may_begin_a_stop_is_held_until_it_cannot(self) -> None:
        decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
        stream = TextStream(decode, ["abac"])
        texts = [stream.push([ord(c)]).text for c in "xababd"]
        # After "abab" the first "ab" is free, the second may still begin "abac".
        assert texts == ["x", "", "", "", "ab", "abd"]
        assert stream.push([ord("a")]).text == ""
        assert stream.finish().text == "a"
        assert stream.text == "xababda"

    @pytest.mark.parametrize(
        ("stop", "text", "stopped"),
        [
            (["abcd", "bc"], "xa", "bc"),
            (["bcd", "abcd"], "x", "abcd"),
            (["cd", "b"], "xa", "b"),
            (["abcd", "abc"], "x", "abc"),
            (["d", "d"], "xabc", "d"),
            (["xabcde"], "xabcd", None),
        ],
    )
    def test_the_one_complete_first_wins_then_the_longest(
        self, stop: list[str], text: str, stopped: str | None
    ) -> None:
        decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
        ids = list(map(ord, "xabcd"))
        for chunks in ([], [5], [2, 3], [4]):
            assert run(decode, ids, chunks, stop)[:2] == (text, stopped)

    def test_a_stop_at_the_very_beginning(self) -> None:
        delta = TextStream(BPE.decode, ["END"]).push(BPE.encode("END").ids)
        assert (delta.text, delta.stopped) == ("", "END")

    def test_pushing_after_the_stop_is_an_error(self) -> None:
        stream = TextStream(BPE.decode, ["END"])
        stream.push(BPE.encode("END").ids)
        with pytest.raises(EngineError, match="after the stop string 'END'"):
            stream.push([1])

    def test_an_empty_stop_string_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="stop string is empty"):
            TextStream(BPE.decode, ["a", ""])
