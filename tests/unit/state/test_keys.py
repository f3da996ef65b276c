"""Names of keys."""

import pytest

from extproc.state.keys import Keys, parse_feed_id


def test_a_pools_keys_share_one_hash_tag() -> None:
    """Redis Cluster hashes what stands between the first braces: that is the pool, in every key."""
    keys = Keys("warm").pool("llama")
    names = [keys.load, keys.leases, keys.counted, keys.states, keys.feed]
    names += [keys.flight("r"), keys.pin("s{x}"), keys.void("c")]
    assert all(name.partition("{")[2].partition("}")[0] == "llama" for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["", "a{b", "a}b"])
def test_names_that_would_break_the_tag_are_refused(name: str) -> None:
    """Braces or nothing in a pool's name or the prefix would scatter its keys."""
    with pytest.raises(ValueError, match="braces"):
        Keys("warm").pool(name)
    with pytest.raises(ValueError, match="braces"):
        Keys(name)


def test_feed_ids_are_read_by_their_numbers() -> None:
    """Ids order by time, then sequence; a text that is no id is an error that does not repeat it."""
    assert parse_feed_id("0") < parse_feed_id("9-1") < parse_feed_id("10-0") < parse_feed_id("10-11")
    with pytest.raises(ValueError, match="feed id"):
        parse_feed_id("soon")
