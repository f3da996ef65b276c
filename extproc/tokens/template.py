"""A chat template: conversations into text, as `transformers` renders them.

After `transformers` 5 (`utils/chat_template_utils.py`, `render_jinja_template`): the same environment, filters and
functions, and the same way to leave the last message open.

A template is the operator's, and a client's own is never compiled. Still it is a program, and what it is given is the
client's: one that goes over all messages for each of them takes hours over a body of many. So each turn of a loop, and
each call of a macro, looks at the time.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.tokens.content_format import takes_parts
from extproc.tokens.conversation import rendered_messages, rendered_tools
from extproc.tokens.values import Chat, NoTokensError, Why

RENDER_S: Final = 1.0
"""CPU that one rendering may take. 500 messages take 3 to 12 ms, short ones or of 2 MB together; 20,000 take 0.3 s."""
MOST_CHARS: Final = 16 << 20
"""Length of a rendered text. Far more than is tokenized; what is longer is not even gathered."""
_STEP = "warmpath_step"
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "
_OWN_ARGUMENTS = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})
_FOREIGN_ARGUMENTS = frozenset(
    {
        "chat_template", "conversation", "max_length", "padding", "return_assistant_tokens_mask", "return_dict",
        "return_tensors", "self", "tokenize", "tokenizer_kwargs", "truncation",
    }
)  # fmt: skip
"""Arguments of `apply_chat_template` that are no variables: vLLM refuses some, and others change more than the text."""


class Template:
    """One compiled template.

    Args:
        source: the template.
        special: texts of the tokenizer's special tokens, by their names.
        now: present local time, for templates that print the date.
        clock: CPU seconds of the thread.

    Raises:
        jinja2.TemplateError: the template is malformed.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        environment = _environment(now)
        tree = environment.parse(source)
        self._source = source
        self._special = special
        self._clock = clock
        self._variables = meta.find_undeclared_variables(tree)
        self._parts = takes_parts(tree)
        self._template = environment.from_string(_watched(tree, environment))
        self._developer = '"developer"' in source or "'developer'" in source

    def render(self, chat: Chat) -> str:
        """The text of a conversation.

        Raises:
            NoTokensError: the engine would answer the conversation with 400, or reads it in a way of its own; or it
                takes too long.
        """
        if chat.variables.keys() & _FOREIGN_ARGUMENTS:
            raise NoTokensError(Why.UNSUPPORTED)
        messages = rendered_messages(chat.messages, parts=self._parts, developer=self._developer)
        variables: dict[str, Any] = {
            "tools": rendered_tools(chat.tools),
            "documents": None,
            **{name: value for name, value in chat.variables.items() if name in self._variables | _OWN_ARGUMENTS},
        }
        last = self._left_open(messages, variables) if variables.pop("continue_final_message", False) else None
        try:
            text = self._rendered(messages=messages, **{**self._special, **variables})
        except NoTokensError:
            raise
        except Exception:  # noqa: BLE001 -- a template is a program, and may raise anything over what it does not take
            raise NoTokensError(Why.REFUSED) from None
        return text if last is None else _cut_off(text, last)

    def _rendered(self, **variables: Any) -> str:
        until, clock = self._clock() + RENDER_S, self._clock

        def step() -> None:
            if clock() >= until:
                raise NoTokensError(Why.TOO_LONG)

        return _joined(self._template.generate({**variables, _STEP: step}))

    def _left_open(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Mark where the text of the last message ends; returns that text."""
        content = messages[-1]["content"]
        if variables.get("add_generation_prompt") or "content" not in self._source:
            raise NoTokensError(Why.REFUSED)
        if isinstance(content, str):
            messages[-1]["content"] = content + _OPEN_END
            return content
        part = next((part for part in reversed(content) if "text" in part), None)
        if part is None:
            raise NoTokensError(Why.REFUSED)
        text: str = part["text"]
        part["text"] = text + _OPEN_END
        return text


def _watched(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """A template whose loops, macros and blocks begin each turn with a call of `_STEP`."""
    places: list[nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
        *tree.find_all(nodes.Block),
    ]
    for place in places:
        call = nodes.ExprStmt(nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None))
        place.body.insert(0, call.set_lineno(place.lineno))
    tree.set_environment(environment)
    return tree


def _joined(pieces: Iterable[str]) -> str:
    """The text of all pieces.

    Raises:
        NoTokensError: it is too long.
    """
    found, length = list[str](), 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > MOST_CHARS:
            raise NoTokensError(Why.TOO_LONG)
    return "".join(found)


def _cut_off(text: str, last: str) -> str:
    """A rendered conversation up to where its last message ends."""
    mark = _OPEN_END.strip()
    if last.strip() not in text or mark not in text:
        raise NoTokensError(Why.REFUSED)
    at = text.rindex(mark)
    # Without the mark's own space the template trims messages.
    return text[:at] if text[at : at + len(_OPEN_END)] == _OPEN_END else text[:at].rstrip()


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is printed as it is."""

    tags = {"generation"}  # noqa: RUF012 -- as its base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes what HTML does not take.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
