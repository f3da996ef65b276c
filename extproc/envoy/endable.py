"""Streams that may be ended while their requests run, by the charge of their decisions."""

from typing import Protocol

from extproc.errors import WarmpathError


class Ends(Protocol):
    """A stream."""

    async def end(self, error: WarmpathError) -> bool:
        """End its request; whether it was still running. Never raises."""
        ...


class Endable:
    """Those of one process. Each is here from its decision to its end."""

    def __init__(self) -> None:
        self._streams: dict[str, Ends] = {}

    def add(self, charge_id: str, stream: Ends) -> None:
        """A request runs from now on."""
        self._streams[charge_id] = stream

    def remove(self, charge_id: str) -> None:
        """It is over."""
        self._streams.pop(charge_id, None)

    async def end(self, charge_id: str, error: WarmpathError) -> bool:
        """End the request of a charge; False when it is not one of this process, or is over. Never raises.

        Before the answer's headers the client gets the error; afterwards its stream breaks off.
        """
        stream = self._streams.get(charge_id)
        return stream is not None and await stream.end(error)

    def __len__(self) -> int:
        return len(self._streams)
