"""Turns requests, as the access log tells them, into knowledge and metrics."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from extproc.answer_sizes import AnswerSizes
from extproc.envoy.contract import QUEUED, VERSION, Attempt, Served
from extproc.fitting import ASKED_USAGE
from extproc.gossip import Gossip
from extproc.judging import Judging
from extproc.quotas import Quotas
from extproc.request.model import OPENED_EARLY, RouteKind
from extproc.router import Surroundings
from extproc.state.feed import Answered
from extproc.telemetry.metrics import CUT, GONE, Finished, Metrics, UsageSource, outcome_of

_OK = 200
_PREFILLED = range(200, 400)
_TOLD = 1024
"""Running requests whose further attempts were told already; Envoy tells of each twice a second."""
_COUNTED = frozenset({RouteKind.CHAT.value, RouteKind.COMPLETION.value})
"""APIs whose streams report usage only when asked, so that output tokens may have to be counted otherwise."""
_WITHOUT_TOKENS = frozenset({RouteKind.OTHER.value})
UNBEGUN = frozenset({"headers", "first_token"})
"""Time limits that end a request whose first token has not come."""
_STANDSTILLS = frozenset({"first_token", "stall"})
"""Time limits that speak against the endpoint that the request was ended at. What tries without headers say comes from
Envoy's own log of them, and a long answer is nobody's fault."""
UNREAD_BYTES = 32 * 1024
"""From so many bytes of an answer on, a client that does not read looks like an engine that stands still: Envoy stops
reading from the engine once 64 KiB wait for a client (`render_listener.READ_BUFFER`), part of which is framing."""


class Versions(Protocol):
    """Who compares versions of models."""

    def observe(self, served: Served, endpoint: str, counted: float) -> None:
        """A request of a model with versions is over; returns at once, never raises.

        Args:
            served: the request.
            endpoint: id of the endpoint of its pool that answered; empty when none did.
            counted: its output tokens by the bytes of the answer; -1 when they were not counted.
        """
        ...


class Learner:
    """Implements `envoy.contract.Observer` for one worker."""

    def __init__(
        self,
        around: Surroundings,
        gossip: Gossip,
        metrics: Metrics,
        judging: Judging | None = None,
        quotas: Quotas | None = None,
        versions: Versions | None = None,
    ) -> None:
        """Learn for one worker.

        Args:
            around: who is there, and what is known of them.
            gossip: learns, and tells the others.
            metrics: who counts.
            judging: feeds breakers; None where there are none.
            quotas: corrects what was taken of limits; None where there are none.
            versions: compares versions of models; None where nobody does.
        """
        self._around = around
        self._gossip = gossip
        self._metrics = metrics
        self._judging = judging
        self._quotas = quotas
        self._versions = versions
        self._told: OrderedDict[str, str] = OrderedDict()
        self._sizes = AnswerSizes()

    def observe(self, served: Served) -> None:
        """See `Observer.observe`."""
        if self._quotas is not None:
            # Whatever refused a request before it had a pool: what it took before its body comes back.
            self._quotas.ended_ahead(served)
        pool = self._around.fleet.pools.get(served.pool)
        if pool is None:
            self._metrics.access_log("foreign")
            return
        outcome = outcome_of(served.status, served.flags, served.stage)
        endpoint = pool.id_at(served.destination)
        ttft_s = engine_ttft_s(served) if tells_ttft(served) else -1.0
        ttft_ms, cached_tokens = expected(served, endpoint)
        counted = self._counted(served)
        self._metrics.access_log("decided" if served.charge_id else "undecided")
        self._metrics.finished(
            Finished(
                pool=pool.name,
                endpoint=endpoint,
                outcome=outcome,
                ttft_s=ttft_s,
                duration_s=served.duration_s,
                prompt_tokens=served.prompt_tokens,
                cached_tokens=served.cached_tokens,
                output_tokens=served.output_tokens,
                predicted_ttft_s=ttft_ms / 1000.0,
                predicted_cached_tokens=cached_tokens,
                usage=usage_source(served, counted),
                counted_output_tokens=counted,
            )
        )
        if self._quotas is not None:
            self._quotas.answered(served, counted)
        if served.charge_id:
            self._told.pop(served.charge_id, None)
            if self._versions is not None and VERSION in served.metadata:
                self._versions.observe(served, endpoint, counted)
            told = answered(served, endpoint, ttft_s, counted)
            self._gossip.learn(pool.name, told)
            if self._judging is not None and endpoint:
                if served.stage in _STANDSTILLS:
                    self._judging.timed_out(pool.name, endpoint, "neutral" if _may_be_unread(served) else "strike")
                else:
                    self._judging.answered(pool, told.work_tokens, served, endpoint)

    def _counted(self, served: Served) -> float:
        """Output tokens by the bytes of the answer, of one without usage; -1 otherwise, and where that is not known."""
        api = served.metadata.get("kind")
        if served.status != _OK or not isinstance(api, str) or api not in _COUNTED:
            return -1.0
        form = served.pool, api, number(served.metadata, "streamed") == 1.0
        if served.output_tokens < 0:
            return self._sizes.tokens(form, served.response_bytes)
        self._sizes.learn(form, served.response_bytes, served.output_tokens)
        return -1.0

    def attempt_failed(self, attempt: Attempt) -> None:
        """See `Observer.attempt_failed`."""
        if self._judging is not None:
            self._judging.attempt(attempt)

    def tried_again(self, served: Served) -> None:
        """See `Observer.tried_again`."""
        pool = self._around.fleet.pools.get(served.pool)
        endpoint = pool.id_at(served.destination) if pool else ""
        last = self._told.get(served.charge_id, served.metadata.get("endpoint"))
        if pool is None or not endpoint or endpoint == last:
            return
        self._told[served.charge_id] = endpoint
        if len(self._told) > _TOLD:
            self._told.popitem(last=False)
        self._gossip.learn(pool.name, Answered(served.charge_id, endpoint, -1.0, -1.0, -1.0, -1.0))


def answered(served: Served, endpoint: str, ttft_s: float, counted: float = -1.0) -> Answered:
    """What a finished request teaches; -1 stands for what it does not. `counted` are output tokens by bytes.

    The rate is learnt from streamed answers of the picked endpoint at the first try: the first byte of any other
    answer comes after its generation, or after somebody else's failure. Cached tokens are compared with the prediction
    of the first try as well: what a second one finds, the first may have put there.
    """
    gone, cut = bool(GONE.intersection(served.flags)), bool(CUT.intersection(served.flags))
    # An engine refuses a prompt (400, 404, 429) before it prefills anything. One that gave no token in time may have
    # done nothing.
    prefilled = (served.status in _PREFILLED or gone) and served.stage not in UNBEGUN
    answered_by = endpoint if prefilled else ""
    teaches = served.status == _OK and by_the_pick(served, endpoint)
    backlog = max(0.0, number(served.metadata, "backlog_tokens"))
    return Answered(
        charge_id=served.charge_id,
        endpoint=answered_by,
        work_tokens=uncached_tokens(served) + backlog if teaches and ttft_s > 0 else -1.0,
        ttft_s=ttft_s,
        prompt_bytes=number(served.metadata, "prompt_bytes"),
        prompt_tokens=float(served.prompt_tokens),
        backlog_tokens=backlog,
        cached_tokens=float(served.cached_tokens) if teaches else -1.0,
        output_tokens=output_tokens(served, -1.0 if gone or cut or served.stage else counted),
    )


def _may_be_unread(served: Served) -> bool:
    """Whether the client may have stopped reading, which no endpoint is to blame for: clients could open breakers."""
    return served.stage == "stall" and served.response_bytes >= UNREAD_BYTES


def usage_source(served: Served, counted: float) -> UsageSource | None:
    """Where the tokens of a request are known from; None for one that has none, or was not answered.

    Args:
        served: the request.
        counted: its output tokens by the bytes of the answer; -1 when they were not counted.
    """
    if served.status != _OK or served.metadata.get("kind", "other") in _WITHOUT_TOKENS:
        return None
    if max(served.output_tokens, served.prompt_tokens) >= 0:
        return "asked" if number(served.metadata, ASKED_USAGE) == 1.0 else "engine"
    return "counted" if counted >= 0.0 else "none"


def engine_ttft_s(served: Served) -> float:
    """Seconds to the first token without those that the request waited for room; -1 when it had none."""
    if served.ttft_s < 0:
        return served.ttft_s
    waited_s = max(0.0, number(served.metadata, QUEUED)) / 1000
    return max(0.0, served.ttft_s - waited_s)


def tells_ttft(served: Served) -> bool:
    """Whether the first byte of the answer's body came with its first token."""
    told = served.metadata
    return number(told, "streamed") == 1.0 and told.get("kind") not in OPENED_EARLY


