"""Carries comparisons out: asks the shadow, waits for the copy of the client's answer, compares, keeps the result."""

import asyncio
import contextlib
import logging
import re
import traceback
from collections import Counter
from typing import Final

import msgspec

from extproc.background import Background
from extproc.clock import Clock
from extproc.config import Config, Shadow
from extproc.envoy.contract import VERSION, Call, Copy, Decision
from extproc.envoy.copies import GRACE_S
from extproc.errors import StoreError
from extproc.request.model import RouteKind
from extproc.request.session import hash_key
from extproc.shadow.answer import Collector
from extproc.shadow.compare import Settings
from extproc.shadow.embeddings import Embedder
from extproc.shadow.refusals import compiled
from extproc.shadow.result import About, result
from extproc.shadow.results import Results
from extproc.shadow.scoring import Scored, Scorer
from extproc.shadow.sender import Letter, Sender
from extproc.surroundings import Surroundings
from extproc.telemetry.shadow_metrics import ShadowMetrics, ShadowOutcome

log = logging.getLogger(__name__)

_LONGEST_PRIMARY_S: Final = 3600.0
"""A client's answer that takes longer is compared with nothing."""


class Job:
    """One comparison. Implements `envoy.contract.Capture`.

    Attributes:
        model: the model's own name.
        shadow: its settings.
        letter: what the shadow gets.
        kind: API that is called.
        call: the client's request.
        decision: decision about it.
        asked: when that was made, in seconds since the Unix epoch.
        copied: the copy of the client's answer, once it came; None when there is none.
    """

    def __init__(
        self, model: str, shadow: Shadow, letter: Letter, kind: RouteKind, call: Call, decision: Decision, asked: float
    ) -> None:
        self.model = model
        self.shadow = shadow
        self.letter = letter
        self.kind = kind
        self.call = call
        self.decision = decision
        self.asked = asked
        self.copied: asyncio.Future[Copy | None] = asyncio.get_running_loop().create_future()

    @property
    def streamed(self) -> bool:
        """Whether a stream was asked for."""
        return self.decision.metadata.get("streamed") == 1.0

    def captured(self, copy: Copy | None) -> None:
        """See `Capture.captured`."""
        if not self.copied.done():
            self.copied.set_result(copy)

    def about(self) -> About:
        """The request, as results name it."""
        told = self.decision.metadata.get("prompt_tokens")
        return About(
            id=self.call.headers.get("x-request-id", ""),
            at=self.asked,
            model=self.model,
            primary=str(self.decision.metadata[VERSION]),
            shadow=self.shadow.version,
            api=self.kind.value,
            streamed=self.streamed,
            prompt_tokens=round(told) if isinstance(told, int | float) else None,
            body=self.call.body,
        )


