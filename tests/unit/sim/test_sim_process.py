"""The process: its lines, its signals, its end."""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import textwrap

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.sim.server import add_arguments, settings_of
from extproc.sim.settings import KvEvents

COMMAND = (sys.executable, "-m", "extproc.sim")


def test_the_arguments_become_the_settings() -> None:
    """Every speed in the unit its name says."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = settings_of(parser.parse_args([]))
    assert defaults == type(defaults)()
    given = settings_of(parser.parse_args(["--step-ms", "12", "--blocks", "99", "--adapter", "a", "--adapter", "b"]))
    assert (given.engine.step_s, given.engine.blocks, given.adapters) == (0.012, 99, ("a", "b"))


def test_the_arguments_of_events_become_their_settings() -> None:
    """Off unless asked for; ports, topic, buffer and the kind of hashes as given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert settings_of(parser.parse_args(["--kv-port", "5557"])).events is None
    assert settings_of(parser.parse_args(["--kv-events"])).events == KvEvents()
    given = ["--kv-events", "--kv-port", "5557", "--kv-no-replay", "--kv-topic", "t", "--kv-buffer", "9"]
    wanted = KvEvents(port=5557, replay_port=None, topic="t", buffer=9, int_hashes=False, connect="tcp://r:1")
    assert settings_of(parser.parse_args([*given, "--kv-byte-hashes", "--kv-connect", "tcp://r:1"])).events == wanted
    settings = settings_of(parser.parse_args(["--profile", "sglang", "--dp-ranks", "2", "--dev-mode", "--scale-out"]))
    assert (settings.profile, settings.dp_ranks, settings.dev_mode, settings.scale_out) == ("sglang", 2, True, True)


async def test_it_says_where_its_events_are() -> None:
    """Beside the address, by rank; live and replayed events come from there, on the event loop of the process too."""
    argv = ["--kv-events", "--dp-ranks", "2", "--exit-with-parent"]
    process = await asyncio.create_subprocess_exec(*COMMAND, *argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    line = json.loads(await process.stdout.readline())
    assert len(line["kv_events"]) == len(line["kv_replay"]) == 2
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(line["kv_replay"][1].replace("*", "127.0.0.1"))
    body, header = {"prompt": "x" * 100, "max_tokens": 1}, {"x-data-parallel-rank": "1"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{line['address']}/v1/completions", json=body, headers=header) as response,
    ):
        assert response.status == 200
    await dealer.send_multipart([b"", bytes(8)])
    frames = await asyncio.wait_for(dealer.recv_multipart(), 10)
    assert frames[:3] == [b"", b"", bytes(8)]
    assert msgspec.msgpack.decode(frames[3])[2] == 1
    context.destroy(linger=0)
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_says_where_it_listens_and_stops_on_a_signal(number: signal.Signals) -> None:
    """One line of JSON an engine, exit status 0, nothing on stderr, even with a stream in progress."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--engines", "2", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    lines = [json.loads(await process.stdout.readline()) for _ in range(2)]
    assert [line["engine"] for line in lines] == [0, 1]
    body = {"model": "sim", "prompt": "x", "max_tokens": 9000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as client:
        for line in lines:
            async with client.get(f"http://{line['address']}/health") as response:
                assert response.status == 200
        async with client.post(f"http://{lines[0]['address']}/v1/completions", json=body) as stream:
            await stream.content.readany()
            process.send_signal(number)
            _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def test_ports_are_consecutive_when_the_first_is_given() -> None:
    """--port N: engine i listens on N + i; if one of them is taken, it says so and ends with status 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1] - 1
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--engines", "2", "--port", str(first), stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"choose another --port" in errors


async def test_settings_that_make_no_engine_are_named() -> None:
    """Exit status 2 and the setting's name."""
    process = await asyncio.create_subprocess_exec(*COMMAND, "--time-factor", "0", stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"time_factor" in errors


async def test_it_ends_with_its_parent() -> None:
    """--exit-with-parent: a parent that is killed leaves nothing behind."""
    parent = textwrap.dedent(
        f"""
        import subprocess, time
        child = subprocess.Popen([*{COMMAND!r}, "--exit-with-parent"], stdout=subprocess.PIPE, text=True)
        print(child.pid, child.stdout.readline(), flush=True)
        time.sleep(60)
        """
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert process.stderr is not None
    child = int((await process.stdout.readline()).split()[0])
    process.kill()
    await process.wait()
    try:
        async with asyncio.timeout(30):
            # The child holds the other end of this pipe too, so its end comes with the child's.
            assert await process.stderr.read() == b""
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        raise