def by_the_pick(served: Served, endpoint: str) -> bool:
    """Whether `endpoint`, which answered, was picked, and answered at the first try."""
    return served.attempts <= 1 and endpoint == served.metadata.get("endpoint")


def expected(served: Served, endpoint: str) -> tuple[float, float]:
    """Milliseconds to the first token and cached tokens, as the decision expected them of whoever answered.

    -1 for what was not expected: of another endpoint, of a later try, or of a prompt that was not read.
    """
    told = served.metadata
    if served.status != _OK or not by_the_pick(served, endpoint) or number(told, "prompt_bytes") <= 0.0:
        return -1.0, -1.0
    return number(told, "predicted_ttft_ms"), number(told, "prompt_tokens") - number(told, "uncached_tokens")


def uncached_tokens(served: Served) -> float:
    """Prompt tokens the engine prefilled: by its own report, else as the decision predicted.

    A report of no cached tokens may be that of an engine which never tells (vLLM without
    `--enable-prompt-tokens-details`): the lesser of the two then counts, or a cached prompt would look like speed.
    """
    predicted = number(served.metadata, "uncached_tokens")
    if served.prompt_tokens < 0:
        return predicted
    reported = float(max(0, served.prompt_tokens - max(served.cached_tokens, 0)))
    return reported if served.cached_tokens > 0 or predicted < 0 else min(reported, predicted)


def output_tokens(served: Served, counted: float = -1.0) -> float:
    """Tokens of one answer; -1 when unknown. Engines report the sum of all that were asked for, and bytes count it."""
    total = served.output_tokens if served.output_tokens >= 0 else counted
    if served.status != _OK or total < 0:
        return -1.0
    return total / max(1.0, number(served.metadata, "sequences"))


def number(metadata: Mapping[str, str | float], key: str) -> float:
    """A number of the decision's metadata; -1 when it is absent or is none."""
    value = metadata.get(key)
    return float(value) if isinstance(value, int | float) else -1.0
