"""How an engine's KV cache is laid out, learnt from its events: which of several groups counts, and the block size."""

_FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Groups whose blocks cover whole prompts (`KVCacheSpecKind` in `vllm/v1/kv_cache_interface.py`)."""
_UNTOLD = frozenset({"", "unknown"})


class Layout:
    """What the batches of one engine have told so far; a new life of the engine needs a new one.

    Hybrid models keep several groups of layers and tell of the blocks of each. Only one may count: a prefix is reused
    as far as attention over whole prompts has it, and a block counted twice would be forgotten by the first removal.

    Attributes:
        block_tokens: tokens in one full block on the GPU; 0 before any was told.
        group: number of the group that counts; None before any was told, and for models of one group.
    """

    def __init__(self) -> None:
        self.block_tokens = 0
        self.group: int | None = None
        self._kept: tuple[int, int] | None = None

    def learn_group(self, group: int | None, kind: str | None) -> None:
        """Note that blocks of a group were stored; None is a model that has but one.

        Full attention counts before groups of unknown kind, these before windows and states, the first among equals.
        """
        if group is None:
            return
        rank = 0 if kind in _FULL else 1 if (kind or "") in _UNTOLD else 2
        self._prefer((rank, group))

    def learn_window(self, tokens: int, group: int) -> None:
        """Note a group by its attention window, in tokens, where engines tell that: the largest counts."""
        self._prefer((-tokens, group))

    def keeps_group(self, group: int | None) -> bool:
        """Whether the blocks of a group count."""
        return group == self.group or group is None or self.group is None

    def keeps_window(self, tokens: int, group: int) -> bool:
        """Whether the blocks of a window count."""
        return self._kept is None or self._kept == (-tokens, group)

    def learn_block(self, tokens: int) -> None:
        """Note the size of a block stored on the GPU: the largest is full, smaller ones end a prompt."""
        self.block_tokens = max(self.block_tokens, tokens)

    def is_full(self, tokens: int) -> bool:
        """Whether a block of this size fits a chain of the GPU's blocks; other tiers may cache in larger chunks."""
        return tokens == self.block_tokens or not self.block_tokens

    def _prefer(self, candidate: tuple[int, int]) -> None:
        if self._kept is None or candidate < self._kept:
            self._kept = candidate
            self.group = candidate[1]
            self.block_tokens = 0
