"""The process of the simulated engines: its arguments, its signals, its end."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from extproc.sim.profiles import PROFILES
from extproc.sim.settings import EngineSettings, KvEvents, SimSettings
from extproc.sim.traits import Traits

if TYPE_CHECKING:
    from extproc.sim.fleet import SimFleet

PARENT_CHECK_S = 0.5
"""How often `--exit-with-parent` looks whether the parent is still there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the simulated engines to `parser`."""
    engine, sim = EngineSettings(), SimSettings()
    where = parser.add_argument_group("where")
    where.add_argument("--engines", type=int, default=1, help="engines in this process (%(default)s)")
    where.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    where.add_argument("--port", type=int, default=0, help="first of consecutive ports; 0 takes free ones")
    where.add_argument("--exit-with-parent", action="store_true", help="stop when the parent process ends")
    speed = parser.add_argument_group("speed, in engine time")
    speed.add_argument(
        "--prefill-tokens-per-s", type=float, default=engine.prefill_tokens_per_s, metavar="N", help="(%(default)s)"
    )
    speed.add_argument(
        "--step-ms",
        type=float,
        default=engine.step_s * 1000,
        metavar="MS",
        help="a step of an empty batch (%(default)s)",
    )
    speed.add_argument(
        "--per-seq-ms", type=float, default=engine.per_seq_s * 1000, metavar="MS", help="more a sequence (%(default)s)"
    )
    speed.add_argument("--token-budget", type=int, default=engine.token_budget, metavar="N", help="tokens a step")
    speed.add_argument("--time-factor", type=float, default=1.0, help="engine seconds in one wall second")
    cache = parser.add_argument_group("cache and queue")
    cache.add_argument("--blocks", type=int, default=engine.blocks, help="KV cache in blocks (%(default)s)")
    cache.add_argument("--block-size", type=int, default=engine.block_size, help="tokens a block (%(default)s)")
    cache.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt anew")
    cache.add_argument(
        "--max-num-seqs", type=int, default=engine.max_num_seqs, metavar="N", help="largest batch (%(default)s)"
    )
    cache.add_argument("--max-model-len", type=int, default=0, help="0: what the cache holds, at most 131072")
    cache.add_argument("--max-num-queued-reqs", type=int, default=0, help="more live requests get 503; 0: no limit")
    surface = parser.add_argument_group("surface")
    surface.add_argument(
        "--profile", default=sim.profile, choices=tuple(PROFILES), help="engine and version it is like (%(default)s)"
    )
    surface.add_argument("--model", default=sim.model, help="served model name (%(default)s)")
    surface.add_argument("--adapter", action="append", default=[], help="served adapter name; may be repeated")
    surface.add_argument(
        "--answer-tokens", type=int, default=sim.answer_tokens, help="where answers stop (%(default)s)"
    )
    surface.add_argument("--no-prompt-tokens-details", action="store_true", help="do not report cached tokens")
    surface.add_argument("--server-load-tracking", action="store_true", help="let /load count requests")
    surface.add_argument(
        "--embedding-dims", type=int, default=sim.embedding_dims, metavar="N", help="of an embedding (%(default)s)"
    )
    surface.add_argument(
        "--keep-alive-s", type=float, default=sim.keep_alive_s, metavar="S", help="of an idle connection (%(default)s)"
    )
    surface.add_argument("--runtime-adapters", action="store_true", help="let adapters be loaded and unloaded")
    surface.add_argument("--max-loras", type=int, default=0, help="adapters that may run at once; 0: no limit")
    surface.add_argument("--dp-ranks", type=int, default=sim.dp_ranks, help="data-parallel ranks (%(default)s)")
    surface.add_argument("--dev-mode", action="store_true", help="vLLM: serve /sleep, /wake_up, /reset_prefix_cache")
    surface.add_argument("--scale-out", action="store_true", help="vllm-0.33: serve /v1/*/render")
    surface.add_argument("--control", action="store_true", help="serve /sim/*: freeze, fail, slow, restart, …")
    _add_trait_arguments(parser)
    _add_event_arguments(parser)


def _add_trait_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each of `Traits`; `POST /sim/traits` changes them."""
    traits = parser.add_argument_group("what tells it from its like, as a new version of a model may; shares: 0 to 1")
    told = {
        "prefill_factor": "prefill takes so many times longer",
        "decode_factor": "each token takes so many times longer",
        "fail_share": "requests that --fail-status is answered to",
        "fail_status": "that status",
        "reset_share": "requests whose connection is reset",
        "cut_share": "streams that are reset after --after-tokens",
        "end_share": "streams that end there as if whole, without [DONE]",
        "empty_share": "answers that end with their first token",
        "after_tokens": "tokens before a stream is cut or ends",
        "length_factor": "answers are so many times longer, if not cut by max_tokens",
        "length_spread": "share by which they differ in length",
        "text_seed": "another says different things",
    }
    for name, default in msgspec.structs.asdict(Traits()).items():
        traits.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="N",
            help=f"{told[name]} (%(default)s)",
        )


