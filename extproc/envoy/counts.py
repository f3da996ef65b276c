"""What happened on the ext_proc streams of a process, as plain numbers for whoever shows them."""

import msgspec


class Counts(msgspec.Struct):
    """What happened since the start; every value only grows, but for `open` and `held_bytes`.

    Attributes:
        open: streams open now.
        held_bytes: bytes of duplex bodies held now.
        streams: streams begun.
        decided: requests that got a pick.
        refused: requests answered directly with an error, by reason.
        answered: requests answered directly without one.
        failed_open: requests let go without a pick because of a fault of ours.
        abandoned: decisions whose request had gone before they were known.
        settled: decisions given back.
        unexpected: messages outside the phase table.
        unreadable: streams ended because a message or their mode could not be understood.
    """

    open: int = 0
    held_bytes: int = 0
    streams: int = 0
    decided: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    answered: int = 0
    failed_open: int = 0
    abandoned: int = 0
    settled: int = 0
    unexpected: int = 0
    unreadable: int = 0
