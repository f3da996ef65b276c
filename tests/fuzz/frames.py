"""Atheris target for KV events: ZMQ messages, msgpack batches, and TensorRT-LLM's JSON.

`python -m tests.fuzz.frames -atheris_runs=50000`. An input is either taken as it is, or edits one of the good payloads
below, which reaches deeper than bytes from nothing. Anything but a value or an `EngineError` is a crash.
"""

import contextlib
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(include=["extproc.engines"]):
    from extproc.engines import kv_decode, kv_frames, kv_trtllm
    from extproc.engines.kv_layout import Layout
    from extproc.errors import EngineError

_BATCHES = (
    # vLLM 0.32 with an adapter, an image and a salt; SGLang 0.5.19 with a salt; SGLang 0.5.23.
    bytes.fromhex(
        "93cb3ff0000000000000938ca474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb1706172656e745f626c"
        "6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f696403a66d65646975"
        "6da3475055a96c6f72615f6e616d65a26c62aa65787472615f6b6579739293a26c6292a3696d67fea874656e616e742d6191a26c62a967"
        "726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a1"
        "7385a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c42000000000000000000000000000000000000000"
        "0000000000000000000000000ba66d656469756da3435055a967726f75705f69647800a86c6f63616c697479a54c4f43414c81a4747970"
        "65b0416c6c426c6f636b73436c656172656401"
    ),
    bytes.fromhex(
        "93cb3ff00000000000009497ab426c6f636b53746f72656492f50cc098010203040506070804c0a347505598ab426c6f636b53746f7265"
        "6492f50cc098010203040506070804c0a347505581aa63616368655f73616c74a874656e616e742d6193ac426c6f636b52656d6f766564"
        "91f5aa4350555f50494e4e454491b0416c6c426c6f636b73436c656172656401"
    ),
)
_ANSWERS = (
    b'[{"event_id":0,"data":{"type":"created","num_blocks_per_cache_level":[9,0]},"window_size":64},{"event_id":1,'
    b'"data":{"type":"stored","parent_hash":null,"blocks":[{"type":"stored_block","block_hash":456,"tokens":[{"type":'
    b'"unique_token","token_id":1,"token_extra_id":0}],"cache_level":0,"priority":35,"mm_keys":[{"type":"mm_key",'
    b'"hash":"ab","start_offset":4}],"cache_salt":"s"}]},"window_size":64,"attention_dp_rank":1},{"event_id":2,"data":'
    b'{"type":"updated","block_hash":"ab","cache_level":{"type":"event_diff","new_value":1,"old_value":0},"priority":'
    b'null},"window_size":64},{"event_id":3,"data":{"type":"removed","block_hashes":[456]},"window_size":64}]',
)
_EDITS = 8


def one_input(data: bytes) -> None:
    """Run one input through all three readers; its first byte says how it is to be used."""
    provider = atheris.FuzzedDataProvider(data)
    is_edit = provider.ConsumeBool()
    _run(_batch, _edited(provider, _BATCHES) if is_edit else provider.ConsumeBytes(4096))
    _run(_answer, _edited(provider, _ANSWERS) if is_edit else provider.ConsumeBytes(4096))
    parts = [provider.ConsumeBytes(provider.ConsumeIntInRange(0, 12)) for _ in range(provider.ConsumeIntInRange(0, 5))]
    with contextlib.suppress(EngineError):
        kv_frames.live(parts)
    with contextlib.suppress(EngineError):
        kv_frames.replayed(parts)


def _batch(payload: bytes) -> None:
    kv_decode.decode(payload, Layout())


def _answer(payload: bytes) -> None:
    kv_trtllm.decode(payload, Layout())


def _run(reader: Callable[[bytes], None], payload: bytes) -> None:
    with contextlib.suppress(EngineError):
        reader(payload)


def _edited(provider: "atheris.FuzzedDataProvider", goods: tuple[bytes, ...]) -> bytes:
    """One of the good payloads with some places overwritten, cut out or filled in."""
    payload = bytearray(goods[provider.ConsumeIntInRange(0, len(goods) - 1)])
    for _ in range(provider.ConsumeIntInRange(0, _EDITS)):
        start = provider.ConsumeIntInRange(0, len(payload))
        end = start + provider.ConsumeIntInRange(0, 4)
        payload[start:end] = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 6))
    return bytes(payload)


def main() -> None:
    """Fuzz with the flags of the command line."""
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
