"""What the children of a stack printed, kept for the report of a test that fails."""

from collections import defaultdict, deque
from collections.abc import Iterator

_KEPT = 400
_SHOWN = 15


class Journal:
    """The last lines of every child. `write` is a sink as `extproc.processes.Child` takes one."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def write(self, name: str, line: str) -> None:
        """Keep one line of the child `name`."""
        self._lines[name].append(line)

    def containing(self, words: str) -> Iterator[str]:
        """Kept lines of all children that contain `words`."""
        return (line for lines in self._lines.values() for line in lines if words in line)

    def tail(self) -> str:
        """The last lines of every child, for people."""
        return "\n".join(f"{name} | {line}" for name, lines in self._lines.items() for line in list(lines)[-_SHOWN:])
