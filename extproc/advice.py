"""What is allowed in a configuration and still hardly meant: warnings of `warmpath check`."""

from collections.abc import Iterator
from typing import Final

from extproc import advice_rollouts, advice_traffic
from extproc.config import Config
from extproc.govern.stages import Shape, limits_of

_PROMPT_TOKENS: Final = 8192
_ANSWER_TOKENS: Final = 4096
_TOKEN_S: Final = 0.02
"""What a request is taken to be that nobody wants to lose: a long prompt, nothing of it cached, and a long answer of a
mid-size model under load, whose tokens take 5 to 30 ms."""
_LEAST_STALL_S: Final = 2.0
"""Silence is seen twice a second, and engines pause answers for the prefill of other prompts: about half a second for
8,192 tokens at 16,000 a second."""


def warnings(config: Config) -> list[str]:
    """One line each, that names the place, the reason and the remedy.

    Raises ConfigError when the file of API keys, whose names tell who can be a tenant, or that of the operators' token
    cannot be used.
    """
    further = (*advice_traffic.warnings(config), *advice_rollouts.warnings(config))
    return [*_too_short(config), *_hidden(config), *_hasty(config), *further]


def _too_short(config: Config) -> Iterator[str]:
    """A whole request has less time than its first token and a long answer may take."""
    for name, model in config.models.items():
        limits = limits_of(config.timeouts, Shape(name, "chat", streamed=True, uncached_tokens=_PROMPT_TOKENS))
        speed = config.pools[model.main_pool].prefill_tokens_per_s
        first_s, source = limits.first_token_s, "timeouts.first_token_s"
        if not first_s:
            first_s, source = _PROMPT_TOKENS / speed, f"pools.{model.main_pool}.prefill_tokens_per_s"
        answer_s = _ANSWER_TOKENS * _TOKEN_S
        if 0.0 < limits.request_s < first_s + answer_s:
            yield (
                f"models.{name}: request_s is {limits.request_s:g}, but the first token of {_PROMPT_TOKENS} uncached "
                f"prompt tokens may take {first_s:.1f} s ({source}) and an answer of {_ANSWER_TOKENS} tokens "
                f"{answer_s:.0f} s ({1000 * _TOKEN_S:g} ms a token, assumed): raise it if there are such requests"
            )


def _hidden(config: Config) -> Iterator[str]:
    """A limit that another one always comes before."""
    timeouts, retries = config.timeouts, config.retries
    idle_s = timeouts.stream_idle_s
    for name in ("first_token_s", "stall_s"):
        told = [getattr(timeouts, name), *(getattr(rule, name) or 0.0 for rule in timeouts.rules)]
        if 0.0 < idle_s <= max(told):
            yield f"timeouts.{name}: {max(told):g} is not below stream_idle_s ({idle_s:g}), which ends requests first"
    silent_s = timeouts.headers_s * (retries.max + 1)
    if 0.0 < timeouts.request_s < silent_s:
        yield (
            f"timeouts.headers_s: {retries.max + 1} tries of {timeouts.headers_s:g} s take longer than request_s "
            f"({timeouts.request_s:g}): the last is never made"
        )
    if 0.0 < timeouts.first_token_s <= timeouts.headers_s:
        yield (
            f"timeouts.headers_s: {timeouts.headers_s:g} is not below first_token_s ({timeouts.first_token_s:g}), so a "
            "silent endpoint's requests fail before they are tried on the next"
        )
    if timeouts.headers_s and not retries.max:
        yield "timeouts.headers_s: retries.max is 0, so a silent endpoint's requests fail: allow a retry"


def _hasty(config: Config) -> Iterator[str]:
    """A limit that healthy engines run into."""
    timeouts = config.timeouts
    places = [("timeouts", timeouts.stall_s)]
    places += [(f"timeouts.rules[{at}]", rule.stall_s or 0.0) for at, rule in enumerate(timeouts.rules)]
    for place, stall_s in places:
        if 0.0 < stall_s < _LEAST_STALL_S:
            yield (
                f"{place}.stall_s: {stall_s:g} s is what an answer may stand still while its engine computes another "
                f"prompt: use {_LEAST_STALL_S:g} or more"
            )
