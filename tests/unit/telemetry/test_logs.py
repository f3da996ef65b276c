"""Log lines are JSON objects, and secrets never stand in them."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import LogLevel
from extproc.telemetry.logs import REDACTED, ROOT, SECRET_KEYS, scrub, setup

_HIDE = "sk-5f3c9a0d"


class Sink:
    """A stream and the lines that came out of it."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def setup(self, level: LogLevel = "info") -> None:
        """Send logs here."""
        setup(level, "worker-0", self.stream, host="h")

    def lines(self) -> list[dict[str, Any]]:
        """All lines, parsed."""
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def sink() -> Iterator[Sink]:
    """Logs set up to go to a sink; the state of `logging` is put back afterwards."""
    root, own = logging.getLogger(), logging.getLogger(ROOT)
    handlers, levels = list(root.handlers), (root.level, own.level)
    sink = Sink()
    sink.setup()
    yield sink
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def _fail_and_log(text: str) -> None:
    held = "-".join(["local", "value"])
    try:
        _refuse(text, held)
    except ValueError:
        logging.getLogger("extproc.x").exception("failed")


def _refuse(text: str, _held: str) -> None:
    raise ValueError(text)


def test_a_record_is_one_json_line_with_bound_and_extra_fields(sink: Sink) -> None:
    """Message, level, logger, bound fields and `extra` stand on one line, newlines in texts notwithstanding."""
    logging.getLogger("extproc.fleet").info("endpoint %s\nlost", "e:1", extra={"pool": "chat", "tries": 3})
    (line,) = sink.lines()
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "extproc.fleet",
        "message": "endpoint e:1\nlost",
        "process": "worker-0",
        "host": "h",
        "pool": "chat",
        "tries": 3,
    }


def test_the_level_holds_for_this_package_and_libraries_speak_from_warning_on(sink: Sink) -> None:
    """Debug is off until asked for; a library's info never comes through."""
    sink.setup("debug")
    logging.getLogger("extproc.x").debug("ours")
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("theirs")
    sink.setup("error")
    logging.getLogger("extproc.x").warning("quiet")
    assert [line["message"] for line in sink.lines()] == ["ours", "theirs"]


def test_setting_up_twice_writes_each_line_once(sink: Sink) -> None:
    """A reload replaces the handler."""
    sink.setup()
    logging.getLogger("extproc").warning("once")
    assert len(sink.lines()) == 1


@pytest.mark.parametrize("key", sorted(SECRET_KEYS | {"X-API-Key", "Set-Cookie", "Session-ID"}))
def test_values_of_secret_keys_never_pass(sink: Sink, key: str) -> None:
    """Wherever a secret-bearing key turns up as a field, its value is blotted out."""
    log = logging.getLogger("extproc.x")
    log.warning("a", extra={key: _HIDE})
    log.warning("b", extra={"request": {"list": [{key: {"deep": _HIDE}}]}})
    log.warning("c %s", {key: _HIDE})
    log.warning("d %s %s", 1, [{key: _HIDE}])
    assert len(sink.lines()) == 4
    assert _HIDE not in sink.stream.getvalue()
    assert sink.lines()[0][key] == REDACTED


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {_HIDE}",
        f"authorization={_HIDE}, next",
        f"api_key={_HIDE}",
        f"x-api-key: {_HIDE}",
        f"{{'prompt': 'tell {_HIDE} and more'}}",
        f'{{"session_id": "{_HIDE}"}}',
        f"Error 22 connecting to redis://user:{_HIDE}@10.0.0.1:6379/0.",
        f"password = {_HIDE}",
        f"sent basic {_HIDE}==",
    ],
)
def test_secrets_in_texts_are_blotted_out(sink: Sink, text: str) -> None:
    """Messages, arguments, fields and exceptions are scrubbed of assigned secrets, tokens and URL passwords."""
    log = logging.getLogger("extproc.x")
    log.warning(text)
    log.warning("%s", text)
    log.warning("x", extra={"error": text, "cause": ValueError(text)})
    _fail_and_log(text)
    assert len(sink.lines()) == 4
    assert _HIDE not in sink.stream.getvalue()


def test_texts_without_secrets_stay_as_they_are() -> None:
    """Addresses, counts of tokens and plain sentences are not touched."""
    for text in ("redis://10.0.0.1:6379/0 timed out", "prompt_tokens=512 cached_tokens=0", "no session was given"):
        assert scrub(text) == text


def test_an_exception_is_told_without_locals(sink: Sink) -> None:
    """The traceback names type, message and lines, and shows no variable's value."""
    _fail_and_log("it broke")
    (line,) = sink.lines()
    assert "ValueError: it broke" in line["exception"]
    assert "local-value" not in line["exception"]


def test_what_json_cannot_hold_is_named_by_its_type(sink: Sink) -> None:
    """Bytes and objects are never dumped: a body could be in them."""
    logging.getLogger("extproc.x").warning("x %s", b"prompt", extra={"raw": b"prompt text", "thing": object()})
    (line,) = sink.lines()
    assert line["message"] == "x <bytes>"
    assert (line["raw"], line["thing"]) == ("<bytes>", "<object>")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda held: st.lists(held, max_size=3) | st.dictionaries(st.text(max_size=8), held, max_size=3),
    )
)
def test_any_field_gives_one_line_that_can_be_parsed(value: object) -> None:
    """Whatever a caller passes, the line is one JSON object."""
    stream = io.StringIO()
    root = logging.getLogger()
    handler = setup("info", "p", stream)
    try:
        logging.getLogger("extproc.x").warning("x", extra={"value": value})
    finally:
        root.removeHandler(handler)
    (line,) = stream.getvalue().splitlines()
    # Python reads NaN and Infinity, other readers of JSON do not.
    assert json.loads(line, parse_constant=pytest.fail)["message"] == "x"
