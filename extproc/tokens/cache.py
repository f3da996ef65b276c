"""Token ids of texts seen before, in bounded memory."""

import sys
import threading
from collections import OrderedDict

from extproc.tokens.values import Made

_ENTRY_BYTES = 290
"""What an entry takes besides its ids: the array (80), the key (49), what holds both (32), and its place in the
mapping."""
_MEDIUM_BYTES = 120
"""What an image takes besides its identifier: its fields (48), two numbers (56); measured 115."""


class TokenCache:
    """Token ids by the hash of what they were made of; the one used longest ago goes first. Safe in threads.

    Args:
        max_bytes: memory for all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Made] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return self._bytes

    def get(self, key: bytes) -> Made | None:
        """What is under this key."""
        with self._lock:
            made = self._entries.get(key)
            if made is not None:
                self._entries.move_to_end(key)
            return made

    def put(self, key: bytes, made: Made) -> None:
        """Keep ids, which nobody changes from here on. What is larger than a quarter of the cache is not kept."""
        size = _size(made)
        if size > self._max_bytes // 4:
            return
        with self._lock:
            old = self._entries.pop(key, None)
            self._bytes += size - (0 if old is None else _size(old))
            self._entries[key] = made
            while self._bytes > self._max_bytes:
                _, gone = self._entries.popitem(last=False)
                self._bytes -= _size(gone)


def _size(made: Made) -> int:
    media = sum(_MEDIUM_BYTES + sys.getsizeof(each.identifier) for each in made.media)
    return _ENTRY_BYTES + made.ids.itemsize * len(made.ids) + media
