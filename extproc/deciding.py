"""The values of a decision, made from one another: request to ask, plan to reservation, pick to decision.

Plain functions: no clock, no store, no randomness. `router` awaits the store between them; `replay` and `explain` use
the same.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

from extproc.choose.chooser import Plan, Priced
from extproc.choose.fleet import Endpoint, Pool
from extproc.choose.policies import Ask, Rung, Weights
from extproc.config import Config
from extproc.continuing import Pins, follows_of
from extproc.envoy.contract import BRIEF, CONTINUED, EPOCH, MODEL, UNIT, VERSION, Decision
from extproc.request.model import Request, RouteKind
from extproc.rollout.split import Choice
from extproc.state.exact_blocks import TokenPrompt, chain_of
from extproc.state.foreseen import Foreseen
from extproc.state.knowledge import PoolKnowledge
from extproc.state.precise import Chains
from extproc.state.rate import predict_ttft_ms
from extproc.state.values import Candidate, Reservation, Reserve

_FALLBACKS = 3
_TOKEN_S = 0.01
"""About what an output token takes, to tell how long an answer stays: a mid-size model takes 5 to 30 ms."""
_LEAST_OUTPUT = 20.0
_WITHOUT_OUTPUT = frozenset({RouteKind.EMBEDDING, RouteKind.RERANK, RouteKind.SCORE})
"""APIs whose answers are computed by the prefill alone."""


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A request with what was computed from its prompt.

    Attributes:
        request: the request.
        blocks: chained hashes of its full prompt blocks.
        prompt_bytes: length of the canonical prompt; of the body when the prompt was not read.
        read: whether the prompt was read.
        body: what the engine gets instead of the client's body; None for that as it came.
        tokens: the prompt as engines see it; None when it is not known.
        chains: its token blocks, by the block sizes of engines.
        waited_s: time spent waiting for `tokens`.
        choice: version of the model that serves it; None for a model with one version.
        named: further name that the body has for the model; empty where it has the model's own, or none.
    """

    request: Request
    blocks: Sequence[int]
    prompt_bytes: float
    read: bool = True
    body: bytes | None = None
    tokens: TokenPrompt | None = None
    chains: Chains = {}
    waited_s: float = 0.0
    choice: Choice | None = None
    named: str = ""


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """One decision, as telemetry records it: sizes in tokens, times in seconds unless named otherwise.

    Attributes:
        pool: pool that serves.
        policy: policy that decided.
        kind: API of the request.
        prompt_tokens: estimated prompt length.
        cached_tokens: of these, predicted to be cached at the pick.
        best_cached_tokens: the most that any endpoint that may serve was predicted to have cached.
        predicted_ttft_ms: expected time to the first token at the pick.
        session: whether the request is pinned: it named its session, or one was recognised, and the policy keeps it.
        pinned: the session's pin was honoured.
        moved: the session had a pin elsewhere.
        flaw: why the body could not be read; empty when it could.
        local_s: time spent in this process.
        store_s: time spent waiting for the store.
        tokens_s: time spent waiting for the prompt's token ids.
        rung: how the prompt was matched with the pick.
    """

    pool: str
    policy: str
    kind: RouteKind
    prompt_tokens: float
    cached_tokens: float
    best_cached_tokens: float
    predicted_ttft_ms: float
    session: bool
    pinned: bool
    moved: bool
    flaw: str
    local_s: float
    store_s: float
    tokens_s: float = 0.0
    rung: Rung = "estimated"


class Facts(msgspec.Struct, frozen=True, gc=False):
    """What a decision carries beside its values.

    Attributes:
        charge_id: charge of the decision.
        predicted_ttft_ms: expected time to the first token at the pick.
    """

    charge_id: str
    predicted_ttft_ms: float


def weights_of(config: Config) -> Weights:
    """The configured weights as the chooser takes them."""
    routing = config.routing
    return Weights(
        prefill_weight=routing.prefill_weight,
        rare_weight=routing.rare_weight,
        running_ms=routing.running_ms,
        output_ms=routing.output_ms,
        hit_weight=routing.hit_weight,
        load_weight=routing.load_weight,
        tie_ms=routing.tie_ms,
        kv_watermark=routing.kv_watermark,
        kv_penalty_ms=routing.kv_penalty_ms,
        candidates=routing.candidates,
    )


