"""Token ids of texts seen before, in bounded memory."""

import threading
from array import array
from collections import OrderedDict

_ENTRY_BYTES = 260
"""What an entry takes besides its ids: the array (80), the key (49), and its place in the mapping; measured 255."""


class TokenCache:
    """Token ids by the hash of what they were made of; the one used longest ago goes first. Safe in threads.

    Args:
        max_bytes: memory for all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return self._bytes

    def get(self, key: bytes) -> "array[int] | None":
        """The ids under this key; not to be changed."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: bytes, ids: "array[int]") -> None:
        """Keep ids, which nobody changes from here on. What is larger than a quarter of the cache is not kept."""
        size = _size(ids)
        if size > self._max_bytes // 4:
            return
        with self._lock:
            old = self._entries.pop(key, None)
            self._bytes += size - (0 if old is None else _size(old))
            self._entries[key] = ids
            while self._bytes > self._max_bytes:
                _, gone = self._entries.popitem(last=False)
                self._bytes -= _size(gone)


def _size(ids: "array[int]") -> int:
    return _ENTRY_BYTES + ids.itemsize * len(ids)
