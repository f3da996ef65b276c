"""`warmpath explain`: asks the running sidecar's admin page, and shows what it says as a table or as JSON."""

import base64
import http.client
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from extproc import addresses
from extproc.choose.explain import BEYOND, CandidateCost, Explanation
from extproc.config import Config, split_address
from extproc.errors import ConfigError, WarmpathError

_PATIENCE_S: Final = 30.0

WHY: Final[Mapping[str, str]] = {
    "cheapest": "costs least",
    "tie_order": "costs within {tie_ms:g} ms of the least, and stands first in the order of ties",
    "least_cost": "cost least, or within {tie_ms:g} ms of the least and first in the order of ties",
    "pin": "the session is pinned to it",
    "no_endpoint": "no endpoint may serve",
}
PIN: Final[Mapping[str, str]] = {
    "none": "no session",
    "new": "a session without a pin: this decision pins it",
    "honoured": "honoured",
    "moved": "moved: the pinned endpoint may not serve, or cost over {break_out_ms:g} ms more than the cheapest",
    "unknown": "not known: the shared store does not answer, and workers go by their own ledgers",
}

VERSION: Final[Mapping[str, str]] = {
    "weight": "by the versions' shares of now, for {of}",
    "tester": "its client asked for it",
    "running": "its conversation runs there, and would begin elsewhere by the shares of now",
    "response": "it holds the stored response",
    "no_endpoint": "no endpoint of the version that the shares of now give for {of} can serve",
}
OF: Final[Mapping[str, str]] = {
    "session": "its session",
    "conversation": "its conversation, recognised by its beginning",
    "tenant": "its tenant",
    "request": "this request alone",
    "nobody": "whatever cannot be told apart",
}


def of_request(config: Config, request: str, path: str, headers: Sequence[str]) -> Explanation:
    """Ask what would be decided for a request now.

    Args:
        config: configuration of the sidecar that runs; `gateway.sidecar.admin` is asked.
        request: file that holds the request's body; `-` for standard input.
        path: path of the request.
        headers: `NAME:VALUE` each.

    Raises:
        ConfigError: the file cannot be read or is longer than a body may be, or a header is not of that form.
        WarmpathError: the sidecar does not answer, or refuses the question; the text says why.
    """
    question = {
        "path": path,
        "headers": dict(_header(each) for each in headers),
        "body_base64": base64.b64encode(_body(request, config.gateway.max_body_bytes)).decode("ascii"),
    }
    return _ask(config, "POST", "/explain", json.dumps(question).encode())


def of_decision(config: Config, name: str) -> Explanation:
    """Ask why a past decision was made.

    Args:
        config: as for `of_request`.
        name: the request's `x-request-id`, or the charge id.

    Raises:
        ConfigError: the name is empty, or no UTF-8 text.
        WarmpathError: the sidecar does not answer, or no worker remembers the decision; the text says which.
    """
    if not name:
        raise ConfigError("--id: write the answer's x-request-id header, or the charge id of the decision")
    try:
        part = quote(name, safe="")
    except UnicodeEncodeError as error:
        # Bytes of the command line that are no UTF-8 come as lone surrogates.
        raise ConfigError(
            "--id: not UTF-8 text; write the id as the header x-request-id of the answer has it"
        ) from error
    return _ask(config, "GET", f"/decisions/{part}")


def to_json(explanation: Explanation) -> str:
    """The explanation as one JSON object on one line."""
    return msgspec.json.encode(explanation).decode() + "\n"


def to_text(explanation: Explanation) -> str:
    """The explanation as a few sentences and a table of what was weighed."""
    told = msgspec.structs.asdict(explanation)
    weighed = [each for each in explanation.candidates if not each.dropped]
    lines = [
        _when(explanation),
        *_version(explanation),
        f"pool {explanation.pool}, policy {explanation.policy}, {explanation.kind}: {_request(explanation)}",
        f"session pin: {PIN[explanation.pin].format(**told)}"
        + (f" ({explanation.pinned_to})" if explanation.pinned_to else ""),
        f"pick: {explanation.pick or 'none'}, because {_because(explanation).format(**told)}",
        "",
        *(_table(explanation.pick, weighed) if weighed else []),
        *_dropped(explanation.candidates),
    ]
    if any(each.cost_ms is None for each in weighed):
        lines.append("A `-` is not known: a past decision knows the shared load of its pick alone.")
    return "\n".join(lines).rstrip("\n") + "\n"


