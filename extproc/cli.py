"""The command `warmpath`: reads arguments, calls what does the work, turns errors into one line and an exit code."""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from extproc import __version__, reload
from extproc.errors import ConfigError, WarmpathError

_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 wrong use or configuration."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except WarmpathError as error:
        sys.stderr.write(f"warmpath: {error}\n")
        return _USAGE if error.reason == "config" else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away; pointing stdout elsewhere keeps the interpreter's exit quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmpath",
        description="Sends each LLM request through Envoy to the engine expected to give the first token soonest.",
        epilog="`warmpath COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"warmpath {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _with_config(commands, "serve", "run the sidecar, workers and keeper, in the foreground; needs redis.url", _serve)
    _with_config(commands, "check", "check warmpath.yaml and the Envoy configuration made from it", _check)
    envoy = _with_config(commands, "envoy", "print the Envoy configuration", _envoy)
    text = "write it to this file instead of stdout; with TLS, further files are written beside it"
    envoy.add_argument("--output", type=Path, metavar="FILE", help=text)
    up = _with_config(commands, "up", "run sidecar, Envoy and an embedded Valkey here, in the foreground", _up)
    up.add_argument(
        "--sim", type=int, default=0, metavar="N", help="start N simulated engines as the first pool's only endpoints"
    )
    text = "compare round robin with the default policy on simulated engines"
    demo = commands.add_parser("demo", help=text, description=_sentence(text))
    demo.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    demo.add_argument("--keep", action="store_true", help="leave the second stack running until Ctrl-C")
    demo.add_argument("--seed", type=int, default=1, help="seed of the workload (%(default)s)")
    demo.set_defaults(run=_demo)
    _add_sim(commands)
    _add_explain(commands)
    _add_key(commands)
    _add_rollout(commands)
    _add_replay(commands)
    _add_bench(commands)
    worker = _with_config(commands, "worker", argparse.SUPPRESS, _worker)
    worker.add_argument("--index", type=int, default=0)
    keeper = _with_config(commands, "keeper", argparse.SUPPRESS, _keeper)
    relay = _with_config(commands, "relay", argparse.SUPPRESS, _relay)
    for child in (worker, keeper, relay):
        child.add_argument("--last-good", type=Path, help="copy of the configuration that was in use last")
    return parser


def _with_config(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    if text == argparse.SUPPRESS:
        parser = commands.add_parser(name)
    else:
        parser = commands.add_parser(name, help=text, description=_sentence(text))
    parser.add_argument(
        "--config", type=Path, default=Path("warmpath.yaml"), metavar="FILE", help="the configuration (%(default)s)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="lay a setting over the file, as gateway.sidecar.workers=4; may be repeated",
    )
    if name == "check":
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        asked = "ask the engines too, whether they serve what the file says of them"
        parser.add_argument("--engines", action="store_true", help=asked)
    parser.set_defaults(run=run)
    return parser


def _sentence(text: str) -> str:
    """A help text as the first line of the command's own help."""
    return f"{text[0].upper()}{text[1:]}."


def _add_sim(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run simulated engines (vLLM, TensorRT-LLM, SGLang) in the foreground"
    parser = commands.add_parser("sim", help=text, description=_sentence(text))
    try:
        from extproc.sim import server
    except ImportError:
        parser.set_defaults(run=_not_installed)
        return
    server.add_arguments(parser)
    parser.set_defaults(run=server.run)


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from extproc.replay import arguments

    text = "compare policies on a trace or a generated workload, on a virtual clock"
    parser = commands.add_parser("replay", help=text, description=_sentence(text))
    arguments.add_arguments(parser)
    parser.set_defaults(run=_replay)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from extproc.replay import arguments

    text = "compare policies on a trace or a generated workload, through the real stack"
    parser = commands.add_parser("bench", help=text, description=_sentence(text))
    arguments.add_bench_arguments(parser)
    parser.set_defaults(run=_bench)


def _add_explain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _with_config(commands, "explain", "show why a request goes, or went, where it does", _explain)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--request", metavar="FILE", help="body of a request to decide on now, - for standard input")
    which.add_argument("--id", metavar="ID", help="x-request-id or charge id of a decision that was made")
    parser.add_argument("--path", default="/v1/chat/completions", help="path of the request (%(default)s)")
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME:VALUE", help="header of the request; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_key(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "make an API key for a client, and its line for the file gateway.auth.keys"
    parser = commands.add_parser("key", help=text, description=_sentence(text))
    parser.add_argument("client", metavar="NAME", help="the client, which becomes the tenant of its requests")
    parser.add_argument("--file", type=Path, metavar="FILE", help="add the line to this file instead of showing it")
    parser.set_defaults(run=_key)


def _add_rollout(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from extproc import rollout_arguments

    text = "move the traffic of a model to another version, step by step, and back"
    parser = commands.add_parser("rollout", help=text, description=_sentence(text))
    rollout_arguments.add_arguments(parser)
    parser.set_defaults(run=_rollout)


def _not_installed(_arguments: argparse.Namespace) -> int:
    sys.stderr.write("warmpath: the simulator is not installed: pip install 'warmpath[demo]'\n")
    return 1


def _run(work: Awaitable[int]) -> int:
    import uvloop

    async def main() -> int:
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _serve(arguments: argparse.Namespace) -> int:
    from extproc import serve
    from extproc.telemetry import logs

    config = reload.read(arguments.config, arguments.set)
    logs.setup(config.telemetry.log_level, "serve")
    return _run(serve.serve(config, arguments.config, arguments.set))


def _worker(arguments: argparse.Namespace) -> int:
    from extproc import worker
    from extproc.telemetry import logs

    logs.setup("info", f"worker-{arguments.index}")
    config = reload.read_or(arguments.config, arguments.set, arguments.last_good)
    return _run(worker.run(config, arguments.config, arguments.set, arguments.index))


def _keeper(arguments: argparse.Namespace) -> int:
    from extproc import keeper
    from extproc.telemetry import logs

    logs.setup("info", "keeper")
    config = reload.read_or(arguments.config, arguments.set, arguments.last_good)
    return _run(keeper.run(config, arguments.config, arguments.set))


def _relay(arguments: argparse.Namespace) -> int:
    from extproc import relaying
    from extproc.telemetry import logs

    logs.setup("info", relaying.NAME)
    config = reload.read_or(arguments.config, arguments.set, arguments.last_good)
    return _run(relaying.run(config, arguments.config, arguments.set))


def _check(arguments: argparse.Namespace) -> int:
    from extproc import advice
    from extproc.envoy import validate

    if arguments.engines:
        from extproc import engine_check

        report = validate.check(arguments.config, arguments.set, advice.warnings, engine_check.findings)
    else:
        report = validate.check(arguments.config, arguments.set, advice.warnings)
    sys.stdout.write(report.to_json() if arguments.json else report.to_text())
    return 0 if report.ok else _USAGE


def _envoy(arguments: argparse.Namespace) -> int:
    from extproc.envoy.render import render, to_yaml, write

    config = reload.read(arguments.config, arguments.set)
    if not arguments.output:
        sys.stdout.write(to_yaml(render(config)))
        return 0
    try:
        write(config, arguments.output)
    except OSError as error:
        raise ConfigError(f"--output {arguments.output}: cannot be written: {error.strerror}") from error
    return 0


def _key(arguments: argparse.Namespace) -> int:
    from extproc import key_command

    sys.stdout.write(key_command.make(arguments.client, arguments.file))
    return 0


def _rollout(arguments: argparse.Namespace) -> int:
    from extproc import rollout_command

    return rollout_command.run(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    from extproc import explaining

    config = reload.read(arguments.config, arguments.set)
    if arguments.id is None:
        told = explaining.of_request(config, arguments.request, arguments.path, arguments.header)
    else:
        told = explaining.of_decision(config, arguments.id)
    sys.stdout.write(explaining.to_json(told) if arguments.json else explaining.to_text(told))
    return 0


def _up(arguments: argparse.Namespace) -> int:
    from extproc import up

    if arguments.sim < 0:
        raise ConfigError(f"--sim {arguments.sim}: write how many simulated engines to start, 1 or more")
    return _run(up.up(arguments.config, arguments.set, arguments.sim))


def _replay(arguments: argparse.Namespace) -> int:
    from extproc.replay import command

    return command.run(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    try:
        from extproc.replay import bench
    except ImportError:
        return _not_installed(arguments)
    return _run(bench.run(arguments))


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from extproc import demo
    except ImportError:
        return _not_installed(arguments)
    return _run(demo.demo(demo.Demo(arguments.json, arguments.keep, arguments.seed)))
