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
import pytest

from extproc.sim.server import add_arguments, settings_of

COMMAND = (sys.executable, "-m", "extproc.sim")


def test_the_arguments_become_the_settings() -> None:
    """Every speed in the unit its name says."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = settings_of(parser.parse_args([]))
    assert defaults == type(defaults)()
    given = settings_of(parser.parse_args(["--step-ms", "12", "--blocks", "99", "--adapter", "a", "--adapter", "b"]))
    assert (given.engine.step_s, given.engine.blocks, given.adapters) == (0.012, 99, ("a", "b"))


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
