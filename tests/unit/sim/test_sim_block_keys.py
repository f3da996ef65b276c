"""Names of blocks: each engine's chained hash, against values computed elsewhere."""

import hashlib

import pytest

from extproc.sim.adapters import Adapter
from extproc.sim.block_keys import Key, Wire, keys_of
from extproc.sim.profiles import PROFILES
from extproc.sim.sequence import Content
from extproc.sim.tokens import from_ids

PLAIN = Content(b"")
RANDOM = b"r" * 32
SQL = Adapter("sql-lora", 7, "/adapters/sql")


def chained(name: str, blocks: list[range], content: Content = PLAIN, entropy: bytes = RANDOM) -> list[Wire]:
    """Names of blocks of tokens that follow each other."""
    keys = keys_of(PROFILES[name], entropy)
    parent: Key | None = None
    names: list[Wire] = []
    for block in blocks:
        parent = keys.key(parent, from_ids(block), content)
        names.append(keys.wire(parent, content))
    return names


def test_vllm_names_blocks_as_its_sha256_does() -> None:
    """Two blocks of 16 tokens under the constant seed of vLLM 0.29 and later."""
    assert chained("vllm-0.33", [range(1, 17), range(17, 33)]) == [1403909460543360175, 1643945449041937783]


def test_hashes_of_bytes_end_in_those_of_64_bits() -> None:
    """Without int hashes vLLM sends the whole digest, of which the number is the last 8 bytes."""
    keys = keys_of(PROFILES["vllm-0.33"], RANDOM, int_hashes=False)
    name = keys.wire(keys.key(None, from_ids(range(1, 17)), PLAIN), PLAIN)
    assert isinstance(name, bytes)
    assert len(name) == 32
    assert int.from_bytes(name[-8:], "big") == 1403909460543360175


@pytest.mark.parametrize(("name", "changes"), [("vllm-0.11", True), ("vllm-0.23", True), ("vllm-0.33", False)])
def test_hashes_of_old_versions_differ_from_start_to_start(name: str, changes: bool) -> None:
    """Up to 0.28 the chain begins with random bytes."""
    block = [range(1, 17)]
    assert (chained(name, block, entropy=b"a" * 32) != chained(name, block, entropy=b"b" * 32)) == changes


def test_tensorrt_llm_names_blocks_exactly() -> None:
    """`v1_block_key`: chained, of a partial block, with a LoRA id, with a salt in the first block only."""
    first, second = range(1, 33), range(33, 65)
    assert chained("trtllm", [first, second]) == [17831341519058834317, 11197498242826443880]
    assert chained("trtllm", [range(1, 4)]) == [14332563581206]
    assert chained("trtllm", [first], Content(b"", SQL)) == [15744835200463573885]
    salted = Content(b"", salt="tenant-a")
    assert chained("trtllm", [first], salted) == [9967532097703111829]
    after = keys_of(PROFILES["trtllm"], RANDOM).key(9967532097703111829, from_ids(second), PLAIN)
    assert chained("trtllm", [first, second], salted)[1] == after


def test_sglang_names_blocks_by_the_head_of_its_digests() -> None:
    """SHA-256 over the digest before and tokens of 4 bytes; the first 8 bytes as a signed number."""
    first = hashlib.sha256(b"".join(n.to_bytes(4, "little") for n in range(16))).digest()
    second = hashlib.sha256(first + b"".join(n.to_bytes(4, "little") for n in range(16, 32))).digest()
    wanted = [int.from_bytes(digest[:8], "big", signed=True) for digest in (first, second)]
    assert chained("sglang", [range(16), range(16, 32)]) == wanted


def test_sglang_has_negative_names() -> None:
    """Signed numbers must be read as such."""
    assert any(name < 0 for name in chained("sglang", [range(n, n + 16) for n in range(20)]) if isinstance(name, int))


@pytest.mark.parametrize("name", PROFILES)
def test_adapter_and_salt_part_blocks_of_equal_tokens(name: str) -> None:
    """Four namespaces, four names, in every profile; the same arguments give the same name again."""
    contents = [PLAIN, Content(b"", SQL), Content(b"", salt="a"), Content(b"", SQL, "a")]
    names = [chained(name, [range(16)], content)[0] for content in contents]
    assert len(set(names)) == 4
    assert names == [chained(name, [range(16)], content)[0] for content in contents]
