"""Rewrite the source of a script that imports apex. Formatting stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import libcst as cst

from amp_patch.compat.replacements import REPLACEMENTS, missing_name
from amp_patch.compat.source_scan import (
    Uses,
    apex_path,
    asks_for_apex,
    comments_in,
    dotted_name,
    imported_module,
    is_of_apex,
    scan,
)
from amp_patch.compat.targets import (
    AMP,
    Target,
    find_target,
    is_module,
    longest_known,
    missing_in_the_face,
    needs_the_face,
    star_names,
)

_MARK = "# amp_patch migrate: "
_USED_WHOLE = (
    "{} itself is used as a value, and no one module stands in its place; name what the script "
    "takes from it, or call amp_patch.install_as_apex() above this line"
)
_PROBED = "asks for apex by a string; ask for amp_patch, or for nothing"


class Migrated(NamedTuple):
    """The new source, and the comments that were left in it."""

    source: str
    remarks: list[str]
    encoding: str


class _Change(NamedTuple):
    """New sources for a statement, None where it stays, and the comments for it."""

    sources: list[str] | None
    remarks: list[str]


def migrate_source(source: str | bytes) -> Migrated:
    """`source` with its imports of apex rewritten to amp_patch and torch.

    What is not known stays as it is, below a comment that says why. Raises
    `libcst.ParserSyntaxError` for what is no Python of today.

        >>> print(migrate_source("from apex import amp\\n").source, end="")
        import amp_patch as amp
    """
    module = cst.parse_module(source)
    uses = scan(module)
    rewriter = _Rewriter(uses, comments_in(module.with_changes(body=())))
    migrated = module.visit(rewriter)
    return Migrated(migrated.code, rewriter.remarks, module.encoding)


class _Rewriter(cst.CSTTransformer):
    def __init__(self, uses: Uses, header: Iterable[str]) -> None:
        self.remarks: list[str] = []
        self._header = frozenset(header)  # comments above the first statement
        self._uses = uses
        self._why_not_plain = sorted({*needs_the_face(uses.paths), *uses.marks})
        self._is_plain = not self._why_not_plain
        self._depth = 0
        self._imported: set[str] = set()  # lines at the top of the module

    # -- expressions -----------------------------------------------------------------------------

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802 (libcst looks for this name)
        return apex_path(node, self._uses) is None

    def leave_Attribute(  # noqa: N802 (the same)
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """`apex.parallel.LARC` becomes `amp_patch.compat.larc.LARC`; `amp.initialize` stays."""
        path = apex_path(original_node, self._uses)
        local = dotted_name(original_node).partition(".")[0]
        base = self._uses.aliases.get(local, "")
        if path is None or find_target(base, is_plain=self._is_plain):
            return updated_node  # the import binds the name to what it stands for
        found = longest_known(path, is_plain=self._is_plain)
        if found is None or not self._can_go(local):
            return updated_node
        target, rest = found
        return cst.parse_expression(f"{target.dotted}.{rest}" if rest else target.dotted)

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:  # noqa: N802 (the same)
        self._depth += 1

    def leave_IndentedBlock(  # noqa: N802 (the same)
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.BaseSuite:
        self._depth -= 1
        return updated_node

    # -- statements ------------------------------------------------------------------------------

    def leave_SimpleStatementLine(  # noqa: N802 (the same)
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        changes = self._changes(original_node.body)
        if not changes:
            return updated_node
        remarks = [text for change in changes.values() for text in change.remarks]
        self.remarks += remarks
        present = {one.comment.value for one in updated_node.leading_lines if one.comment}
        comments = [f"{_MARK}{text}" for text in remarks]
        comments = [text for text in comments if text not in present | self._header]
        for position, change in changes.items():
            if change.sources is not None:
                comments += comments_in(original_node.body[position])
        lines = [cst.EmptyLine(comment=cst.Comment(text)) for text in comments]
        leading = [*updated_node.leading_lines, *lines]
        if all(change.sources is None for change in changes.values()):
            return updated_node.with_changes(leading_lines=leading)
        sources = self._sources(updated_node.body, changes)
        if not sources and not self._depth and not leading:
            return cst.RemoveFromParent()
        return _lines_of(sources or ["pass"], leading, updated_node.trailing_whitespace)

    def leave_SimpleStatementSuite(  # noqa: N802 (the same)
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.BaseSuite:
        """`else: from apex import amp`: the statements stay on their line."""
        changes = self._changes(original_node.body)
        if not changes:
            return updated_node
        self._depth += 1
        sources = self._sources(updated_node.body, changes) or ["pass"]
        self._depth -= 1
        remarks = [text for change in changes.values() for text in change.remarks]
        self.remarks += remarks
        line = cst.ensure_type(cst.parse_statement("; ".join(sources)), cst.SimpleStatementLine)
        trailing = updated_node.trailing_whitespace
        if remarks and trailing.comment is None:
            trailing = trailing.with_changes(
                whitespace=cst.SimpleWhitespace("  "),
                comment=cst.Comment(_MARK + "; ".join(remarks)),
            )
        return updated_node.with_changes(body=line.body, trailing_whitespace=trailing)

    def _changes(self, statements: Sequence[cst.BaseSmallStatement]) -> dict[int, _Change]:
        """What becomes of the statements of a line, by position; those that stay are left out."""
        found = {i: self._change(statement) for i, statement in enumerate(statements)}
        return {i: change for i, change in found.items() if change is not None}

    def _change(self, statement: cst.BaseSmallStatement) -> _Change | None:
        if isinstance(statement, cst.Import):
            names = [alias.evaluated_name for alias in statement.names]
            if any(map(is_of_apex, names)):
                return _Change(*self._of_import(statement))
            missing = [missing_name(one) for one in names if one in REPLACEMENTS]
            return _Change(None, missing) if missing else None
        if isinstance(statement, cst.ImportFrom):
            module = imported_module(statement)
            if is_of_apex(module):
                return _Change(*self._of_import_from(statement))
            return _Change(None, [missing_name(module)]) if module in REPLACEMENTS else None
        if asks_for_apex(statement):
            return _Change(None, [_PROBED])
        return None

    def _sources(
        self, statements: Sequence[cst.BaseSmallStatement], changes: dict[int, _Change]
    ) -> list[str]:
        """The statements of a line as they are to be. What is imported twice goes."""
        found: list[str] = []
        for position, statement in enumerate(statements):
            change = changes.get(position)
            if change is None or change.sources is None:
                found.append(_source_of(statement))
            elif self._depth:
                found += change.sources
            else:
                found += [one for one in change.sources if one not in self._imported]
                self._imported.update(change.sources)
        return found

    def _of_import(self, statement: cst.Import) -> tuple[list[str] | None, list[str]]:
        lines: list[str] = []
        remarks: list[str] = []
        for alias in statement.names:
            name, local = alias.evaluated_name, alias.evaluated_alias
            if not is_of_apex(name):
                lines.append(f"import {name} as {local}" if local else f"import {name}")
            elif not self._can_go(local or name.partition(".")[0]):
                return None, self._unknown(local or "apex")
            elif local and find_target(name, is_plain=self._is_plain):
                lines += self._bound([(name, local)], remarks)
            else:
                lines += self._modules_behind(local or "apex")
        return lines, remarks

    def _of_import_from(self, statement: cst.ImportFrom) -> tuple[list[str] | None, list[str]]:
        module = imported_module(statement)
        if isinstance(statement.names, cst.ImportStar):
            names = star_names(module, self._uses.names - self._uses.aliases.keys())
            return self._bound([(f"{module}.{name}", name) for name in names], []), []
        remarks: list[str] = []
        bound: list[tuple[str, str]] = []
        lines: list[str] = []
        for alias in statement.names:
            path = f"{module}.{alias.evaluated_name}"
            local = alias.evaluated_alias or alias.evaluated_name
            if find_target(path, is_plain=self._is_plain):
                bound.append((path, local))
            elif is_module(path) and self._can_go(local):
                lines += self._modules_behind(local)
            else:
                remarks += self._unknown(local) if is_module(path) else [missing_name(path)]
                suffix = f" as {local}" if local != alias.evaluated_name else ""
                lines.append(f"from {module} import {alias.evaluated_name}{suffix}")
        return [*self._bound(bound, remarks), *lines], remarks

    def _bound(self, names: Sequence[tuple[str, str]], remarks: list[str]) -> list[str]:
        """Import lines that bind local names to what paths in apex are now."""
        lines = []
        from_module: dict[str, list[str]] = {}
        for path, local in names:
            target = find_target(path, is_plain=self._is_plain)
            if target is None:
                continue
            if path == AMP:
                remarks += missing_in_the_face(self._uses.through[local])
            if path == AMP and not self._is_plain:
                remarks.append(
                    f"the script uses {', '.join(self._why_not_plain)}, for which the face of apex "
                    "is kept"
                )
            if target.name:
                suffix = "" if target.name == local else f" as {local}"
                from_module.setdefault(target.module, []).append(f"{target.name}{suffix}")
            else:
                suffix = "" if target.module == local else f" as {local}"
                lines.append(f"import {target.module}{suffix}")
        return lines + [f"from {one} import {', '.join(own)}" for one, own in from_module.items()]

    def _modules_behind(self, local: str) -> list[str]:
        """Import lines for the dotted paths that begin with the module `local`."""
        found = {
            target.module
            for path in self._uses.through[local]
            for target, _ in [longest_known(path, is_plain=self._is_plain) or (Target(""), "")]
            if target.module
        }
        return [f"import {module}" for module in sorted(found)]

    def _can_go(self, local: str) -> bool:
        """Whether every use of the module `local` is known."""
        return not self._unknown(local)

    def _unknown(self, local: str) -> list[str]:
        whole = {
            path
            for path in self._uses.values[local]
            if is_module(path) and find_target(path, is_plain=self._is_plain) is None
        }
        return [
            _USED_WHOLE.format(path) if path in whole else missing_name(path)
            for path in sorted(self._uses.through[local])
            if path in whole
            or not (is_module(path) or longest_known(path, is_plain=self._is_plain))
        ]


def _lines_of(
    sources: Sequence[str],
    leading: Sequence[cst.EmptyLine],
    trailing: cst.TrailingWhitespace,
) -> cst.FlattenSentinel[cst.BaseStatement]:
    """A line for each source; what stood before and behind the old line stays there."""
    lines = [cst.ensure_type(cst.parse_statement(one), cst.SimpleStatementLine) for one in sources]
    lines[0] = lines[0].with_changes(leading_lines=leading)
    lines[-1] = lines[-1].with_changes(trailing_whitespace=trailing)
    return cst.FlattenSentinel(lines)


def _source_of(statement: cst.BaseSmallStatement) -> str:
    return cst.Module([]).code_for_node(statement.with_changes(semicolon=cst.MaybeSentinel.DEFAULT))
