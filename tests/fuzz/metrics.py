"""Atheris target for the pages of engines: metrics in text, loads, step records, and what slow pages tell.

`python -m tests.fuzz.metrics -atheris_runs=20000`. An input is either taken as it is, or edits one of the golden pages,
which reaches deeper than bytes from nothing. Anything but a value that can be published or an `EngineError` is a crash.
"""

import contextlib
import sys
from itertools import chain
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["extproc.engines"]):
    from extproc.engines.detect import all_adapters
    from extproc.errors import EngineError

_PAGES = Path(__file__).parents[1] / "unit" / "engines" / "pages"
_LONGEST = 6000
"""Bytes of a golden page that are used: its metrics come before its histograms."""
_GOOD = tuple(path.read_bytes()[:_LONGEST] for path in sorted(_PAGES.iterdir()))
_EDITS = 8
_ADAPTERS = all_adapters()


def one_input(data: bytes) -> None:
    """Run one input through all readers; its first byte says how it is to be used."""
    provider = atheris.FuzzedDataProvider(data)
    page = _edited(provider) if provider.ConsumeBool() else provider.ConsumeBytes(_LONGEST)
    for adapter in _ADAPTERS:
        for path in adapter.load_pages:
            with contextlib.suppress(EngineError):
                msgspec.msgpack.encode(adapter.read(path, page))
        for path in chain(*adapter.about_pages):
            with contextlib.suppress(EngineError):
                msgspec.msgpack.encode(adapter.about(path, page))


def _edited(provider: "atheris.FuzzedDataProvider") -> bytes:
    """One of the golden pages with some places overwritten, cut out or filled in."""
    page = bytearray(_GOOD[provider.ConsumeIntInRange(0, len(_GOOD) - 1)])
    for _ in range(provider.ConsumeIntInRange(0, _EDITS)):
        at = provider.ConsumeIntInRange(0, len(page))
        page[at : at + provider.ConsumeIntInRange(0, 16)] = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 16))
    return bytes(page)


def main() -> None:
    """Fuzz until the flags on the command line say to stop."""
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
