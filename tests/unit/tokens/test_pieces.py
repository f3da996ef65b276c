"""Cutting: pieces tokenized apart are the ids of the whole, in every build of tokenizer."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.tokens import folder as folders_of
from extproc.tokens.cache import TokenCache
from extproc.tokens.encoder import Encoder
from extproc.tokens.folder import Added
from extproc.tokens.pieces import Cutter
from extproc.tokens.values import NoTokensError, Why
from tests.unit.tokens import folders

_TOKENS = ("<|im_start|>", "<|im_end|>", "<|im_start|>x", "<|im_", "<mask>", "<tail>", "</think>")
_WORDS = (
    "plain",
    "PLAIN",
    "tool",
    "user",
    "Hello there",
    " hello",
    "a",
    "Ä",
    "e\u0301",
    "你好",
    "😀",
    "x" * 40,
    "12345",
)
_CHUNKS = st.sampled_from([*_TOKENS, *_WORDS, " ", "  ", "\n", "\n\n", "\t", "<", ">", "_", "▁"])
_TEXTS = st.lists(_CHUNKS | st.text(max_size=4).filter(lambda text: text.isprintable()), max_size=30).map("".join)


@pytest.fixture(scope="module", params=sorted(folders.TOKENIZERS))
def name(request: pytest.FixtureRequest) -> str:
    """Each build of tokenizer in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    return folders.write(tmp_path_factory.mktemp(name) / "it", folders.TOKENIZERS[name]())


def encoder(path: Path, least_chars: int = 1) -> Encoder:
    """An encoder that cuts wherever it may."""
    return Encoder(folders_of.read(path), TokenCache(1 << 20), least_chars)


@example(texts=["<|im_start|><|im_end|> x"], special_tokens=False)
@example(texts=["<tail> <|im_start|> <mask>tool<|im_end|>"], special_tokens=True)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=4), special_tokens=st.booleans())
def test_pieces_give_the_ids_of_the_whole(folder: Path, name: str, texts: list[str], special_tokens: bool) -> None:
    """Cold, warm, and where other texts filled the cache: what is put together is what the tokenizer gives."""
    cutting, whole = encoder(folder), folders.TOKENIZERS[name]()
    for text in [*texts, "".join(texts), *texts]:
        ids, _ = cutting.encode(text, special_tokens=special_tokens)
        assert ids.tolist() == whole.encode(text, add_special_tokens=special_tokens).ids


@given(text=_TEXTS)
def test_pieces_make_up_the_text(text: str) -> None:
    """Nothing is lost or doubled, and every piece but the first begins with a token."""
    pieces = Cutter([Added("<|im_start|>", special=True), Added("<mask>", lstrip=True, special=True)], 1).pieces(text)
    assert "".join(pieces) == text
    assert all(piece.startswith("<|im_start|>") for piece in pieces[1:])


@given(text=_TEXTS, more=_TEXTS)
def test_a_longer_text_has_the_pieces_of_its_beginning(text: str, more: str) -> None:
    """All but the last: so that a next turn finds what the turn before left in the cache."""
    cutter = Cutter([Added("<|im_start|>", special=True)], 10)
    # The last piece may end in the middle of a token that the longer text completes.
    pieces = cutter.pieces(text)[:-1]
    assert cutter.pieces(text + more)[: len(pieces)] == pieces


@pytest.mark.parametrize(
    "added",
    [
        [],
        [Added("word", single_word=True, special=True), Added("<x>", special=True)],
        [Added("<x>", lstrip=True, special=True), Added("<x>y", rstrip=True, special=True)],
        [Added("<x>", normalized=True, special=True)],
        [Added(" <x>", special=True), Added("<y>", rstrip=True, special=True)],
    ],
    ids=["no tokens", "words", "white space", "normalized", "white space of its own"],
)
def test_where_cutting_is_not_sound_nothing_is_cut(added: list[Added]) -> None:
    """Tokens that look at what stands beside them reach over a cut."""
    text = "a <x>y word <x> b" * 3
    assert Cutter(added, 1).pieces(text) == [text]


@pytest.mark.parametrize("room", range(14))
def test_a_long_text_is_cut_where_a_short_one_is(room: int) -> None:
    """Texts are searched in parts; a token that lies over the end of one is found, whole and once."""
    cutter = Cutter([Added("<|end|>", special=True), Added("<|end|>x", special=True)], 1)
    text = "y" * ((1 << 16) - room) + "<|end|>x<|end|><|end|>" + "<" * (1 << 17) + "<|end|>"
    at = text.index("<")
    expected = [text[:at], text[at : at + 8], "<|end|>", "<|end|>" + "<" * (1 << 17), "<|end|>"]
    assert cutter.pieces(text) == expected


def test_short_pieces_stay_together() -> None:
    """A cut comes only where enough stands in front of it."""
    pieces = Cutter([Added("<x>", special=True)], 10).pieces("<x>ab<x>abcdefgh<x>ab")
    assert pieces == ["<x>ab<x>abcdefgh", "<x>ab"]


def test_a_next_turn_makes_only_what_is_new(tmp_path: Path) -> None:
    """The pieces of the turn before are found, each under the text that it was made of."""
    cutting = encoder(folders.write(tmp_path, folders.byte_level()), 16)
    turn = "<|im_start|>user\n" + "word " * 200 + "<|im_end|>\n"
    first, found = cutting.encode(turn + "<|im_start|>assistant\n", special_tokens=False)
    assert found == 0
    new = "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n"
    second, found = cutting.encode(turn + new, special_tokens=False)
    assert found >= 200
    assert second[:found] == first[:found]
    assert len(second) - found < 60


def test_half_a_surrogate_pair_has_no_ids(tmp_path: Path) -> None:
    """JSON can spell it; no tokenizer takes it."""
    with pytest.raises(NoTokensError) as caught:
        encoder(folders.write(tmp_path, folders.byte_level())).encode("a\ud800", special_tokens=False)
    assert caught.value.why is Why.UNREADABLE
