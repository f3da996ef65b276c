"""Text near the beginning of a prompt that changes with every request; hashing passes over it.

The engine always gets the prompt as the client sent it. Rules only decide what two prompts are compared by: without
them one changed character in the first line hides that everything behind it is the same. They are worth having
where the engine passes over the text too, as vLLM (0.32) and others do with the billing line of Claude Code;
elsewhere they promise hits that reported cached tokens then correct.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from extproc.config import Volatile
from extproc.errors import ConfigError


class Rule(NamedTuple):
    """One kind of volatile text.

    Attributes:
        pattern: regular expression (Python's `re`) of the text.
        replacement: what is hashed in its place; a template of `re.sub`.
        prefix: what a text begins with when the pattern matches in it; empty when it may match anywhere.
    """

    pattern: str
    replacement: str = ""
    prefix: str = ""


_CLAUDE_CODE = "x-anthropic-billing-header:"

BUILTIN_RULES = (
    # First block of Claude Code's system prompt: `x-anthropic-billing-header: cc_version=2.1.177.01c;
    # cc_entrypoint=cli; cch=36ee5;`. Both cch and the end of the version are computed anew for each request.
    Rule(rf"\A{_CLAUDE_CODE}(?:[ \t]*[\w-]+=[^;\s]*;)+[ \t]*\n?", "", _CLAUDE_CODE),
)
"""Rules that come with Warmpath."""


class Rules:
    """Rules to apply in order, and how far from the beginning.

    How long a pattern takes is its author's to answer for: one with nested repetitions can take time exponential
    in the text it looks at, and nothing stops it. What it looks at is at most `first_bytes` of the system prompt
    and of the first message each.

    Args:
        rules: rules, or pairs of a pattern and a replacement.
        first_bytes: bytes of UTF-8 from the beginning that rules see.

    Raises:
        ConfigError: a pattern or a replacement is malformed; the text says which and why.
    """

    def __init__(self, rules: Sequence[Rule | tuple[str, str]] = (), first_bytes: int = 4096) -> None:
        self.first_bytes = first_bytes
        self._rules = [_compiled(at, Rule(*rule)) for at, rule in enumerate(rules)]
        # An empty one among them is what every text begins with.
        self._prefixes = tuple(Rule(*rule).prefix for rule in rules)

    def __bool__(self) -> bool:
        """Whether there is any rule."""
        return bool(self._rules)

    def settle(self, text: str, first_bytes: int) -> str:
        """Replace what is volatile in a text; the text itself comes back when nothing is.

        Args:
            text: a text of the system prompt or of the first message.
            first_bytes: how far to look, when earlier texts have used up a part of it.
        """
        # Looking for the built-in rule in all of the first 4 KiB took 4 us, as long as the rest of a small prompt.
        if not text.startswith(self._prefixes):
            return text
        head = _head(text, first_bytes)
        settled = head
        for pattern, replacement in self._rules:
            settled = pattern.sub(replacement, settled)
        return text if settled == head else settled + text[len(head) :]


def rules_of(settings: Volatile) -> Rules:
    """Return the rules of a configuration's `routing.volatile`.

    Raises:
        ConfigError: a rule is malformed; the text names it as the configuration does, `rules[0]`.
    """
    own = [Rule(rule.pattern, rule.replacement) for rule in settings.rules]
    Rules(own)  # so that an error counts the rules as the configuration does, without the built-in ones
    return Rules((*BUILTIN_RULES, *own) if settings.builtin else own, settings.first_bytes)


def _compiled(at: int, rule: Rule) -> tuple[re.Pattern[str], str]:
    try:
        pattern = re.compile(rule.pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"rules[{at}].pattern is no regular expression: {error}") from error
    try:
        pattern.sub(rule.replacement, "")
    except (re.error, IndexError) as error:
        raise ConfigError(
            f"rules[{at}].replacement is no template: {error}; write a backslash as two of them"
        ) from error
    return pattern, rule.replacement


def _head(text: str, first_bytes: int) -> str:
    """The longest beginning of a text that takes up no more than so many bytes."""
    head = text[:first_bytes]
    if head.isascii():
        return head
    encoded = head.encode("utf-8", "surrogatepass")
    end = min(first_bytes, len(encoded))
    while end < len(encoded) and encoded[end] & 0xC0 == 0x80:
        end -= 1
    return encoded[:end].decode("utf-8", "surrogatepass")


NONE = Rules()
"""No rule at all."""

BUILTIN = Rules(BUILTIN_RULES)
"""The built-in rules with the default reach."""
