"""The LoRA adapters an engine serves, and how vLLM and SGLang take them in and let them go."""

from dataclasses import dataclass

from extproc.sim.refusals import Refusal

MISSING = "/nonexistent"
"""A path that begins so leads nowhere; any other path holds an adapter."""
REFUSED = "/refused"
"""An adapter whose path begins so is turned down by the engine, as one of too high a rank is."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter.

    Attributes:
        name: as requests ask for it.
        id: number the engine knows it by, from 1.
        path: where it was loaded from.
    """

    name: str
    id: int
    path: str

    @property
    def namespace(self) -> str:
        """What parts its blocks from those of others. Loaded again from the same place it finds its old ones."""
        return f"{self.name}\0{self.path}"


class Adapters:
    """What is loaded, in order of loading. A restart begins with the static ones again."""

    def __init__(self, base: str, names: tuple[str, ...]) -> None:
        self._base = base
        self._last_id = 0
        self.by_name: dict[str, Adapter] = {}
        for name in names:
            self._add(name, f"/adapters/{name}")

    def load(self, name: str, path: str, *, in_place: bool = False) -> Adapter:
        """Take in an adapter as vLLM does.

        Raises:
            Refusal: 400, 404 or 500 in vLLM's words.
        """
        if not name or not path:
            raise Refusal(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name == self._base:
            raise Refusal(400, "InvalidUserInput", f"The lora adapter '{name}' has the name of the base model.")
        if name in self.by_name and not in_place:
            text = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            raise Refusal(400, "InvalidUserInput", text)
        if path.startswith(MISSING):
            raise Refusal(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
        if path.startswith(REFUSED):
            text = "Call to add_lora method failed: LoRA rank 64 is greater than max_lora_rank 8."
            raise Refusal(500, "InternalServerError", text)
        return self._add(name, path)

    def unload(self, name: str) -> None:
        """Let go of an adapter as vLLM does.

        Raises:
            Refusal: 400 or 404 in vLLM's words.
        """
        if not name:
            raise Refusal(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
        if self.by_name.pop(name, None) is None:
            raise Refusal(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")

    def _add(self, name: str, path: str) -> Adapter:
        self._last_id += 1
        adapter = self.by_name[name] = Adapter(name, self._last_id, path)
        return adapter
