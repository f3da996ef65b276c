"""The cache of token ids: bounded, and what was used longest ago goes first."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from extproc.state.exact_blocks import Medium
from extproc.tokens.cache import TokenCache
from extproc.tokens.values import Made


def ids(count: int, *media: Medium) -> Made:
    """So many ids."""
    return Made(array("I", range(count)), media)


def test_what_was_put_is_found() -> None:
    """Under its key only."""
    cache = TokenCache(1 << 20)
    cache.put(b"a", ids(3))
    assert cache.get(b"a") == ids(3)
    assert cache.get(b"b") is None


def test_the_entry_used_longest_ago_goes_first() -> None:
    """Reading is use."""
    cache = TokenCache(4 * 1500)
    for key in (b"a", b"b", b"c", b"d"):
        cache.put(key, ids(300))
    assert cache.get(b"a") is not None
    cache.put(b"e", ids(300))
    assert cache.get(b"b") is None
    assert all(cache.get(key) for key in (b"a", b"c", b"d", b"e"))


def test_what_would_empty_the_cache_is_not_kept() -> None:
    """One prompt of a million tokens must not cost all others."""
    cache = TokenCache(40_000)
    cache.put(b"small", ids(10))
    cache.put(b"large", ids(10_000))
    assert cache.get(b"large") is None
    assert cache.get(b"small") is not None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60))))
def test_memory_never_passes_the_limit(puts: list[tuple[int, int]]) -> None:
    """Whatever is put, again or anew; the count is what the entries take."""
    cache, limit = TokenCache(2000), 2000
    for key, count in puts:
        cache.put(bytes([key]), ids(count))
        assert cache.nbytes <= limit
    held = [found for key in range(6) if (found := cache.get(bytes([key]))) is not None]
    assert cache.nbytes == sum(290 + 4 * len(each.ids) for each in held)


def test_images_take_room_too() -> None:
    """A prompt of few ids may name many images, whose names count."""
    cache = TokenCache(1 << 20)
    cache.put(b"a", ids(3))
    without = cache.nbytes
    cache.put(b"a", ids(3, *(Medium("f" * 64, at, 3) for at in range(10))))
    assert cache.nbytes >= without + 10 * 64
