"""Good inputs with faults put in, which reach deeper than bytes from nothing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import atheris

_EDITS: Final = 8


def edited(provider: "atheris.FuzzedDataProvider", good: bytes, tricks: Sequence[bytes]) -> bytes:
    """The input with some places overwritten, cut out or filled in, by `tricks` or by any bytes."""
    body = bytearray(good)
    for _ in range(provider.ConsumeIntInRange(0, _EDITS)):
        start = provider.ConsumeIntInRange(0, len(body))
        end = start + provider.ConsumeIntInRange(0, 8)
        if provider.ConsumeBool():
            body[start:end] = tricks[provider.ConsumeIntInRange(0, len(tricks) - 1)]
        else:
            body[start:end] = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 8))
    return bytes(body)
