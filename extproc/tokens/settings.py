"""What a pool's token settings stand for, and what they lack."""

from pathlib import Path
from typing import Final

from extproc.config import TokenSettings
from extproc.config_pools import TokenSource
from extproc.errors import ConfigError
from extproc.tokens import folder

INSTALL: Final = "pip install warmpath[tokenizers]"


def chosen(tokens: TokenSettings) -> TokenSource:
    """The source that settings stand for; `auto` takes the first that is configured, and installed."""
    if tokens.source != "auto":
        return tokens.source
    if tokens.tokenizer and folder.installed():
        return "local"
    return "render" if tokens.url else "engine"


def mistake(tokens: TokenSettings) -> tuple[str, str] | None:
    """What is wrong with where a pool's token ids come from: the key and the remedy; None for nothing."""
    if tokens.source == "render" and not tokens.url:
        return "url", "is missing: name the render server, for example http://10.0.0.9:8100"
    if tokens.source == "local" and not tokens.tokenizer:
        return "tokenizer", "is missing: name the folder with the model's tokenizer.json"
    if tokens.source == "local" and not folder.installed():
        return "source", f"local needs the packages jinja2 and tokenizers: {INSTALL}"
    if tokens.tokenizer and tokens.source in ("local", "auto"):
        try:
            folder.read(Path(tokens.tokenizer))
        except ConfigError as error:
            return "tokenizer", str(error)
    return None