class Jobs:
    """All comparisons of one worker.

    Attributes:
        at: how many are under way at each `ip:port`.
    """

    def __init__(
        self,
        around: Surroundings,
        sender: Sender,
        scorer: Scorer,
        results: Results,
        metrics: ShadowMetrics,
        clock: Clock,
    ) -> None:
        """Begin.

        Args:
            around: configuration.
            sender: asks shadows; closed with this.
            scorer: compares; closed with this.
            results: keeps results.
            metrics: counts.
            clock: time.
        """
        self.at: Counter[str] = Counter()
        self._around = around
        self._sender = sender
        self._scorer = scorer
        self._results = results
        self._metrics = metrics
        self._clock = clock
        self._models: Counter[str] = Counter()
        self._background = Background()
        self._unembedded: set[str] = set()
        self._patterns: tuple[Config, dict[str, tuple[re.Pattern[str], ...]]] | None = None

    def under_way(self, model: str) -> int:
        """How many of a model's are under way."""
        return self._models[model]

    def begin(self, job: Job) -> None:
        """Carry a comparison out in the background; returns at once. Must be called in a loop."""
        self._count(job, 1)
        self._background.keep(self._carried_out(job))

    async def idle(self) -> None:
        """Return once nothing is under way."""
        await self._background.idle()

    async def close(self) -> None:
        """Give up whatever is under way, and let go of connections."""
        self._background.cancel()
        await self._background.idle()
        await self._sender.close()
        await asyncio.to_thread(self._scorer.close)

    def _count(self, job: Job, change: int) -> None:
        self._models[job.model] += change
        self.at[job.letter.destination] += change
        if not self.at[job.letter.destination]:
            del self.at[job.letter.destination]
        self._metrics.under_way(job.model, self._models[job.model])

    async def _carried_out(self, job: Job) -> None:
        outcome: ShadowOutcome = "failed"
        try:
            outcome = await self._outcome(job)
        except StoreError as error:
            outcome = "not_kept"
            log.warning("a comparison is not kept", extra={"model": job.model, "error": str(error)})
        except Exception as error:  # noqa: BLE001  # whatever it was, nobody waits for it
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("a comparison failed with %s at\n%s", type(error).__name__, where)
        finally:
            self._count(job, -1)
            self._metrics.ended(job.model, job.shadow.mode, outcome)

    async def _outcome(self, job: Job) -> ShadowOutcome:
        """Compare; without the whole answer of the client there is nothing to compare with."""
        theirs = Collector(job.kind, job.streamed, self._clock.monotonic())
        sending = asyncio.create_task(self._sender.send(job.letter, theirs))
        try:
            copy = None
            # Not `wait_for`: in Python 3.11 it forgets that it was cancelled when the copy comes at that moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(job.shadow.timeout_s, _LONGEST_PRIMARY_S) + GRACE_S):
                    copy = await job.copied
            if copy is None:
                return "no_copy"
            if not copy.complete:
                return "cut"
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        # Under a key that everybody knows, hashes would tell who guesses a text right.
        secret = self._around.config.routing.session.secret
        settings = Settings(hash_key(secret.encode()) if secret else b"", self._refusals(job))
        scored = await self._scorer.score(_collected(job, copy), theirs, settings)
        if scored is None:
            return "overrun"
        comparison = scored.comparison
        shadow = job.shadow
        if shadow.embed_url and comparison.outcome == "compared":
            meaning = await self._alike(job.model, scored, shadow)
            comparison = msgspec.structs.replace(comparison, meaning=meaning)
        kept = result(job.about(), comparison, scored.primary, scored.shadow, shadow.keep, settings.key)
        await self._results.add(kept, shadow)
        return comparison.outcome

    async def _alike(self, model: str, scored: Scored, shadow: Shadow) -> float | None:
        """How alike both are in meaning; that an engine embeds nothing is said once, until it does again."""
        embedder = Embedder(self._sender.session())
        meaning = await embedder.alike(shadow.embed_url, shadow.embed_model, scored.primary.text, scored.shadow.text)
        if embedder.failed and model not in self._unembedded:
            self._unembedded.add(model)
            log.warning("answers are not compared in meaning: embed_url gives no embeddings", extra={"model": model})
        elif not embedder.failed and meaning is not None:
            self._unembedded.discard(model)
        return meaning

    def _refusals(self, job: Job) -> tuple[re.Pattern[str], ...]:
        """What tells refusals of a model; compiled once a configuration."""
        config = self._around.config
        if self._patterns is None or self._patterns[0] is not config:
            self._patterns = config, {}
        known = self._patterns[1]
        if job.model not in known:
            known[job.model] = compiled(job.shadow.refusals, f"$.models.{job.model}.shadow.refusals")
        return known[job.model]


def _collected(job: Job, copy: Copy) -> Collector:
    """The client's answer, as it passed the gateway."""
    collector = Collector(job.kind, job.streamed, job.asked)
    collector.began(copy.status, copy.headers, copy.began_at)
    for at, piece in copy.pieces:
        collector.chunk(piece, at)
    collector.over(copy.over_at, complete=copy.complete)
    return collector
