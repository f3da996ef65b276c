"""`warmpath explain` as a client: what it sends, what it shows, and what it says when there is nothing to show."""

import base64
import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from extproc import explaining
from extproc.choose.explain import BEYOND, CandidateCost, Explanation
from extproc.cli import main
from extproc.config import Config
from extproc.errors import ConfigError, WarmpathError
from tests.ports import free_port
from tests.unit.top.parts import config, document, explanation, write


class Admin:
    """An admin page that answers what it was told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status, self.body = 200, msgspec.json.encode(explanation())
        self.asked: list[tuple[str, str, bytes]] = []
        admin = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                admin.asked.append((self.command, self.path, self.rfile.read(length)))
                self.send_response(admin.status)
                self.send_header("content-length", str(len(admin.body)))
                self.end_headers()
                self.wfile.write(admin.body)

            do_GET = do_POST = answer  # noqa: N815 -- names of the base class

            def log_message(self, *_arguments: object) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    @property
    def config(self) -> Config:
        """A configuration that names this page."""
        return config(gateway={"sidecar": {"admin": f"127.0.0.1:{self.server.server_port}"}})


@pytest.fixture
def admin() -> Iterator[Admin]:
    """A running page."""
    page = Admin()
    thread = threading.Thread(target=page.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield page
    page.server.shutdown()
    thread.join()
    page.server.server_close()


def test_a_request_is_sent_whole(admin: Admin, tmp_path: Path) -> None:
    """Path, headers and the bytes of the file, whatever they are."""
    (tmp_path / "body").write_bytes(b'{"a": "\xff"}')
    headers = ["X-Session-Id: s:1 ", "a:"]
    told = explaining.of_request(admin.config, str(tmp_path / "body"), "/v1/completions", headers)
    assert told == explanation()
    ((method, page, question),) = admin.asked
    assert (method, page) == ("POST", "/explain")
    sent = json.loads(question)
    assert (sent["path"], sent["headers"]) == ("/v1/completions", {"X-Session-Id": "s:1", "a": ""})
    assert base64.b64decode(sent["body_base64"]) == b'{"a": "\xff"}'


def test_a_dash_is_standard_input(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body can come through a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    explaining.of_request(admin.config, "-", "/", [])
    assert base64.b64decode(json.loads(admin.asked[0][2])["body_base64"]) == b"piped"


def test_ids_are_sent_as_they_are(admin: Admin) -> None:
    """What a client put into `x-request-id` is one part of the path, whatever letters it has."""
    explaining.of_decision(admin.config, "a/b?c é")
    assert admin.asked[0][:2] == ("GET", "/decisions/a%2Fb%3Fc%20%C3%A9")


def test_an_empty_id_is_wrong_use() -> None:
    """As a shell makes it of a variable that is not set."""
    with pytest.raises(ConfigError, match="--id: write"):
        explaining.of_decision(config(), "")


def test_an_id_that_is_no_text_is_wrong_use() -> None:
    """Bytes of the command line that are not UTF-8 cannot be part of a path; the id is not repeated."""
    with pytest.raises(ConfigError, match="--id: not UTF-8 text; write"):
        explaining.of_decision(config(), "a\udcff")


@pytest.mark.parametrize("header", ["novalue", ":x", " : x"])
def test_a_header_that_is_none_is_wrong_use(header: str) -> None:
    """The text shows the form; the value could be a secret and is not repeated."""
    with pytest.raises(ConfigError, match="NAME:VALUE") as raised:
        explaining.of_request(config(), "-", "/", [header])
    assert "novalue" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The option, the file, and why."""
    with pytest.raises(ConfigError, match=r"--request .*none: cannot be read: No such file"):
        explaining.of_request(config(), str(tmp_path / "none"), "/", [])


