"""Which engine, of which version, a simulator passes for: what changed on the wire from one to the next."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["vllm", "trtllm", "sglang"]

DEFAULT = "vllm-0.33"


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine and version.

    Attributes:
        name: as `--profile` takes it.
        engine: whose surface it is.
        version: what the engine says of itself.
        minor: second number of vLLM's version; 0 for the others.
    """

    name: str
    engine: Kind
    version: str
    minor: int = 0

    @property
    def event_maps(self) -> bool:
        """Whether events are maps: vLLM since 0.24, SGLang since 0.5.20. Before, they were arrays."""
        return self.engine == "sglang" or self.minor >= 24

    @property
    def replay_topic(self) -> bool:
        """Whether a replayed batch has the topic's frame: vLLM since 0.26; SGLang's has not."""
        return self.minor >= 26

    @property
    def constant_seed(self) -> bool:
        """Whether block hashes are the same after a restart: vLLM's since 0.29, where nothing sets their seed."""
        return self.engine != "vllm" or self.minor >= 29

    @property
    def names_media(self) -> bool:
        """Whether all media have the same tokens and are named beside them; SGLang makes tokens of their hashes.

        TensorRT-LLM names them too, in a way that is not played here.
        """
        return self.engine == "vllm"

    @property
    def media_places(self) -> bool:
        """Whether vLLM tells where in a block a medium begins: since 0.22. Before, its name alone."""
        return self.minor >= 22

    @property
    def tagged_extras(self) -> bool:
        """Whether vLLM tells apart by name what enters a block's hash beside tokens: since 0.31."""
        return self.minor >= 31

    @property
    def old_names(self) -> bool:
        """Whether vLLM's page still has the names that 0.12 and 0.15 dropped."""
        return 0 < self.minor < 12

    @property
    def event_sources(self) -> bool:
        """Whether `GET /kv_event_sources` exists: vLLM since 0.31."""
        return self.minor >= 31

    @property
    def render(self) -> Literal["absent", "open", "switched"]:
        """Whether vLLM renders prompts: from 0.17 on, and since 0.30 only under `--enable-scale-out`."""
        if self.minor < 17:
            return "absent"
        return "open" if self.minor < 30 else "switched"

    @property
    def admission_limit(self) -> bool:
        """Whether a queue can be full: vLLM since 0.29, and SGLang. TensorRT-LLM takes whatever comes."""
        return self.engine == "sglang" or self.minor >= 29

    @property
    def admin_json(self) -> bool:
        """Whether vLLM's orders, such as `/sleep`, are answered with JSON: since 0.32. Before, with an empty body."""
        return self.minor >= 32


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("vllm-0.11", "vllm", "0.11.2", 11),
        Profile("vllm-0.23", "vllm", "0.23.0", 23),
        Profile(DEFAULT, "vllm", "0.33.0", 33),
        Profile("trtllm", "trtllm", "1.4.0rc4"),
        Profile("sglang", "sglang", "0.5.23"),
    )
}
"""Every profile by its name."""