class Moment(msgspec.Struct, frozen=True, gc=False):
    """When a request asks.

    Attributes:
        turn: differs from call to call.
        now: seconds of a clock that never goes back.
        rare_gap: a beginning of prompts counts as rare when the gap between its uses is so many times what an answer
            takes.
        far: what a block in an engine's host memory, and one on disk, is worth of one in its GPU.
    """

    turn: int
    now: float
    rare_gap: float
    far: tuple[float, float] = (1.0, 1.0)


def moment_of(config: Config, pool: str, turn: int, now: float) -> Moment:
    """A request of a pool asks now; `turn` and `now` as in `Moment`."""
    settings = config.pools.get(pool)
    far = (settings.cpu_weight, settings.disk_weight) if settings else (1.0, 1.0)
    return Moment(turn, now, config.routing.rare_gap, far)


def with_tokens(asked: Asked, tokens: TokenPrompt | None, block_sizes: Iterable[int], waited_s: float) -> Asked:
    """The request with its token ids, and their blocks in these sizes; without, when there are none."""
    chains: Chains = {}
    if tokens is not None:
        try:
            chains = {size: chain_of(tokens, size) for size in block_sizes}
        except OverflowError:  # an id that no engine has: a client may send any number
            tokens = None
    return msgspec.structs.replace(asked, tokens=tokens, chains=chains, waited_s=waited_s)


def ask_of(asked: Asked, known: PoolKnowledge, moment: Moment) -> Ask:
    """What the request asks of a pool."""
    request, blocks = asked.request, asked.blocks
    bytes_per_token = known.bytes_per_token_of(blocks)
    prompt_tokens = asked.prompt_bytes / bytes_per_token
    continues = request.previous_response and request.kind is RouteKind.RESPONSES
    stored = known.continued(follows_of(request)) if continues else None
    if stored is not None:
        # Only the engine that has the conversation can put it in front of what is new. Instructions and tools are in
        # the body again, in place of the stored ones (vLLM): counted twice, 1,397 tokens were expected to be 2,300.
        endpoint, tokens = stored
        prompt_tokens += tokens - request.opening_bytes / bytes_per_token
        estimated: Mapping[str, float] = {endpoint: tokens}
    else:
        estimated = known.matched_tokens(blocks, request.follows)
    matched, held = estimated, dict[str, float]()
    if asked.tokens is not None and stored is None:
        by_bytes, prompt_tokens = prompt_tokens, max(1.0, float(len(asked.tokens.ids)))
        foreseen = None
        if blocks:
            scale = prompt_tokens / by_bytes
            foreseen = Foreseen(estimated, scale, scale * known.block_bytes / bytes_per_token)
        found = known.caches.exact_matches(asked.chains, len(asked.tokens.ids), moment.far, foreseen)
        matched = {**estimated, **{name: each.worth for name, each in found.items()}}
        held = {name: float(each.blocks * each.block_tokens) for name, each in found.items()}
    expected = known.expected_output(blocks, request.max_tokens) if request.kind not in _WITHOUT_OUTPUT else 0.0
    shared = _shared_block(blocks, matched, known.block_bytes / bytes_per_token)
    gap_s = known.heat.gap_s(shared, moment.now) if shared else 0.0
    turn = moment.turn
    return Ask(
        prompt_tokens=prompt_tokens,
        matched_tokens=matched,
        first_block=blocks[0] if blocks else turn,
        home=_home(request, blocks, turn),
        turn=turn,
        n=request.n,
        output_tokens=expected * request.n,
        rarity=min(1.0, gap_s / (moment.rare_gap * _TOKEN_S * max(expected, _LEAST_OUTPUT))),
        shared_block=shared,
        held_tokens=held,
        estimated_tokens=estimated if held else {},
        blind=not (blocks or estimated or asked.tokens),
    )


def _shared_block(blocks: Sequence[int], matched: Mapping[str, float], tokens_a_block: float) -> int:
    """Last block of the longest beginning that any endpoint holds; 0 for none."""
    held = min(len(blocks), round(max(matched.values()) / tokens_a_block)) if matched else 0
    return blocks[held - 1] if held else 0


def _home(request: Request, blocks: Sequence[int], turn: int) -> int:
    """Places a session: by its id, else by the beginning of its prompt, which all its turns share."""
    if request.session:
        return xxhash.xxh3_64_intdigest(f"{request.tenant}\0{request.session}".encode("utf-8", "surrogatepass"))
    return blocks[0] if blocks else turn


