"""How alike two answers are in meaning: the cosine of their embeddings, asked of an engine with `/v1/embeddings`."""

import math
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

LONGEST: Final = 8_000
"""Characters of each text that are embedded: some 2,000 tokens, which most embedding models take."""
_MOST_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 30.0
_OK: Final = 200


class _Row(msgspec.Struct):
    embedding: list[float]
    index: int


class _Embedded(msgspec.Struct):
    data: list[_Row]


_decode = msgspec.json.Decoder(_Embedded).decode


class Embedder:
    """Asks for embeddings.

    Attributes:
        failed: how often it got no usable answer.
    """

    def __init__(self, http: aiohttp.ClientSession, timeout_s: float = _TIMEOUT_S) -> None:
        """`http` is closed by who made it; `timeout_s` is the longest time of one question."""
        self.failed = 0
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def alike(self, url: str, model: str, one: str, other: str) -> float | None:
        """Cosine of two texts, -1 to 1; None when one is empty, or the engine gives no answer that is of use.

        Args:
            url: `http://host:port` of the engine.
            model: the model to ask there.
            one: a text.
            other: another text.
        """
        if not one.strip() or not other.strip():
            return None
        if one == other:
            return 1.0
        body = {"model": model, "input": [one[:LONGEST], other[:LONGEST]], "encoding_format": "float"}
        try:
            found = _cosine(await self._ask(f"{url.rstrip('/')}/v1/embeddings", body))
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, UnicodeError, ValueError):
            found = None
        if found is None:
            self.failed += 1
        return found

    async def _ask(self, url: str, body: dict[str, Any]) -> bytes:
        """The answer's body. Raises ValueError for an answer that is none."""
        async with self._http.post(url, json=body, timeout=self._timeout, allow_redirects=False) as reply:
            if reply.status != _OK:
                raise ValueError(f"the engine answered {reply.status}")
            held = bytearray()
            async for piece in reply.content.iter_any():
                held += piece
                if len(held) > _MOST_BYTES:
                    raise ValueError(f"the engine answered more than {_MOST_BYTES} bytes")
            return bytes(held)


def _cosine(body: bytes) -> float | None:
    """Cosine of the two embeddings in an answer; None of others than two of one size. Raises as `_scaled` does."""
    rows: Sequence[_Row] = sorted(_decode(body).data, key=lambda row: row.index)
    if [row.index for row in rows] != [0, 1] or len(rows[0].embedding) != len(rows[1].embedding):
        return None
    one, other = (_scaled(np.array(row.embedding, dtype=np.float64)) for row in rows)
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return max(-1.0, min(1.0, float(one @ other) / length))


def _scaled(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """A vector by its greatest value, whose square then is a number. Raises ValueError for none and for all 0."""
    greatest = float(np.abs(vector).max())
    if not math.isfinite(greatest) or greatest <= 0.0:
        raise ValueError("an embedding without a direction")
    return vector / greatest
