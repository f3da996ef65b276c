"""What time limits and breakers must agree on, once each value is right by itself."""

from collections.abc import Iterator

from extproc.config import Config
from extproc.config_mistakes import Mistake
from extproc.rules_rollouts import no_model

_STAGES = ("first_token_s", "first_token_ms_per_token", "stall_s")
_LIMITS = ("headers_s", "request_s", *_STAGES)


def limits_agree(config: Config) -> Iterator[Mistake]:
    """Rules name models that there are, limit something, and give whole answers no limits of streams."""
    for index, rule in enumerate(config.timeouts.rules):
        path = f"$.timeouts.rules[{index}]"
        if rule.model is not None and rule.model not in config.models:
            yield Mistake(f"{path}.model", no_model(config, rule.model))
        if all(getattr(rule, name) is None for name in _LIMITS):
            yield Mistake(path, f"limits nothing: give it one of {', '.join(_LIMITS)}, or remove it")
        for name in _STAGES:
            if rule.streamed is False and getattr(rule, name) is not None:
                remedy = "limit it by headers_s or request_s"
                yield Mistake(f"{path}.{name}", f"an answer that is not streamed comes as a whole: {remedy}")


def breakers_tell_slow_from_quick(config: Config) -> Iterator[Mistake]:
    """Nobody is slow for being as quick as its peers."""
    factor = config.breakers.slow_factor
    if 0.0 < factor <= 1.0:
        text = f"{factor:g}: every endpoint takes as long as its peers: write more than 1, or 0 to switch this off"
        yield Mistake("$.breakers.slow_factor", text)
