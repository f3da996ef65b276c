"""What `warmpath up` shows of its children's logs."""

import io
import logging

import pytest

from extproc.telemetry import logs
from extproc.up import readable


def test_our_own_log_lines_are_shown_as_people_read_them() -> None:
    """Process, level, message and fields; the time and the logger's name are left out."""
    stream = io.StringIO()
    handler = logs.setup("info", "worker-0", stream)
    try:
        logging.getLogger("extproc.test").info("worker is ready", extra={"address": "unix:/x", "workers": 2})
    finally:
        logging.getLogger().removeHandler(handler)
    shown = readable(stream.getvalue().rstrip())
    assert shown == "worker-0: info: worker is ready (address=unix:/x workers=2)"


@pytest.mark.parametrize("line", ["", "plain text", '{"time": broken', '{"engine": 0, "address": "127.0.0.1:1"}'])
def test_any_other_line_is_shown_as_it_is(line: str) -> None:
    """Envoy, Valkey and the engines write their own ways."""
    assert readable(line) == line
