"""Atheris target for the answers of engines that shadow comparison reads: streams and JSON, packed, cut anywhere.

`python -m tests.fuzz.answers -atheris_runs=50000`. An input is either taken as it is, or edits one of the recorded
answers, which reaches deeper than bytes from nothing. Anything raised is a crash; so is an answer that cannot be
compared with itself, or that is not the same when its bytes come in one piece.
"""

import gzip
import sys
from pathlib import Path
from typing import Final

import atheris
import msgspec

from tests.edits import edited

with atheris.instrument_imports(include=["extproc.shadow", "extproc.relay.events"]):
    from extproc.request.model import RouteKind
    from extproc.shadow.answer import COMPARABLE, Answer, Collector
    from extproc.shadow.compare import Settings, compared
    from extproc.shadow.refusals import compiled
    from extproc.shadow.result import About, decode, encode, result

_PAGES: Final = Path(__file__).parents[1] / "unit" / "shadow" / "pages"
_KINDS: Final = sorted(COMPARABLE)
_GOOD: Final = {kind: [page.read_bytes() for page in sorted(_PAGES.glob(f"*_{kind}.*"))] for kind in _KINDS}
_TRICKS: Final = (
    b"null",
    b"[]",
    b"{}",
    b"-1",
    b"1e999",
    b'"\\ud800"',
    b"\xff",
    b"[" * 300,
    b'"error":1,',
    b"\n\n",
    b"true",
)
_LONGEST: Final = 8192
_SETTINGS: Final = Settings(b"key", compiled((), "refusals"))


def one_input(data: bytes) -> None:
    """Read one answer; its first bytes say of which API it is, and how it is to be used."""
    provider = atheris.FuzzedDataProvider(data)
    kind = _KINDS[provider.ConsumeIntInRange(0, len(_KINDS) - 1)]
    headers = {"content-type": ("text/event-stream", "application/json", "")[provider.ConsumeIntInRange(0, 2)]}
    packed = provider.ConsumeIntInRange(0, 3)
    if provider.ConsumeBool():
        recorded = _GOOD[kind]
        body = edited(provider, recorded[provider.ConsumeIntInRange(0, len(recorded) - 1)], _TRICKS)
    else:
        body = provider.ConsumeBytes(_LONGEST)
    if packed == 0:
        headers["content-encoding"] = "gzip"
        body = gzip.compress(body, 1, mtime=0)[: provider.ConsumeIntInRange(0, 2 * _LONGEST)]
    cuts = sorted(provider.ConsumeIntInRange(0, len(body)) for _ in range(provider.ConsumeIntInRange(0, 5)))
    whole, cut = _read(kind, headers, body, []), _read(kind, headers, body, cuts)
    assert _without_times(whole) == _without_times(cut)
    found = compared(whole, cut, _SETTINGS)
    assert found.outcome != "compared" or (found.exact and found.similarity == 1.0)
    about = About(id="r", at=1.0, model="m", primary="a", shadow="b", api=kind.value, streamed=True, body=body)
    line = encode(result(about, found, whole, cut, "all", b"key"))
    assert b"\n" not in line
    assert encode(decode(line)) == line


def _read(kind: RouteKind, headers: dict[str, str], body: bytes, cuts: list[int]) -> Answer:
    collector = Collector(kind, streamed=True, asked=0.0, longest=2 * _LONGEST)
    collector.began(200, headers, 0.0)
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        collector.chunk(body[start:end], float(end))
    collector.over(float(len(body)), complete=True)
    return collector.answer()


def _without_times(answer: Answer) -> Answer:
    return msgspec.structs.replace(answer, ttft_s=None, last_s=None, duration_s=0.0)


def main() -> None:
    """Fuzz with the flags of the command line."""
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
