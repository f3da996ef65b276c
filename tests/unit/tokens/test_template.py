"""Chat templates: the same text as vLLM's own functions give for the same request."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from extproc.request.model import RouteKind
from extproc.tokens.asked import read
from extproc.tokens.content_format import takes_parts
from extproc.tokens.template import RENDER_S, Template
from extproc.tokens.values import Chat, NoTokensError, Why
from tests.unit.tokens import folders

GOLDEN = json.loads((Path(__file__).parent / "rendered_by_vllm_0.32.json").read_text(encoding="utf-8"))
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}


def chat_of(request: dict[str, Any]) -> Chat:
    """The conversation of a request's body."""
    wanted = read(RouteKind.CHAT, "/v1/chat/completions", json.dumps(request).encode(), "auto").wanted
    assert isinstance(wanted, Chat)
    return wanted


def rendered(source: str, request: dict[str, Any]) -> str | None:
    """What a template makes of a request; None where it is refused."""
    try:
        return Template(source, SPECIAL).render(chat_of(request))
    except NoTokensError:
        return None


def cases() -> list[Any]:
    """Each template with each request, and vLLM's text."""
    each = []
    for name, texts in GOLDEN["texts"].items():
        for at, (request, text) in enumerate(zip(GOLDEN["requests"], texts, strict=True)):
            each.append(pytest.param(folders.TEMPLATES[name], request, text, id=f"{name}-{at}"))
    return each


@pytest.mark.parametrize(("source", "request_", "text"), cases())
def test_the_text_is_that_of_vllm(source: str, request_: dict[str, Any], text: str | None) -> None:
    """What vLLM 0.32 renders (`parse_chat_messages`, `safe_apply_chat_template`) or refuses is the same here."""
    assert rendered(source, request_) == text


def test_most_golden_texts_are_texts() -> None:
    """A file of refusals would prove nothing."""
    texts = [text for texts in GOLDEN["texts"].values() for text in texts]
    assert len(texts) == 140
    assert sum(text is not None for text in texts) > 120


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% set all = messages %}{% for m in all %}{% for c in m['content'] %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", True),
        ("{% macro show(c) %}{% for x in c %}{% endfor %}{% endmacro %}{% for m in messages %}{% endfor %}", False),
        (
            "{% macro show(c) %}{% for x in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(c=m.content) }}{% endfor %}",
            True,
        ),
        ("{% for m in messages | reverse %}{% for c in m.content | list %}{% endfor %}{% endfor %}", True),
        ("{% for a, b in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", False),
    ],
)
def test_a_template_takes_parts_when_it_loops_over_content(source: str, parts: bool) -> None:
    """The rule of vLLM: by whatever names the template calls its messages and their content."""
    assert takes_parts(jinja2.Environment(autoescape=True).parse(source)) is parts


def test_the_date_is_that_of_the_clock() -> None:
    """Templates may print the date; it is local time, as in the engine."""
    template = Template("{{ strftime_now('%d %b %Y') }}", {}, lambda: datetime(2026, 11, 30, 8))
    assert template.render(chat_of({"messages": [{"role": "user", "content": "x"}]})) == "30 Nov 2026"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x }}",
        "{{ missing.field }}",
        "{% for i in range(1000000) %}x{% endfor %}",
    ],
)
def test_a_template_that_goes_wrong_refuses(source: str) -> None:
    """A template can neither change its input nor leave its sandbox; what it raises is a refusal."""
    with pytest.raises(NoTokensError) as caught:
        Template(source, {}).render(chat_of({"messages": [{"role": "user", "content": "x"}]}))
    assert caught.value.why is Why.REFUSED


@pytest.mark.parametrize(
    "messages",
    [
        ["text"],
        [{"content": "no role"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "tool_calls": [5]}],
        [{"role": "assistant", "tool_calls": {"id": "1"}}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
        [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f", "arguments": "{}"}}]}],
        [{"role": "developer", "content": "x", "tools": [5]}],
    ],
)
def test_messages_that_no_engine_takes_are_refused(messages: list[Any]) -> None:
    """They are the engine's to answer."""
    assert rendered(folders.CHATML, {"messages": messages}) is None


@pytest.mark.parametrize("name", ["tokenize", "padding", "return_dict", "conversation", "max_length"])
def test_arguments_of_the_function_are_no_variables(name: str) -> None:
    """`chat_template_kwargs` could change more than the text with these."""
    request = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: 1}}
    assert rendered(folders.CHATML, request) is None


class Turning:
    """A clock that goes on by one hundredth of the time allowed each time it is looked at."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        """The time."""
        self.looks += 1
        return self.looks * RENDER_S / 100


ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% set c = b %}{% endfor %}{% endfor %}{{ messages }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 60 + "x" + "{% endcall %}" * 60,
    "{% block a %}{% if false %}{% endif %}{% endblock %}{% for a in range(100000) %}{{ self.a() }}{% endfor %}",
    "{% for m in messages recursive %}{{ loop([1, 2]) if depth is undefined }}{% endfor %}",
    "{% for a in range(100000) if a >= 0 %}{% for b in range(100000) if b < 0 %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_does_not_come_to_an_end_is_stopped(source: str) -> None:
    """Each turn of a loop, and each call, looks at the time: it is given up soon after that is over."""
    clock = Turning()
    template = Template(source, SPECIAL, clock=clock)
    with pytest.raises(NoTokensError) as stopped:
        template.render(chat_of({"model": "m", "messages": [{"role": "user", "content": "hi"}]}))
    assert stopped.value.why in {Why.TOO_LONG, Why.REFUSED}
    assert clock.looks <= 110


def test_a_template_that_is_slow_with_many_messages_is_stopped() -> None:
    """The operator's template is well, but for a client that sends very many messages."""
    source = "{% for a in messages %}{% for b in messages %}{% if a == b %}{% endif %}{% endfor %}x{% endfor %}"
    template = Template(source, SPECIAL, clock=Turning())
    few, many = ({"model": "m", "messages": [{"role": "user", "content": "hi"}] * count} for count in (5, 50))
    assert template.render(chat_of(few)) == "x" * 5
    with pytest.raises(NoTokensError) as stopped:
        template.render(chat_of(many))
    assert stopped.value.why is Why.TOO_LONG


def test_a_text_without_end_is_not_gathered() -> None:
    """A template that prints all messages for each of them takes no memory for it."""
    source = "{% for a in messages %}{{ messages }}{% endfor %}"
    many = {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}] * 1000}
    with pytest.raises(NoTokensError) as stopped:
        Template(source, SPECIAL).render(chat_of(many))
    assert stopped.value.why is Why.TOO_LONG


def test_what_a_client_names_does_not_reach_the_watch() -> None:
    """Variables of the client's are given to templates that use them: none takes the place of the watch."""
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"warmpath_step": "x", "other": 1},
    }
    assert (
        rendered("{% for m in messages %}{{ m.content }}{{ warmpath_step is string }}{% endfor %}", request)
        == "hiFalse"
    )
