"""Whether a chat template goes through the parts of a message, or prints its content as one text.

Read from the template's syntax tree by the rule that vLLM goes by (`renderers/hf.py`, `_detect_content_format`, 0.32):
it takes parts when it loops over the content of what it takes from `messages`, by whatever names it calls them.
"""

from collections.abc import Iterator

from jinja2 import nodes


class _OddError(Exception):
    """The template assigns or loops in a way that the rule does not foresee."""


def takes_parts(root: nodes.Template) -> bool:
    """Whether a template takes lists of parts. One that the rule does not understand takes texts."""
    try:
        return any(_loops_over_content(root))
    except _OddError:
        return False


def _loops_over_content(root: nodes.Template) -> Iterator[bool]:
    messages = _message_names(root)
    by_macro = _macro_loops(root, messages)
    for loop in root.find_all(nodes.For):
        over = loop.iter.name if isinstance(loop.iter, nodes.Name) else ""
        given = by_macro.get(id(loop))
        by_name = over == "content" if given is None else over in given
        if by_name or any(_reads(loop.iter, name, "content") for name in messages):
            yield bool(_name(loop.target))


def _message_names(root: nodes.Template) -> list[str]:
    """Names of loop variables that stand for one message."""
    lists = _list_names(root)
    loops = [loop for loop in root.find_all(nodes.For) if any(_reads(loop.iter, name) for name in lists)]
    return [_name(loop.target) for loop in loops]


def _list_names(root: nodes.Template) -> list[str]:
    """`messages`, and every name that it, or a part of it, is assigned to."""
    names = ["messages"]
    for name in names:  # grows as it goes
        for assign in root.find_all(nodes.Assign):
            if _reads(assign.node, name) and (target := _name(assign.target)) not in names:
                names.append(target)
    return names


def _macro_loops(root: nodes.Template, messages: list[str]) -> dict[int, frozenset[str]]:
    """Of each loop inside a macro, the parameters of that macro that are given the content of a message."""
    loops: dict[int, frozenset[str]] = {}
    for macro in root.find_all(nodes.Macro):
        parameters = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in root.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            passed = [*zip(parameters, call.args, strict=False), *((each.key, each.value) for each in call.kwargs)]
            given |= {
                name
                for name, value in passed
                if name in parameters and any(_reads(value, message, "content") for message in messages)
            }
        for loop in macro.find_all(nodes.For):
            if given or id(loop) not in loops:
                loops[id(loop)] = frozenset(given)
    return loops


def _reads(node: nodes.Node | None, name: str, key: str = "") -> bool:
    """Whether an expression is a variable, or its field `key`, perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if not key:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reads(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads(node.node, name)


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _OddError
    return target.name