def test_a_body_that_no_gateway_would_take_is_not_sent(tmp_path: Path) -> None:
    """The limit is the gateway's own, and is named."""
    (tmp_path / "long").write_bytes(b"x" * 2000)
    with pytest.raises(ConfigError, match=r"long: longer than the 1999 bytes of gateway\.max_body_bytes"):
        explaining.of_request(config(gateway={"max_body_bytes": 1999}), str(tmp_path / "long"), "/", [])


def test_the_sidecars_own_words_are_passed_on(admin: Admin) -> None:
    """An error of the admin page is shown as it is."""
    admin.status, admin.body = 404, b'{"error": {"message": "not known (any more)", "code": 404}}'
    with pytest.raises(WarmpathError, match=r"^not known \(any more\)$"):
        explaining.of_decision(admin.config, "x")


@pytest.mark.parametrize(("status", "body"), [(200, b"{}"), (200, b"hello"), (404, b"404: Not Found"), (500, b"")])
def test_an_answer_of_another_kind_is_named(admin: Admin, status: int, body: bytes) -> None:
    """Something else listens there, or another version."""
    admin.status, admin.body = status, body
    with pytest.raises(WarmpathError, match=f"answered {status} with something else"):
        explaining.of_decision(admin.config, "x")


def test_a_sidecar_that_does_not_run_is_named() -> None:
    """Address, reason, and what to do."""
    port = free_port()
    with pytest.raises(WarmpathError, match=rf"127\.0\.0\.1:{port} does not answer .*refused.*warmpath serve"):
        explaining.of_decision(config(gateway={"sidecar": {"admin": f"0.0.0.0:{port}"}}), "x")