def reserve_of(
    config: Config, pool: Pool, plan: Plan, ask: Ask, pins: Pins, owner: tuple[str, str], *, versioned: bool = False
) -> Reserve:
    """The reservation of a plan; `owner` is (replica, charge id).

    Where the model has several versions (`versioned`), a pin also tells which one a conversation is on: it is written
    where the policy does not honour it, too.
    """
    session = config.routing.session
    if not (plan.sticky or pins.stored):
        pins = Pins(next_key=pins.next_key or pins.key) if versioned else Pins()
    replica, charge_id = owner
    return Reserve(
        pool=pool.name,
        charge_id=charge_id,
        replica=replica,
        candidates=packed(plan.candidates),
        pin_key=pins.key,
        next_pin_key=pins.next_key,
        pin_ttl_ms=int(session.ttl_s * 1000),
        max_pins=session.max,
        break_out_ms=session.break_out_ms,
        strict=pins.strict,
        sequences=ask.n,
        output_tokens=ask.output_tokens,
        running_ms=plan.running_ms,
        output_ms=plan.output_ms,
        backlog_weight=plan.backlog_weight,
        tie_ms=plan.tie_ms,
        lease_ms=config.redis.lease_ms,
    )


def packed(candidates: Sequence[Priced]) -> list[Candidate]:
    """Candidates as the store takes them."""
    return [
        Candidate(
            endpoint.id,
            each.static_ms,
            each.uncached,
            endpoint.rate,
            endpoint.floor_tokens,
            endpoint.floor_running,
            endpoint.stalled_tokens,
        )
        for each in candidates
        for endpoint in (each.endpoint,)
    ]


def predicted_ttft_ms(endpoint: Endpoint, uncached: float, backlog: float, rate_factor: float) -> float:
    """Expected time to the first token: what is left of a standstill, then backlog and own prefill at the learnt speed.

    `Endpoint.rate` is `rate_factor` times the speed that was learnt, and less for one that is `slowed`: a choice should
    err to the slow side, a prediction to neither.
    """
    learnt = endpoint.rate / (rate_factor * endpoint.slowed)
    return endpoint.silent_ms + predict_ttft_ms(learnt, endpoint.overhead_ms / 1000.0, backlog, uncached)


def order_of(plan: Plan, picked: Priced) -> Sequence[Priced]:
    """The pick, then those that are tried after it: the next cheapest by local knowledge, other kinds of engine last.

    A retry sends the bytes that were made for the pick: `fitting` leaves out whom they do not fit.
    """
    kind = picked.endpoint.kind
    others = sorted(
        (each for each in plan.candidates if each.endpoint.id != picked.endpoint.id),
        key=lambda each: (bool(kind and each.endpoint.kind) and each.endpoint.kind != kind, each.static_ms),
    )
    return [picked, *others[:_FALLBACKS]]


def decision_of(
    asked: Asked, ask: Ask, pool: Pool, order: Sequence[Priced], reservation: Reservation, facts: Facts
) -> Decision:
    """The ordered destinations, of which `order` has the pick first; and what the access log should bring back."""
    request, picked = asked.request, order[0]
    destinations = tuple(each.endpoint.destination for each in order)
    # The engine counts the stored conversation among the prompt's tokens: its bytes are not in this request.
    whole = asked.read and not request.previous_response
    metadata: dict[str, str | float] = {
        "endpoint": picked.endpoint.id,
        "kind": request.kind.value,
        "prompt_bytes": asked.prompt_bytes if whole else -1.0,
        "prompt_tokens": ask.prompt_tokens,
        "uncached_tokens": ask.prompt_tokens - ask.cached(picked.endpoint),
        "backlog_tokens": reservation.backlog_tokens,
        "predicted_ttft_ms": facts.predicted_ttft_ms,
        "cost_ms": reservation.cost_ms,
        "sequences": float(ask.n),
        "pinned": float(reservation.pinned),
        "streamed": float(request.stream),
    }
    if (choice := asked.choice) is not None:
        metadata |= {MODEL: choice.model, VERSION: choice.version, UNIT: choice.unit}
        # Who chose the version, or got another one than the weights gave, tells nothing of what the weights did.
        if choice.epoch and choice.why in ("weight", "running", "response"):
            metadata[EPOCH] = choice.epoch
        began = request.follows or request.previous_response or choice.why == "running"
        if began or reservation.pinned or reservation.moved:
            metadata[CONTINUED] = 1.0
        if request.max_tokens is not None and request.max_tokens <= 1:
            metadata[BRIEF] = 1.0
    return Decision(pool.name, destinations, facts.charge_id, metadata, asked.body, request.model)
