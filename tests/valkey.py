"""A real Valkey for tests: started on a free loopback port, stopped, killed, frozen and thawed at will."""

from tests.servers import Server, valkey9


class Valkey(Server):
    """One server process without persistence; use it as a context manager.

    Args:
        port: where to listen; a free one by default, kept over restarts.
        arguments: further command line arguments of `valkey-server`.
    """

    def __init__(self, port: int = 0, *arguments: str) -> None:
        super().__init__(valkey9(), port, arguments)