def _add_event_arguments(parser: argparse.ArgumentParser) -> None:
    events, default = parser.add_argument_group("KV events"), KvEvents()
    events.add_argument("--kv-events", action="store_true", help="tell of what is cached and evicted")
    events.add_argument(
        "--kv-port",
        type=int,
        default=default.port,
        metavar="PORT",
        help="first of consecutive ports that publish, one a rank and engine; 0 takes free ones",
    )
    events.add_argument(
        "--kv-replay-port",
        type=int,
        default=default.replay_port,
        metavar="PORT",
        help="the same, for those that replay",
    )
    events.add_argument("--kv-no-replay", action="store_true", help="replay nothing")
    events.add_argument("--kv-connect", default=default.connect, metavar="ADDRESS", help="connect instead of listening")
    events.add_argument("--kv-topic", default=default.topic, metavar="TOPIC", help="what batches begin with")
    events.add_argument(
        "--kv-buffer",
        type=int,
        default=default.buffer,
        metavar="N",
        help="batches kept for a replay, or events kept until they are taken (%(default)s)",
    )
    events.add_argument("--kv-byte-hashes", action="store_true", help="vLLM: hashes of 32 bytes, not numbers")


def settings_of(args: argparse.Namespace) -> SimSettings:
    """Return the settings that the arguments name.

    Raises:
        ValueError: a value no engine could run with.
    """
    engine = EngineSettings(
        blocks=args.blocks,
        block_size=args.block_size,
        token_budget=args.token_budget,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        step_s=args.step_ms / 1000,
        per_seq_s=args.per_seq_ms / 1000,
        prefix_caching=not args.no_prefix_caching,
        max_loras=args.max_loras,
    )
    events = KvEvents(
        port=args.kv_port,
        replay_port=None if args.kv_no_replay else args.kv_replay_port,
        connect=args.kv_connect,
        topic=args.kv_topic,
        buffer=args.kv_buffer,
        int_hashes=not args.kv_byte_hashes,
    )
    return SimSettings(
        engine=engine,
        profile=args.profile,
        model=args.model,
        adapters=tuple(args.adapter),
        runtime_adapters=args.runtime_adapters,
        dp_ranks=args.dp_ranks,
        kv_events=events if args.kv_events else False,
        dev_mode=args.dev_mode,
        scale_out=args.scale_out,
        time_factor=args.time_factor,
        answer_tokens=args.answer_tokens,
        max_num_queued_reqs=args.max_num_queued_reqs,
        prompt_tokens_details=not args.no_prompt_tokens_details,
        server_load_tracking=args.server_load_tracking,
        embedding_dims=args.embedding_dims,
        keep_alive_s=args.keep_alive_s,
        control=args.control,
        traits=Traits(**{name: getattr(args, name) for name in Traits.__struct_fields__}),
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, or until the parent has ended; return the exit status.

    Prints one line of JSON for each engine once all listen: `{"engine": 0, "address": "127.0.0.1:40001"}`. One that
    publishes events says where, by rank: `"kv_events": ["tcp://*:40002"], "kv_replay": ["tcp://*:40003"]`.
    """
    parent = os.getppid() if args.exit_with_parent else 0
    try:
        settings = settings_of(args)
    except ValueError as error:
        return _fail(2, str(error))
    try:
        # Not at the top: the command line must know these options without the extra that serves them.
        import uvloop

        from extproc.sim.fleet import SimFleet
    except ImportError as error:
        return _fail(1, f"{error}; install the extra: pip install 'warmpath[demo]'")
    fleet = SimFleet(args.engines, settings, host=args.host, port=args.port)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(fleet, parent))
    except OSError as error:
        return _fail(1, f"cannot listen: {error}; choose another --port, or 0 for free ones")
    return 0


def _fail(status: int, reason: str) -> int:
    sys.stderr.write(f"sim: {reason}\n")
    return status


async def _serve(fleet: "SimFleet", parent: int) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with fleet:
        lines = (json.dumps({"engine": n} | one.where()) for n, one in enumerate(fleet.endpoints))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        while not stopped.is_set() and (not parent or os.getppid() == parent):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), PARENT_CHECK_S if parent else None)
