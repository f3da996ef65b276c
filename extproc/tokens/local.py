"""Token ids from a tokenizer's folder: no engine is asked."""

import asyncio
from array import array
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import jinja2

from extproc.errors import ConfigError
from extproc.tokens import folder as folders
from extproc.tokens.cache import TokenCache
from extproc.tokens.encoder import Encoder
from extproc.tokens.folder import Folder
from extproc.tokens.template import Template
from extproc.tokens.values import Asked, Chat, Made, NoTokensError, Tally, Text, Why

MAX_CHARS: Final = 2 << 20
"""Half a million tokens. The library lets no other thread run while it hands ids over and takes its own memory back:
some 80 ms for so many, 0.5 s for what a body may have."""


class Local:
    """Renders and tokenizes here, in threads. Implements `values.Source`.

    Messages are prepared as vLLM prepares them; SGLang and TensorRT-LLM give the same templates nearly the same.
    What an engine was started with is not known here: give its `--chat-template` as `chat_template.jinja`, and use
    another source beside `--default-chat-template-kwargs`, a tokenizer of its own kind (Mistral's, tiktoken files), or
    GPT-OSS, whose conversations vLLM renders without a template.

    Args:
        folder: the tokenizer's folder.
        cache: where ids are kept.
        threads: where the work is done.
        pool: name of the pool, for the tally.
        tally: who counts what was found.

    Raises:
        ConfigError: a file is missing or broken.
    """

    incremental = True

    def __init__(self, folder: Folder, cache: TokenCache, threads: Executor, pool: str, tally: Tally) -> None:
        self._threads = threads
        self._pool = pool
        self._tally = tally
        self._templates = {name: _compiled(folder, name) for name in folder.templates}
        self._encoder = Encoder(folder, cache)

    async def made(self, asked: Asked) -> Made:
        """See `values.Source.made`."""
        ids, found = await asyncio.get_running_loop().run_in_executor(self._threads, self.encoded, asked)
        self._tally.reused(self._pool, found, len(ids) - found)
        return Made(ids)

    def encoded(self, asked: Asked) -> "tuple[array[int], int]":
        """Token ids of a prompt, and how many of them the cache had.

        Raises:
            NoTokensError: there are none.
        """
        if asked.media:
            raise NoTokensError(Why.IMAGES)
        if asked.truncated:
            raise NoTokensError(Why.UNSUPPORTED)
        match asked.wanted:
            case Text(text, special_tokens):
                pass
            case Chat() as chat if chat.template is None:
                text, special_tokens = self._template(chat).render(chat), chat.special_tokens
            case _:
                # A template of the client's would run here; engines refuse it too unless they were told to trust it.
                raise NoTokensError(Why.UNSUPPORTED)
        if len(text) > MAX_CHARS:
            raise NoTokensError(Why.TOO_LONG)
        return self._encoder.encode(text, special_tokens=special_tokens)

    def _template(self, chat: Chat) -> Template:
        named = "tool_use" if chat.tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(named)
        if template is None:
            raise NoTokensError(Why.REFUSED)
        return template


def load(path: Path, cache: TokenCache, threads: Executor, pool: str, tally: Tally) -> Local:
    """The source of a folder; blocks while it reads, a second for a large vocabulary.

    Raises:
        ConfigError: a file is missing or broken.
    """
    return Local(folders.read(path), cache, threads, pool, tally)


def _compiled(folder: Folder, name: str) -> Template:
    try:
        return Template(folder.templates[name], folder.special)
    except jinja2.TemplateError as error:
        place = f"{folder.tokenizer.parent}: the chat template `{name}`"
        raise ConfigError(f"{place} is malformed: {error}: copy the model's own there") from None