def test_a_listener_that_hangs_up_is_named() -> None:
    """A connection that ends before the answer is no traceback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        settings = config(gateway={"sidecar": {"admin": f"127.0.0.1:{listener.getsockname()[1]}"}})
        with pytest.raises(WarmpathError, match="does not answer"):
            explaining.of_decision(settings, "x")
        thread.join()


def test_the_text_is_a_table() -> None:
    """Facts first, then one row a candidate with the pick marked, then who was dropped."""
    assert explaining.to_text(explanation()) == (
        "Worker r1 would decide now, and has charged and pinned nothing:\n"
        "pool main, policy predicted_ttft, chat: 1,234 prompt tokens, 1 answer, 4 output tokens expected\n"
        "session pin: no session\n"
        "pick: b, because it costs least\n"
        "\n"
        "  endpoint  matched         by  uncached  prefill  backlog  cost ms  TTFT ms\n"
        "  a               0  estimated     1,234    246.9     10.0    256.9    133.0\n"
        "> b           1,111    precise       124     24.7      0.3     25.0     12.5\n"
        "\n"
        "dropped: c, asleep\n"
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"charge_id": "c1"}, "Worker r1 decided at 2027-01-15 08:00:00 UTC, charge c1:"),
        ({"charge_id": "c1", "request_id": "q"}, "Worker r1 decided at 2027-01-15 08:00:00 UTC, charge c1, request q:"),
        ({"flaw": "bad_json", "answers": 2}, "2 answers, 4 output tokens expected; its prompt was not read: bad_json"),
        ({"pin": "honoured", "pinned_to": "b", "why": "pin"}, "because the session is pinned to it"),
        ({"pin": "honoured", "pinned_to": "b"}, "session pin: honoured (b)"),
        ({"pin": "moved", "pinned_to": "a"}, "or cost over 1000 ms more than the cheapest (a)"),
        ({"pin": "unknown"}, "the shared store does not answer"),
        ({"why": "tie_order"}, "because it costs within 3 ms of the least, and stands first"),
        ({"why": "least_cost"}, "because it cost least, or within 3 ms of the least"),
        ({"why": "no_endpoint", "pick": ""}, "pick: none, because no endpoint may serve"),
        (
            {"model": "m", "version": "new", "version_by": "session"},
            "\nmodel m, version new: by the versions' shares of now, for its session\npool main",
        ),
        ({"version": "new", "version_by": "conversation"}, "for its conversation, recognised by its beginning\n"),
        ({"version": "new", "version_by": "tenant"}, "by the versions' shares of now, for its tenant\n"),
        ({"version": "new", "version_by": "request"}, "by the versions' shares of now, for this request alone\n"),
        (
            {"version": "new", "version_by": "nobody"},
            "by the versions' shares of now, for whatever cannot be told apart\n",
        ),
        ({"version": "new", "version_why": "tester"}, "version new: its client asked for it\n"),
        ({"version": "old", "version_why": "running"}, "version old: its conversation runs there, and would begin"),
        ({"version": "old", "version_why": "response"}, "version old: it holds the stored response\n"),
        (
            {"version": "old", "version_why": "no_endpoint", "version_by": "session"},
            "version old: no endpoint of the version that the shares of now give for its session can serve\n",
        ),
    ],
)
def test_every_fact_has_its_words(fields: dict[str, Any], told: str) -> None:
    """What the value says, the text says."""
    assert told in explaining.to_text(explanation(**fields))


def test_what_is_not_known_is_a_dash_and_explained() -> None:
    """A past decision knows the load of its pick alone."""
    rows = [CandidateCost("a", "", 0.0, 5.0, {"prefill": 1.0}, None, None), explanation().candidates[1]]
    text = explaining.to_text(explanation(candidates=rows))
    assert "  a               0  estimated         5      1.0        -        -        -\n" in text
    assert text.endswith("A `-` is not known: a past decision knows the shared load of its pick alone.\n")


def test_endpoints_past_the_candidates_are_counted() -> None:
    """A large pool does not fill the screen with who was not weighed."""
    many = [CandidateCost(f"x{number}", BEYOND, 0.0, 5.0, {}, None, None) for number in range(900)]
    text = explaining.to_text(explanation(candidates=[*explanation().candidates, *many]))
    assert "not weighed: 900 more that may serve, dearer by what is known here (routing.candidates)\n" in text
    assert "x1" not in text


def test_without_any_candidate_there_is_no_table() -> None:
    """Only the reasons are left."""
    asleep = [CandidateCost("c", "asleep", 0.0, 1.0, {}, None, None)]
    text = explaining.to_text(explanation(candidates=asleep, pick="", why="no_endpoint"))
    assert text.endswith("because no endpoint may serve\n\ndropped: c, asleep\n")


def test_json_is_the_value() -> None:
    """One object on one line, that reads back as what it was."""
    text = explaining.to_json(explanation())
    assert text.count("\n") == 1
    assert msgspec.json.decode(text, type=Explanation) == explanation()


def test_the_command_prints_text_or_json(admin: Admin, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both questions, both forms; exit code 0."""
    admin_address = f"gateway.sidecar.admin=127.0.0.1:{admin.server.server_port}"
    path = write(tmp_path / "warmpath.yaml", document())
    shared = ["explain", "--config", str(path), "--set", admin_address]
    assert main([*shared, "--id", "x"]) == 0
    assert capsys.readouterr().out == explaining.to_text(explanation())
    assert main([*shared, "--request", str(path), "--json"]) == 0
    assert capsys.readouterr().out == explaining.to_json(explanation())


def test_a_decision_that_is_not_known_is_exit_code_1(
    admin: Admin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error, nothing on standard output."""
    admin.status, admin.body = 404, b'{"error": {"message": "no worker remembers it"}}'
    path = write(
        tmp_path / "warmpath.yaml", document(gateway={"sidecar": {"admin": f"127.0.0.1:{admin.server.server_port}"}})
    )
    assert main(["explain", "--config", str(path), "--id", "x", "--json"]) == 1
    assert capsys.readouterr() == ("", "warmpath: no worker remembers it\n")


@pytest.mark.parametrize("arguments", [[], ["--id", "x", "--request", "-"]])
def test_one_question_at_a_time(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A request or an id: neither and both are wrong use."""
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    assert ended.value.code == 2
    assert "--id" in capsys.readouterr().err
