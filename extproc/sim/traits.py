"""What tells an engine from its like, as a new version of a model may: its speed, its failures, what it says."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Literal

import msgspec
import xxhash

Mode = Literal["status", "reset", "stream", "cut", "end", "empty"]
"""How a generation request fails; see `control.FailBody`."""
_HASHES: Final = float(1 << 64)
_STATUSES: Final = frozenset(status.value for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST)


class Traits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine is, from its start on or from `POST /sim/traits` on. The defaults are an engine without any.

    Shares are of generation requests, 0 to 1, each request drawn anew; those of one engine may not exceed 1 together.

    Attributes:
        prefill_factor: how many times longer the arithmetic of a step takes, which is what prefill waits for. Decodes
            beside a chunk of a prompt wait for it too.
        decode_factor: how many times longer reading the weights takes, which is what decoding waits for.
        fail_share: share that `fail_status` is answered to.
        fail_status: that status.
        reset_share: share whose connection is reset without an answer.
        cut_share: share of streams that are reset after `after_tokens` tokens.
        end_share: share of streams that end there as if they were whole, without a reason and `[DONE]`.
        empty_share: share whose answer ends with its first token and says nothing, as when a model ends at once.
        after_tokens: tokens of a stream before it is cut or ends.
        length_factor: how many times longer answers are that end by themselves.
        length_spread: by what share these are longer or shorter at most, as their prompt wants it.
        text_seed: engines of different seeds say different things.
    """

    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    fail_share: float = 0.0
    fail_status: int = 500
    reset_share: float = 0.0
    cut_share: float = 0.0
    end_share: float = 0.0
    empty_share: float = 0.0
    after_tokens: int = 4
    length_factor: float = 1.0
    length_spread: float = 0.0
    text_seed: int = 0

    @property
    def shares(self) -> tuple[tuple[Mode, float], ...]:
        """The share of each kind of failure."""
        return (
            ("status", self.fail_share),
            ("reset", self.reset_share),
            ("cut", self.cut_share),
            ("end", self.end_share),
            ("empty", self.empty_share),
        )

    def check(self) -> None:
        """Refuse what no engine can be.

        Raises:
            ValueError: naming the trait.
        """
        for name in ("prefill_factor", "decode_factor", "length_factor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        for mode, share in self.shares:
            if not 0 <= share <= 1:
                raise ValueError(f"a share must be from 0 to 1, got {share} for {mode}")
        if sum(share for _, share in self.shares) > 1:
            raise ValueError("the shares of requests that fail exceed 1 together; lower some")
        if not 0 <= self.length_spread < 1:
            raise ValueError(f"length_spread must be from 0 to less than 1, got {self.length_spread}")
        if self.fail_status not in _STATUSES:
            raise ValueError(f"fail_status must be a status from 400 on, as 500, got {self.fail_status}")
        if self.after_tokens < 1:
            raise ValueError(f"after_tokens must be at least 1, got {self.after_tokens}")

    def failing(self, draw: Callable[[], float]) -> Mode | None:
        """How the request at hand fails; None if it does not. `draw` gives a number of [0, 1)."""
        drawn = draw()
        for mode, share in self.shares:
            if drawn < share:
                return mode
            drawn -= share
        return None

    def natural_tokens(self, tokens: int, prompt: bytes) -> int:
        """Where an answer to `prompt` ends by itself that would have `tokens` tokens of an engine without traits."""
        place = 2.0 * xxhash.xxh3_64_intdigest(prompt) / _HASHES - 1.0 if self.length_spread else 0.0
        return max(1, round(tokens * self.length_factor * (1.0 + self.length_spread * place)))
