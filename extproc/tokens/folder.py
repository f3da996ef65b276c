"""A tokenizer's folder, as `save_pretrained` of Hugging Face writes it: its files read, nothing built from them.

Which file goes before which is what `transformers` 5 does (`tokenization_utils_base.py`, `from_pretrained`): template
files before the template in `tokenizer_config.json`, and `special_tokens_map.json` only beside a configuration that
lists no added tokens.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from extproc.errors import ConfigError

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
_MORE_TEMPLATES: Final = "additional_chat_templates"
_SPECIAL_TOKENS: Final = "special_tokens_map.json"
_PACKAGES: Final = ("jinja2", "tokenizers")


class Added(msgspec.Struct, frozen=True):
    """A token that the tokenizer must know whole.

    Attributes:
        content: its text.
        lstrip: it takes white space in front of it in.
        rstrip: it takes white space behind it in.
        single_word: it counts only between characters that are no letters.
        normalized: it is looked for after the text was normalized; where absent, special tokens are not.
        special: it means something to the model, and is no text.
    """

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    special: bool = False


class Folder(msgspec.Struct, frozen=True):
    """What a tokenizer's folder holds.

    Attributes:
        tokenizer: path of `tokenizer.json`.
        templates: chat templates by name; the usual one is `default`.
        special: text of each named special token, such as `bos_token`: variables of the templates.
        added: added tokens that the configuration lists, by their ids' order.
    """

    tokenizer: Path
    templates: Mapping[str, str]
    special: Mapping[str, str]
    added: tuple[Added, ...] = ()


def installed() -> bool:
    """Whether this Python has what local tokenizers need."""
    return all(importlib.util.find_spec(package) for package in _PACKAGES)


def read(path: Path) -> Folder:
    """Read a folder.

    Raises:
        ConfigError: it is missing, has no `tokenizer.json`, has no chat template, or a file cannot be read.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder: name one with {TOKENIZER}")
    tokenizer = path / TOKENIZER
    if not tokenizer.is_file():
        raise ConfigError(f"{path} has no {TOKENIZER}: copy the model's own there")
    settings = _json(path / CONFIG)
    listed = settings.get("added_tokens_decoder")
    named = settings if listed else settings | _json(path / _SPECIAL_TOKENS)
    templates = _template_files(path) or _templates(settings.get("chat_template"))
    if not templates:
        raise ConfigError(f"{path} has no chat template: add {TEMPLATE}, or `chat_template` to {CONFIG}")
    return Folder(tokenizer, templates, _special(named), _added(listed, path / CONFIG))


def _template_files(path: Path) -> dict[str, str]:
    files = {"default": path / TEMPLATE} if (path / TEMPLATE).is_file() else {}
    files |= {each.stem: each for each in sorted((path / _MORE_TEMPLATES).glob("*.jinja"))}
    return {name: _text(file) for name, file in files.items()}


def _templates(value: object) -> dict[str, str]:
    """The templates of a configuration: one text, or a list of names and texts."""
    if isinstance(value, str):
        return {"default": value}
    named = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    return {str(each.get("name")): str(each.get("template")) for each in named}


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    special = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return special


def _added(listed: object, file: Path) -> tuple[Added, ...]:
    if listed is None:
        return ()
    try:
        tokens = msgspec.convert(listed, dict[str, Added])
        return tuple(tokens[number] for number in sorted(tokens, key=int))
    except ValueError as error:  # a ValidationError is one
        raise ConfigError(f"{file}: `added_tokens_decoder` cannot be read: {error}") from None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = msgspec.json.decode(_text(file))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is no JSON object: copy the model's own there")
    return value


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