def _version(explanation: Explanation) -> list[str]:
    if not explanation.version:
        return []
    why = VERSION[explanation.version_why].format(of=OF[explanation.version_by])
    return [f"model {explanation.model}, version {explanation.version}: {why}"]


def _when(explanation: Explanation) -> str:
    if not explanation.charge_id:
        return f"Worker {explanation.replica} would decide now, and has charged and pinned nothing:"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(explanation.at))
    request = f", request {explanation.request_id}" if explanation.request_id else ""
    return f"Worker {explanation.replica} decided at {at} UTC, charge {explanation.charge_id}{request}:"


def _request(explanation: Explanation) -> str:
    answers = "1 answer" if explanation.answers == 1 else f"{explanation.answers} answers"
    text = f"{explanation.prompt_tokens:,.0f} prompt tokens, {answers}"
    if explanation.output_tokens:
        text += f", {explanation.output_tokens:,.0f} output tokens expected"
    return f"{text}; its prompt was not read: {explanation.flaw}" if explanation.flaw else text


def _because(explanation: Explanation) -> str:
    return f"it {WHY[explanation.why]}" if explanation.why not in ("pin", "no_endpoint") else WHY[explanation.why]


def _table(pick: str, weighed: Sequence[CandidateCost]) -> list[str]:
    """One row a candidate: tokens matched and uncached, by what they were matched, then milliseconds."""
    names = list(dict.fromkeys(name for each in weighed for name in each.terms))
    header = ["", "endpoint", "matched", "by", "uncached", *names, "cost ms", "TTFT ms"]
    rows = [
        [
            ">" if each.endpoint == pick else "",
            each.endpoint,
            f"{each.matched_tokens:,.0f}",
            each.matched_by,
            f"{each.uncached_tokens:,.0f}",
            *(_number(each.terms.get(name)) for name in names),
            _number(each.cost_ms),
            _number(each.predicted_ttft_ms),
        ]
        for each in weighed
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [_row(row, widths) for row in (header, *rows)] + [""]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Marker and endpoint stand to the left, numbers to the right."""
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join([" ".join(left), *right]).rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _dropped(candidates: Sequence[CandidateCost]) -> list[str]:
    lines = [f"dropped: {each.endpoint}, {each.dropped}" for each in candidates if each.dropped not in ("", BEYOND)]
    beyond = sum(each.dropped == BEYOND for each in candidates)
    if beyond:
        lines.append(f"not weighed: {beyond} more that may serve, dearer by what is known here (routing.candidates)")
    return lines


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError("--header: write it as NAME:VALUE, as x-session-id:s1")
    return name.strip(), value.strip()


def _body(request: str, most: int) -> bytes:
    try:
        body = sys.stdin.buffer.read() if request == "-" else Path(request).read_bytes()
    except OSError as error:
        raise ConfigError(f"--request {request}: cannot be read: {error.strerror}") from error
    if len(body) > most:
        raise ConfigError(f"--request {request}: longer than the {most} bytes of gateway.max_body_bytes")
    return body


def _ask(config: Config, method: str, page: str, body: bytes | None = None) -> Explanation:
    """One question to the admin page. An answer that is no explanation is an error with the sidecar's own text."""
    admin = addresses.reachable(config.gateway.sidecar.admin)
    host, port = split_address(admin)
    connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
    try:
        connection.request(method, page, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        status, told = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise WarmpathError(
            f"the sidecar at {admin} does not answer ({reason}): start it with `warmpath serve` or `warmpath up`, or "
            "give the configuration it runs with (--config, --set gateway.sidecar.admin=HOST:PORT)"
        ) from error
    finally:
        connection.close()
    try:
        if status == 200:
            return msgspec.json.decode(told, type=Explanation)
        raise WarmpathError(msgspec.json.decode(told, type=_Refusal).error.message)
    except msgspec.DecodeError:
        raise WarmpathError(
            f"the sidecar at {admin} answered {status} with something else: is it of this version?"
        ) from None


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """The OpenAI-shaped body of an error."""

    error: _Error
