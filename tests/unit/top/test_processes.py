"""Child processes: whatever happens, none stays behind and none hangs."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import ParamSpec

import pytest
import uvloop

from extproc.errors import StackError
from extproc.processes import Child, Restarts, stop_requested, until_stopped
from tests.acceptance import processes
from tests.waiting import until

_SLEEP = "import time; time.sleep(600)"
_STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, flush=True)
time.sleep(600)
"""
_LEAVES_A_GRANDCHILD = """
import subprocess, sys
code = "import time; time.sleep(600)"
print(subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid, flush=True)
"""
_PARENT = """
import asyncio, sys
from extproc.processes import Child
async def main():
    child = Child("child", [sys.executable, "-c", "import time; time.sleep(600)"])
    await child.start()
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""


P = ParamSpec("P")


def on_both_loops(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run a test on the command's own event loop, uvloop, and on asyncio's: they tell the end of a process apart."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for loop in (uvloop.new_event_loop, asyncio.new_event_loop):
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(test(*args, **kwargs))

    return run


def python(code: str, lines: list[str] | None = None, name: str = "child") -> Child:
    """A child that runs some Python; its output goes to `lines`."""
    kept = [] if lines is None else lines
    return Child(name, [sys.executable, "-c", code], lambda _, line: kept.append(line))


def gone(pid: int) -> bool:
    """Whether no such process runs any more."""
    return pid not in {one.pid for one in processes.running()}


@on_both_loops
async def test_every_line_reaches_the_sink_before_wait_returns() -> None:
    """Also bytes that are no UTF-8, a last line without its end, and what goes to stderr."""
    lines: list[str] = []
    code = (
        "import sys; o = sys.stdout.buffer; o.write(b'one\\n\\xff\\n'); o.flush(); sys.stderr.write('err\\n');"
        "sys.stderr.flush(); o.write(b'two'); o.flush(); sys.exit(3)"
    )
    child = python(code, lines)
    await child.start()
    assert await child.wait() == 3
    assert lines == ["one", "\ufffd", "err", "two"]
    assert (child.code, child.running, child.starts) == (3, False, 1)


@on_both_loops
async def test_a_line_without_an_end_does_not_stop_the_rest() -> None:
    """A line over 1 MiB is left out and said; what follows comes through."""
    lines: list[str] = []
    child = python("print('x' * (3 << 20)); print('after')", lines)
    await child.start()
    assert await child.wait() == 0
    assert lines[-1] == "after"
    assert "(a line over 1 MiB was left out)" in lines
    assert sum(map(len, lines)) < 2 << 20


@on_both_loops
async def test_a_child_that_ignores_sigterm_is_killed_with_its_group() -> None:
    """After the grace both the child and what it started are gone."""
    lines: list[str] = []
    child = python(_STUBBORN, lines)
    await child.start()
    await until(lambda: bool(lines))
    assert await child.stop(grace_s=0.1) == -signal.SIGKILL
    await until(lambda: gone(int(lines[0])))


@on_both_loops
async def test_a_child_that_goes_quietly_takes_its_group_with_it() -> None:
    """A grandchild that ignores the end of its parent does not stay behind."""
    lines: list[str] = []
    child = python(_STUBBORN.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", ""), lines)
    await child.start()
    await until(lambda: bool(lines))
    assert await child.stop() == -signal.SIGTERM
    await until(lambda: gone(int(lines[0])))


@on_both_loops
async def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    """SIGKILL leaves the parent no time to stop anything: the kernel does."""
    lines: list[str] = []
    parent = python(_PARENT, lines, "parent")
    await parent.start()
    await until(lambda: bool(lines))
    assert not gone(int(lines[0]))
    os.kill(parent.pid, signal.SIGKILL)
    assert await parent.wait() == -signal.SIGKILL
    await until(lambda: gone(int(lines[0])))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_child_whose_parent_died_too_early_ends_itself() -> None:
    """The parent may die between fork and the request to be told of its death: then nobody would tell."""
    code = "from extproc.processes import _die_with; _die_with(1 << 22); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


@on_both_loops
async def test_a_grandchild_with_the_pipe_does_not_hold_up_the_end() -> None:
    """The child is over when it is over, whoever still holds the other end of its output."""
    lines: list[str] = []
    child = python(_LEAVES_A_GRANDCHILD, lines)
    await child.start()
    async with asyncio.timeout(60):
        assert await child.wait() == 0
        assert await child.stop() == 0
    assert not gone(int(lines[0]))
    os.kill(int(lines[0]), signal.SIGKILL)


@on_both_loops
async def test_one_who_gives_up_waiting_does_not_disturb_the_others() -> None:
    """A wait that is cancelled while output is still read must not make a later stop look cancelled."""
    lines: list[str] = []
    child = python(_LEAVES_A_GRANDCHILD, lines)
    await child.start()
    waiting = asyncio.create_task(child.wait())
    await until(lambda: child.code is not None)
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await child.stop() == 0
    os.kill(int(lines[0]), signal.SIGKILL)


@on_both_loops
async def test_a_child_nobody_listens_to_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """The sink fails (`warmpath up | head`): a full pipe would freeze Envoy in the middle of its requests."""

    def closed(_name: str, _line: str) -> None:
        raise BrokenPipeError

    child = Child("talker", [sys.executable, "-c", "while True: print('x' * 100)"], closed)
    await child.start()
    assert await child.wait() == -signal.SIGTERM
    said = [each for each in caplog.records if each.message == "output cannot be passed on"]
    assert said[-1].child == "talker"  # type: ignore[attr-defined]
    caplog.clear()
    assert await child.stop() == -signal.SIGTERM


@on_both_loops
async def test_a_program_that_is_not_there_is_named() -> None:
    """The error says which child and which program."""
    with pytest.raises(StackError, match=r"^envoy cannot be started: /nowhere/envoy: No such file"):
        await Child("envoy", ["/nowhere/envoy"]).start()


@on_both_loops
async def test_a_child_that_was_never_started() -> None:
    """Stopping it is no error; waiting for it is."""
    child = python(_SLEEP)
    child.send(signal.SIGTERM)
    assert await child.stop() == 0
    assert (child.pid, child.code, child.running) == (0, None, False)
    with pytest.raises(StackError, match="never started"):
        await child.wait()


@on_both_loops
async def test_a_child_can_be_started_again_and_stopped_twice() -> None:
    """As a killed store is in a demonstration; its second life has its own output and exit code."""
    lines: list[str] = []
    child = python("import os; print(os.environ['ROUND']); import time; time.sleep(600)", lines)
    child._env = {**os.environ, "ROUND": "1"}
    for starts in (1, 2):
        await child.start()
        await until(lambda starts=starts: len(lines) == starts)  # type: ignore[misc]
        assert await child.stop() == -signal.SIGTERM
        assert await child.stop() == -signal.SIGTERM
        assert child.starts == starts


@on_both_loops
async def test_the_environment_is_added_to() -> None:
    """Given variables lie over those of this process, which stay."""
    lines: list[str] = []
    code = "import os; print(os.environ['EXTRA'], 'PATH' in os.environ)"
    child = Child("child", [sys.executable, "-c", code], lambda _, line: lines.append(line), {"EXTRA": "yes"})
    await child.start()
    await child.wait()
    assert lines == ["yes True"]


def test_back_off_doubles_while_children_die_young_and_starts_afresh_after_a_long_life() -> None:
    """0.1 s to 5 s; a child that lived ten seconds was well."""
    restarts = Restarts()
    waits = [restarts.after(0.2) for _ in range(8)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert [restarts.after(9.9), restarts.after(10.0), restarts.after(0.1)] == pytest.approx([5.0, 0.1, 0.2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@on_both_loops
async def test_a_request_to_stop_is_told_by_its_signal(number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM both ask; until_stopped takes either as a good end."""
    running = asyncio.create_task(asyncio.sleep(600))
    for asked, answer in ((stop_requested(), number), (until_stopped([running]), 0)):
        waiting: asyncio.Task[int] = asyncio.create_task(asked)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), number)
        assert await waiting == answer
    running.cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@on_both_loops
async def test_being_told_again_does_not_cut_the_end_short(number: signal.Signals) -> None:
    """SIGTERM to a whole control group reaches a worker twice: the second must not kill it while it drains."""
    asked = asyncio.create_task(stop_requested())
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), number)
    assert await asked == number
    for again in (number, signal.SIGTERM):
        os.kill(os.getpid(), again)
        await asyncio.sleep(0.05)


@on_both_loops
async def test_a_background_task_that_ends_stops_the_process_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """Such tasks run for ever: one that raises, or just returns, is logged and makes exit code 1."""

    async def breaks() -> None:
        raise ValueError("broken inside")

    async def forever() -> None:
        await asyncio.sleep(600)

    other = asyncio.create_task(forever())
    assert await until_stopped([other, asyncio.create_task(breaks())]) == 1
    assert "broken inside" in caplog.text
    assert await until_stopped([other, asyncio.create_task(asyncio.sleep(0))]) == 1
    assert not other.done()
    other.cancel()
