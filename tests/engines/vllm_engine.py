"""One real vLLM CPU engine as a child process of the tests."""

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# The test suite's own number: the smallest block that vLLM accepts on a CPU.
BLOCK_SIZE = 32
# 16,384 tokens of KV cache, two full contexts, in 128 MiB: memory for two engines beside a whole test run.
CACHE_BLOCKS = 512
MAX_MODEL_LEN = 8192
# Requests that run at once; the others wait.
MAX_RUNNING = 16
# As `model.py` makes them.
ADAPTERS = ("lora-a", "lora-b")

# Two engines at once were healthy after 95 s on two idle cores; the rest is for busy ones.
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
TRACKER_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 6000


class VllmEngine:
    """A vLLM API server with its core and worker process, in a process group of their own.

    Attributes:
        address: `127.0.0.1:PORT`, the same after a restart.
    """

    def __init__(
        self,
        python: Path,
        model_dir: Path,
        model_name: str,
        port: int,
        core: int,
        run_dir: Path,
        options: Sequence[str] = (),
    ) -> None:
        """Describe an engine; `start` runs it.

        Args:
            python: Interpreter of the environment that holds vLLM.
            model_dir: Model directory to serve.
            model_name: Name it answers to.
            port: Free TCP port on 127.0.0.1.
            core: Processor core its worker computes on.
            run_dir: Empty directory for its log, caches and sockets.
            options: Further options of `vllm serve`.
        """
        self.address = f"127.0.0.1:{port}"
        self._port = port
        self._run_dir = run_dir
        self._log = run_dir / "engine.log"
        self._process: subprocess.Popen[bytes] | None = None
        # Port 0 of the host's own address, which is `VLLM_HOST_IP`: `/kv_event_sources` tells what came of it.
        publishing = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:0",
            "replay_endpoint": "tcp://*:0",
        }
        self._command = [
            *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
            *("--served-model-name", model_name, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(MAX_RUNNING)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(publishing)),
            *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-cpu-loras", "4"),
            *("--lora-modules", *(f"{name}={model_dir / 'adapters' / name}" for name in ADAPTERS)),
            *options,
        ]
        self._environment = {
            **os.environ,
            # Its caches and inter-process sockets go away with the run, and no setting of the user's home enters it.
            "HOME": str(run_dir),
            "TMPDIR": str(run_dir),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "OMP_NUM_THREADS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            # Without it vLLM forgets every response at once, and a follow-up that names one gets 404.
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            "PYTHONHASHSEED": "0",
        }

    @property
    def pid(self) -> int:
        """Process id of the API server, which leads the engine's process group.

        Raises:
            RuntimeError: The engine was never started.
        """
        if self._process is None:
            raise RuntimeError(f"engine {self.address} was never started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the API server's process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the processes and return at once; `wait_ready` waits for the first healthy answer."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._run_dir,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until `/health` answers 200.

        Raises:
            RuntimeError: The engine ended, or was not healthy after `START_TIMEOUT_S`; carries the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._healthy():
            if not self.alive:
                raise RuntimeError(f"engine {self.address} ended while starting; its log ends:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"engine {self.address} not healthy after {START_TIMEOUT_S:.0f} s; its log ends:\n{self.log_tail()}"
                )
            time.sleep(0.25)

    def kill(self) -> None:
        """End the engine's processes with SIGKILL, as a crash of its machine would, and wait for their end.

        Only multiprocessing's resource trackers live on for a moment: they see their clients gone, unlink the shared
        memory that these left in /dev/shm, and end by themselves.
        """
        if self._process is None:
            return
        group = self._process.pid
        deadline = time.monotonic() + TRACKER_TIMEOUT_S
        while (members := _members(group)) and time.monotonic() < deadline:
            for pid, command in members.items():
                if b"resource_tracker" not in command:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        _signal_group(group, signal.SIGKILL)
        self._process.wait()

    def kill_core(self) -> None:
        """End what computes with SIGKILL; the API server lives on for a moment."""
        for pid, command in _members(self.pid).items():
            if b"EngineCore" in command or b"Worker" in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask the engine to end, then end whatever is left of its process group."""
        if self._process is None:
            return
        if self.alive:
            _signal_group(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # the kill below does not ask
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def log_tail(self) -> str:
        """The last few thousand bytes of what the engine printed."""
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def revive(fleet: list[VllmEngine]) -> None:
    """Start those that do not run, all at once, and wait for them."""
    ended = [engine for engine in fleet if not engine.alive]
    for engine in ended:
        engine.start()
    for engine in ended:
        engine.wait_ready()


def _members(group: int) -> dict[int, bytes]:
    """The living processes of a process group: command line by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has ended since it was listed
            state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found[int(process.name)] = (process / "cmdline").read_bytes()
    return found


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # every process of the group has ended already
        os.killpg(group, number)
