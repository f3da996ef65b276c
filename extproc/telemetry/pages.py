"""Several processes' metrics pages as one page, each sample labelled with the process it came from."""

from collections.abc import Mapping

import msgspec

_SUFFIXES = (b"_bucket", b"_sum", b"_count", b"_total", b"_created")


class _Family(msgspec.Struct):
    """One metric family of the merged page: its HELP and TYPE lines, then samples of all processes."""

    help: bytes = b""
    type: bytes = b""
    samples: list[bytes] = msgspec.field(default_factory=list)


def merge(pages: Mapping[str, bytes]) -> bytes:
    """Merge text pages (format 0.0.4) that `Metrics.page` wrote.

    Args:
        pages: page by process name; the name becomes the label `process` of each of its samples. Only whole lines
            count: a page cut short by a dying process loses its last line.

    Returns:
        A page on which each family stands once, with the HELP and TYPE of the first process that has it.
    """
    families: dict[bytes, _Family] = {}
    for process, page in pages.items():
        label = b'process="' + _escaped(process) + b'"'
        current = b""
        for line in page.split(b"\n")[:-1]:
            if line.startswith((b"# HELP ", b"# TYPE ")):
                current = line.split(b" ", 3)[2]
                family = families.setdefault(current, _Family())
                if line.startswith(b"# HELP "):
                    family.help = family.help or line
                else:
                    family.type = family.type or line
            elif line and not line.startswith(b"#"):
                name = line.partition(b"{")[0].partition(b" ")[0]
                if not _belongs(name, current):
                    current = name
                families.setdefault(current, _Family()).samples.append(_labelled(line, name, label))
    lines = [
        line
        for family in families.values()
        if family.samples
        for line in (family.help, family.type, *family.samples)
        if line
    ]
    return b"\n".join(lines) + b"\n" if lines else b""


def _belongs(name: bytes, family: bytes) -> bool:
    return name == family or (name.startswith(family) and name[len(family) :] in _SUFFIXES)


def _labelled(line: bytes, name: bytes, label: bytes) -> bytes:
    rest = line[len(name) :]
    if rest.startswith(b"{}"):
        return name + b"{" + label + rest[1:]
    if rest.startswith(b"{"):
        return name + b"{" + label + b"," + rest[1:]
    return name + b"{" + label + b"}" + rest


def _escaped(value: str) -> bytes:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"").encode()
