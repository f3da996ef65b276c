"""What beside tokens and adapter makes a block what it is, as bytes for `state.exact_blocks.chain`.

The keeper writes them for the blocks that an engine stored, workers for those that a request asks for; only where both
are made here do they match.
"""


def named(name: str) -> bytes:
    """What a name adds to a block: a `cache_salt` to a prompt's first block, an image or another medium to its own.

    Salts and media are not told apart, since vLLM 0.17 to 0.21 name both by bare texts. They do not meet: the tokens of
    a medium are in no prompt without one.

    Where in its block a medium begins is left out: those versions do not tell it, and tokens and names do, since a
    medium takes as many tokens wherever it stands.
    """
    told = name.encode("utf-8", "surrogatepass")
    return b"name\0%d\0" % len(told) + told


def medium(identifier: str, adapter: str) -> bytes:
    """What an image, or another medium, adds to each block that it has tokens in.

    Args:
        identifier: the engine's hash of it, or the `uuid` that the request gave it.
        adapter: LoRA adapter of the prompt; empty for none. With `--enable-tower-connector-lora` vLLM puts its name and
            a colon in front of the identifier, which a request cannot know; the adapter seeds the chain anyway.
    """
    return named(identifier.removeprefix(f"{adapter}:") if adapter else identifier)
