"""What holds for the rows of every trace, whatever it came from."""

from extproc.replay.rows import Trace


def assert_sound(trace: Trace) -> None:
    """Fail when a row contradicts what `Row` and `Trace` promise."""
    arrivals = [row.at_s for row in trace.rows if row.after < 0]
    assert arrivals == sorted(arrivals)
    assert trace.requests == len(trace.rows) > 0
    for index, row in enumerate(trace.rows):
        assert -1 <= row.after < index
        assert row.at_s >= 0
        assert row.prompt_tokens >= 1
        assert row.output_tokens >= 1
        assert len(row.blocks) == row.prompt_tokens // trace.block_tokens
        both = (row.prompt_tokens + row.output_tokens) // trace.block_tokens
        # Texts count in bytes: prompt and answer may each leave a part of a token.
        assert len(row.blocks) + len(row.answer_blocks) in {len(row.blocks), both, both + 1}
        assert all(0 <= block < 2**64 for block in (*row.blocks, *row.answer_blocks))
        assert {len(row.turn), len(row.follows)} <= {0, 16}
        if row.follows and row.after >= 0:
            assert trace.rows[row.after].turn == row.follows
    assert_chained(trace)


def assert_chained(trace: Trace) -> None:
    """Fail when a block stands behind two different ones: equal blocks must mean equal prompts up to there."""
    before: dict[int, int] = {}
    for row in trace.rows:
        parent = -1
        for block in (*row.blocks, *row.answer_blocks):
            assert before.setdefault(block, parent) == parent
            parent = block
