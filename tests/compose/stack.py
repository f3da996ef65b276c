"""The compose stack as a test handles it: up, down, and what can be done to one service while it runs."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
COMMAND_LIMIT_S = 900.0


class StackError(Exception):
    """Docker refused a command, or a service did not become healthy; the text carries what it said."""


def compose_command() -> list[str]:
    """The Compose of this machine: the plug-in where there is one, else the older separate command.

    Raises:
        StackError: there is neither.
    """
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise StackError("neither `docker compose` nor `docker-compose` answers: run docker/engine.sh start")


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """Run a command in the repository root and return its standard output.

    Raises:
        StackError: it failed; the text ends with its output.
    """
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )
    if result.returncode != 0:
        said = (result.stdout + result.stderr)[-4000:]
        raise StackError(f"{' '.join(command)}: exit status {result.returncode}\n{said}")
    return result.stdout


class Stack:
    """One project of `compose.yaml`, apart from any other by its project name and published port.

    Attributes:
        url: where Envoy's public listener is published.
    """

    def __init__(self, project: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._project = project
        self._compose = [*compose_command(), "--project-name", project]
        self._env = {"WARMPATH_PORT": str(port)}

    def compose(self, *arguments: str) -> str:
        """Run one Compose command on this project and return its output."""
        return run(*self._compose, *arguments, env=self._env)

    def up(self) -> None:
        """Build the image, start everything and wait until every service is healthy."""
        self.compose("build", "sidecar-1")
        self.compose("up", "--detach")
        for service in self.services():
            self.wait_healthy(service)

    def down(self) -> None:
        """Remove containers, networks and volumes; the image stays."""
        self.compose("down", "--volumes", "--timeout", "5")

    def services(self) -> list[str]:
        """Names of the services that this project runs, sorted."""
        return sorted(self._ps("--format", '{{.Label "com.docker.compose.service"}}'))

    def container(self, service: str) -> str:
        """Id of the service's container, running or not.

        Raises:
            StackError: it has none.
        """
        found = self._ps("--all", "--quiet", "--filter", f"label=com.docker.compose.service={service}")
        if not found:
            raise StackError(f"project {self._project} has no container of {service}")
        return found[0]

    def _ps(self, *options: str) -> list[str]:
        # Docker itself: the older Compose takes two seconds to start, and both write the same labels.
        return run("docker", "ps", "--filter", f"label=com.docker.compose.project={self._project}", *options).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """What Docker knows about a container."""
        described: list[dict[str, Any]] = json.loads(run("docker", "inspect", container))
        return described[0]

    def docker(self, verb: str, service: str) -> None:
        """`docker stop`, `docker kill` or `docker start` on the service's container."""
        run("docker", verb, self.container(service))

    def wait_healthy(self, service: str) -> None:
        """Return when the service's own health check has passed.

        Raises:
            StackError: not within the limit; the text ends with the service's log.
        """
        container = self.container(service)
        give_up = time.monotonic() + START_LIMIT_S
        while (state := self.inspect(container)["State"])["Health"]["Status"] != "healthy":
            if time.monotonic() > give_up or state["Status"] == "exited":
                log = self.compose("logs", "--no-color", "--tail=60", service)
                raise StackError(f"{service} is {state['Status']}, {state['Health']['Status']}\n{log}")
            time.sleep(0.5)
