"""What a source file uses of apex."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import ExpressionContext, ExpressionContextProvider, MetadataWrapper

_PROBES = ("find_spec", "version", "import_module", "__import__", "distribution")
_WHOLE = (ExpressionContext.LOAD, ExpressionContext.DEL)  # of `global`, too: others may use it
_MARKS = ("_amp_stash", "_lazy_init_maybe_master_weights", "_amp_state")


@dataclass
class Uses:
    """What local names stand for in apex; the paths in apex that each of them is used for, and
    those of them that are used whole, as values; all names; private attributes that are asked of
    optimizers.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    through: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    values: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    names: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)

    @property
    def paths(self) -> set[str]:
        """Everything in apex that is used or imported."""
        return set().union(self.aliases.values(), *self.through.values())


def scan(module: cst.Module) -> Uses:
    """Look through `module` twice: names first, then what they are used for."""
    uses = Uses()
    module.visit(_Aliases(uses))
    MetadataWrapper(module, unsafe_skip_copy=True).visit(_Paths(uses))
    return uses


def dotted_name(node: cst.CSTNode | None) -> str:
    """`a.b.c` of names and attributes alone; empty for any other expression."""
    if isinstance(node, cst.Name):
        return node.value
    if not isinstance(node, cst.Attribute):
        return ""
    base = dotted_name(node.value)
    return f"{base}.{node.attr.value}" if base else ""


def apex_path(node: cst.BaseExpression, uses: Uses) -> str | None:
    """The dotted path in apex that an expression stands for."""
    name = dotted_name(node)
    first, _, rest = name.partition(".")
    base = uses.aliases.get(first)
    if base is None:
        return None
    return f"{base}.{rest}" if rest else base


def imported_module(node: cst.ImportFrom) -> str:
    """The full name of the module in `from module import ...`; empty for a relative one."""
    return "" if node.relative else dotted_name(node.module)


def is_of_apex(name: str) -> bool:
    """Whether `name` is a module of apex."""
    return name == "apex" or name.startswith("apex.")


def comments_in(node: cst.CSTNode) -> list[str]:
    """The comments within a statement in parentheses, or any other node."""
    comments = _Comments()
    node.visit(comments)
    return comments.found


def asks_for_apex(line: cst.BaseSmallStatement) -> bool:
    """Whether a statement looks for apex, or imports it, by a string."""
    probes = _Probes()
    line.visit(probes)
    return probes.found


class _Aliases(cst.CSTVisitor):
    def __init__(self, uses: Uses) -> None:
        self.uses = uses

    def visit_Import(self, node: cst.Import) -> None:  # noqa: N802 (libcst looks for this name)
        for alias in node.names:
            if is_of_apex(alias.evaluated_name):
                local = alias.evaluated_alias
                first = alias.evaluated_name.partition(".")[0]
                self.uses.aliases[local or first] = alias.evaluated_name if local else first
                if "." in alias.evaluated_name:
                    self.uses.through[local or first].add(alias.evaluated_name)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802 (the same)
        module = imported_module(node)
        if not is_of_apex(module) or isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            path = f"{module}.{alias.evaluated_name}"
            self.uses.aliases[alias.evaluated_alias or alias.evaluated_name] = path


class _Paths(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (ExpressionContextProvider,)

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self.uses = uses

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802 (libcst looks for this name)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802 (the same)
        return False

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (the same)
        keywords = [one.keyword.value for one in node.args if one.keyword is not None]
        if apex_path(node.func, self.uses) == "apex.amp.state_dict" and keywords:
            self.uses.marks.update(keywords)

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802 (the same)
        if node.attr.value in _MARKS:
            self.uses.marks.add(node.attr.value)
        path = apex_path(node, self.uses)
        if path is None:
            node.value.visit(self)
        else:
            self._note(dotted_name(node).partition(".")[0], path)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:  # noqa: N802 (the same)
        node.value.visit(self)  # and not its keyword, which is no use of a name
        return False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802 (the same)
        self.uses.names.add(node.value)
        context = self.get_metadata(ExpressionContextProvider, node, None)
        if node.value in self.uses.aliases and context in _WHOLE:
            self._note(node.value, self.uses.aliases[node.value])

    def _note(self, local: str, path: str) -> None:
        self.uses.through[local].add(path)
        self.uses.values[local].add(path)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:  # noqa: N802 (the same)
        if node.evaluated_value in _MARKS:
            self.uses.marks.add(str(node.evaluated_value))


class _Comments(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_Comment(self, node: cst.Comment) -> None:  # noqa: N802 (the same)
        self.found.append(node.value)


class _Probes(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found = False

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (the same)
        name = dotted_name(node.func).rpartition(".")[2]
        for argument in node.args:
            value = argument.value
            if name in _PROBES and isinstance(value, cst.SimpleString):
                self.found |= is_of_apex(str(value.evaluated_value))
