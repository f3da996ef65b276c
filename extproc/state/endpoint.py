"""What the keeper knows of one endpoint, as it is published in the store and read by every worker."""

import msgspec

from extproc.errors import StoreError


class EndpointState(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One endpoint as the keeper that reads it last saw it; all that another keeper needs to go on from there.

    Attributes:
        destination: `ip:port` that Envoy is told; equals the id when the id is an IP address.
        scraped_at: wall time of the last good scrape, seconds since the epoch; 0 before the first.
        reachable: False after three scrapes in a row could not connect.
        asleep: the engine said that it is sleeping: it would take requests and let them hang.
        draining: takes no new sessions, finishes what it has.
        running: requests in the engine's batch.
        waiting: requests in the engine's queue.
        kv_usage: share of KV blocks in use, 0 to 1.
        block_tokens: tokens in one KV block; 0 when the engine did not tell.
        kv_blocks: KV blocks the engine has; 0 when it did not tell.
        started_at: start time of the engine's process, seconds since the epoch; 0 when unknown. A change means
            that its cache is empty.
        prefix_queries: prompt tokens looked up in the engine's prefix cache since its start.
        prefix_hits: of these, found.
        prefix_caching: the engine reuses the prefixes of earlier prompts; True when it did not tell.
        version: the engine's version; empty when unknown.
        stalled_s: for how long the engine has had work without any sign of progress, in seconds: no counter of tokens
            moved and no cache was filled, or no page came. 0 while it works or has nothing to do, and for the first two
            seconds, which one long step may take.
        misses: scrapes in a row that could not connect.
        told_start: the process start that the engine itself told last; 0 when it never did.
        tokens: prompt and output tokens that it has worked through since its start; 0 when it did not tell.
    """

    destination: str
    scraped_at: float = 0.0
    reachable: bool = True
    asleep: bool = False
    draining: bool = False
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    block_tokens: int = 0
    kv_blocks: int = 0
    started_at: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    prefix_caching: bool = True
    version: str = ""
    stalled_s: float = 0.0
    misses: int = 0
    told_start: float = 0.0
    tokens: float = 0.0

    @property
    def sequences(self) -> int:
        """Requests that the engine itself reports, in its batch and in its queue."""
        return self.running + self.waiting


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EndpointState)


def encode(state: EndpointState) -> bytes:
    """Bytes for `Store.put_states`."""
    return _encoder.encode(state)


def decode(payload: bytes) -> EndpointState:
    """Inverse of `encode`; fields that a newer keeper added are ignored. Raises StoreError for foreign bytes."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise StoreError(f"an endpoint's state in the store cannot be read: {error}") from error
