"""What the keeper knows of one endpoint, as it is published in the store and read by every worker."""

import msgspec

from extproc.errors import StoreError

STALE_AFTER = 3
"""Scrapes in a row that may fail before the numbers count as stale: one page gets lost now and then."""


class Source(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Where the KV events of one data-parallel rank are to be had; `engines.kv_values.EventSource` as it is published.

    Attributes:
        rank: the rank.
        way: `zmq`, `drain`, or what newer keepers know.
        endpoint: as in `EventSource`.
        replay: as in `EventSource`.
        topic: as in `EventSource`.
    """

    rank: int = 0
    way: str = "zmq"
    endpoint: str = ""
    replay: str = ""
    topic: str = ""


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
        unread: scrapes in a row that brought no numbers. From `STALE_AFTER` on the numbers here are too old for use;
            the endpoint serves all the same.
        frozen: its numbers move only when a request completes, or every so many steps, and have not for seconds: what
            the fleet itself has in flight there tells more.
        kind: kind of engine (`vllm`, `sglang`, `tensorrt_llm`); empty while unknown.
        page: path of the page that the numbers are from.
        models: names that the base model is served as, by the engine.
        adapters: LoRA adapters that are loaded.
        active_adapters: of these, those with requests in the engine.
        max_adapters: adapters that one batch may mix; 0 when it did not tell.
        ranks: data-parallel ranks; 0 when it did not tell.
        sources: where its KV events are to be had.
        hash_algo: how it hashes its blocks; empty when it did not tell.
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
    unread: int = 0
    frozen: bool = False
    kind: str = ""
    page: str = ""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    active_adapters: tuple[str, ...] = ()
    max_adapters: int = 0
    ranks: int = 0
    sources: tuple[Source, ...] = ()
    hash_algo: str = ""

    @property
    def stale(self) -> bool:
        """Whether the numbers are too old for use, by the word of the keeper that tried to read newer ones."""
        return self.unread >= STALE_AFTER

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
