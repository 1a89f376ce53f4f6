"""The shape of the source: who may import whom, how long things are, what must not appear."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import amp_patch as amp

PACKAGE = "amp_patch"
ROOT = Path(amp.__file__).parent

# From the ground up. A module imports from the layers below its own only; `tools.*`, or
# `compat.*`, stands for every module of that folder that has no place of its own. `__init__` is
# what users import.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "casts.follows",
            "casts.namespaces",
            "casts.patcher",
            "casts.spellings",
            "casts.tracing",
            "errors",
            "hooks",
            "on_demand",
            "scaling.fused_step",
            "scaling.gradients",
            "scaling.ranks",
            "structures",
            "version",
        }
    ),
    frozenset({"weights.param_pairs"}),
    frozenset(
        {
            "casts.rules",
            "casts.watch",
            "scaling.gradient_lists",
            "scaling.loss_scaler",
            "weights.exclusions",
            "weights.master_weights",
            "weights.running_statistics",
        }
    ),
    frozenset(
        {
            "casts.presets",
            "parsing",
            "scaling.overflow_check",
            "scaling.overflow_report",
            "weights.checkpoints",
        }
    ),
    frozenset({"arguments", "policy", "scaling.device_scale", "scaling.gradient_window"}),
    frozenset(
        {
            "call_setup",
            "casts.arguments",
            "scaling.optimizer_state",
            "scaling.scaler_groups",
            "scaling.step_outcome",
        }
    ),
    frozenset({"casts.cache", "scaling.paired_groups"}),
    frozenset({"casts.context"}),
    frozenset(
        {
            "casts.safeguards",
            "casts.scopes",
            "casts.scripting",
            "casts.user_functions",
            "scaling.optimizer_binding",
            "weights.model_casting",
        }
    ),
    frozenset(
        {
            "casts.casters",
            "casts.surroundings",
            "scaling.scaled_loss",
            "weights.model_binding",
            "weights.model_checks",
        }
    ),
    frozenset({"casts.wrappers"}),
    frozenset({"casts.holders", "casts.references"}),
    frozenset({"casts.installation"}),
    frozenset({"weight_watch"}),
    frozenset({"session"}),
    frozenset({"slot"}),
    frozenset({"api", "casting", "state", "training"}),
    frozenset({"compat.*"}),
    frozenset(
        {
            "compat.amp_state",
            "compat.cast_rules",
            "compat.fused_adagrad",
            "compat.fused_adam",
            "compat.fused_lamb",
            "compat.fused_novograd",
            "compat.fused_sgd",
            "compat.installer",
            "compat.parallel",
            "compat.param_lists",
            "compat.safe_globals",
        }
    ),
    frozenset({"compat.fp16_optimizer", "compat.frontend", "compat.run_report"}),
    frozenset({"compat.apex_amp", "compat.flat_fp16_optimizer", "compat.script"}),
    frozenset(
        {
            "tools.bisection",
            "tools.call_sites",
            "tools.device_probe",
            "tools.diagnosis",
            "tools.digits",
            "tools.doctor_sources",
            "tools.extras",
            "tools.gradient_figures",
            "tools.level_arguments",
            "tools.live_memory",
            "tools.machine",
            "tools.matrix_sizes",
            "tools.module_paths",
            "tools.patient",
            "tools.plain_data",
            "tools.processes",
            "tools.surroundings",
            "tools.verdict",
        }
    ),
    frozenset({"tools.jobs"}),
    frozenset(
        {
            "tools.doctor_checks",
            "tools.doctor_order",
            "tools.ink",
            "tools.level_runs",
            "tools.level_table",
            "tools.operation_watch",
            "tools.text_table",
        }
    ),
    frozenset(
        {
            "tools.cast_report",
            "tools.command_arguments",
            "tools.comparison_page",
            "tools.doctor",
            "tools.level_result",
            "tools.range_check",
            "tools.trace_nonfinite",
            "tools.tuning",
        }
    ),
    frozenset(
        {
            "tools.cast_recorder",
            "tools.comparison_plot",
        }
    ),
    frozenset(
        {
            "tools.comparison",
            "tools.record_casts",
        }
    ),
    frozenset(
        {
            "tools.compare",
            "tools.tune",
        }
    ),
    frozenset({"__init__"}),
    frozenset({"compat.targets"}),
    frozenset(
        {
            "compat.codemod",
            "compat.migrate_command",
            "compat.run_command",
            "compat.spawned",
            "tools.*",
        }
    ),
    frozenset({"__main__"}),
)
WITHOUT_TORCH = ("casts.patcher", "scaling.loss_scaler")
WRITES_TO_THE_TERMINAL = (
    "__main__",
    "compat.migrate_command",
    "compat.run_command",
    "tools.",
)
# May import inside a function. Nothing imports `__main__`, so there is no cycle to dodge: it must
# show its help where the extra packages of a command are not installed.
IMPORTS_ON_DEMAND = frozenset({"__main__"})

MODULE_LINES = 300
FUNCTION_LINES = 40
HABITUAL_FUNCTION_LINES = 20
NESTING = 1

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def _module_name(path: Path) -> str:
    """`casts.cache` for casts/cache.py, `casts` for casts/__init__.py, `__init__` for the top."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {_module_name(path): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
FOLDERS = frozenset(_module_name(path) for path in ROOT.rglob("__init__.py") if path.parent != ROOT)
MODULES = sorted(SOURCES.keys() - FOLDERS)


def _layer(module: str) -> int:
    for name in (module, f"{module.rpartition('.')[0]}.*"):
        for layer, modules in enumerate(LAYERS):
            if name in modules:
                return layer
    pytest.fail(f"{module} is in no layer; add it to LAYERS in {__file__}, as low as it can stand")


def _imports(node: ast.AST) -> Iterator[str]:
    """Full names of what the import statements under `node` bring in, TYPE_CHECKING or not."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = "." * child.level + (child.module or "")
            yield from (f"{base}.{alias.name}" for alias in child.names)


def _inside(full_name: str) -> str | None:
    """The module of the package that `full_name` is or is in; None for what is outside."""
    if full_name.partition(".")[0] != PACKAGE:
        return None
    parts = full_name.split(".")[1:]
    while parts and ".".join(parts) not in SOURCES:
        parts.pop()
    return ".".join(parts) or "__init__"


def _package_imports(module: str) -> set[str]:
    return {inside for name in _imports(TREES[module]) if (inside := _inside(name)) is not None}


def _functions(
    node: ast.AST, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, int, FunctionNode]]:
    """Each function under `node`: qualified name, number of functions around it, and itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield f"{prefix}{child.name}", depth, child
            yield from _functions(child, f"{prefix}{child.name}.", depth + 1)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", depth)
        else:
            yield from _functions(child, prefix, depth)


def _body_lines(function: FunctionNode) -> int:
    """Lines below the signature and the docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_every_layer_is_inhabited() -> None:
    named = {name for layer in LAYERS for name in layer if not name.endswith(".*")}
    assert named - set(MODULES) == set()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_downwards_only(module: str) -> None:
    layer = _layer(module)
    upwards = [name for name in _package_imports(module) if _layer(name) >= layer]
    assert upwards == [], (
        f"{module} imports {', '.join(sorted(upwards))}, not below it: what it needs from there "
        f"belongs in a lower module"
    )


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - IMPORTS_ON_DEMAND))
def test_module_imports_at_its_top(module: str) -> None:
    late = {name: set(_imports(function)) for name, _, function in _functions(TREES[module])}
    assert {name: imports for name, imports in late.items() if imports} == {}


@pytest.mark.parametrize("module", SOURCES)
def test_module_imports_by_full_name(module: str) -> None:
    assert [name for name in _imports(TREES[module]) if name.startswith(".")] == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_module_stands_without_torch(module: str) -> None:
    reached, ahead = set(), {module}
    while ahead:
        reached |= ahead
        ahead = set().union(*map(_package_imports, ahead)) - reached
    with_torch = [
        name
        for name in sorted(reached)
        if any(imported.partition(".")[0] == "torch" for imported in _imports(TREES[name]))
    ]
    assert with_torch == []


@pytest.mark.parametrize("module", SOURCES)
def test_module_is_short(module: str) -> None:
    lines = SOURCES[module].count("\n")
    assert lines <= MODULE_LINES


@pytest.mark.parametrize("module", SOURCES)
def test_functions_are_short_and_hardly_nested(module: str) -> None:
    functions = list(_functions(TREES[module]))
    for name, _, function in functions:
        if _body_lines(function) > HABITUAL_FUNCTION_LINES:
            print(f"{module}.{name}: {_body_lines(function)} lines")  # shown by pytest -rP
    assert {name for name, _, node in functions if _body_lines(node) > FUNCTION_LINES} == set()
    assert {name for name, depth, _ in functions if depth > NESTING} == set()


@pytest.mark.parametrize("module", SOURCES)
def test_module_asserts_nothing(module: str) -> None:
    lines = [node.lineno for node in ast.walk(TREES[module]) if isinstance(node, ast.Assert)]
    assert lines == []


@pytest.mark.parametrize(
    "module", [name for name in SOURCES if not name.startswith(WRITES_TO_THE_TERMINAL)]
)
def test_module_prints_nothing(module: str) -> None:
    lines = [
        node.lineno
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert lines == []


@pytest.mark.parametrize("module", [name for name in MODULES if name != "__init__"])
def test_module_starts_with_its_docstring_and_the_future(module: str) -> None:
    tree = TREES[module]
    assert ast.get_docstring(tree), f"{module} does not say its job"
    assert "__future__.annotations" in set(_imports(tree))


def test_init_defines_nothing_but_the_public_names() -> None:
    tree = TREES["__init__"]
    others = [node for node in tree.body if not isinstance(node, ast.Expr | ast.ImportFrom)]
    checked, public, on_demand = others
    assert ast.unparse(checked).startswith("if TYPE_CHECKING:\n")
    assert all(
        isinstance(node, ast.ImportFrom)
        for node in ast.iter_child_nodes(checked)
        if not isinstance(node, ast.Name)
    )
    assert ast.unparse(public).startswith("__all__ = ")
    assert ast.unparse(on_demand).startswith("__getattr__, __dir__ = loaded_on_demand(")
    imported = {name.rpartition(".")[2] for name in _imports(tree)}
    assert imported - {"TYPE_CHECKING", "loaded_on_demand"} == set(amp.__all__)


def test_names_that_are_loaded_on_demand_are_those_that_type_checkers_see() -> None:
    shown = next(node for node in TREES["__init__"].body if isinstance(node, ast.If))
    names = {name.rpartition(".")[2] for node in shown.body for name in _imports(node)}
    code = "import sys, amp_patch; print(*sorted(set(amp_patch.__all__) - set(vars(amp_patch))))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == names
    assert {name for name in names if getattr(amp, name).__name__ == name} == names
    assert set(amp.__all__) <= set(dir(amp))
    with pytest.raises(AttributeError, match="no attribute 'compair'"):
        amp.compair  # noqa: B018


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in ROOT.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_init_of_a_folder_is_its_docstring(folder: str) -> None:
    assert all(isinstance(node, ast.Expr) for node in TREES[folder].body)


def test_public_names_are_sorted() -> None:
    def order(name: str) -> tuple[bool, bool, str]:
        return not name.isupper(), not name[0].isupper(), name

    assert list(amp.__all__) == sorted(set(amp.__all__), key=order)


@pytest.mark.parametrize("name", amp.__all__)
def test_public_name_has_a_docstring(name: str) -> None:
    value = getattr(amp, name)
    assert name == "__version__" or not name.startswith("_")
    if inspect.isclass(value) or inspect.isroutine(value):
        written = value.__doc__ or ""
        # A dataclass without a docstring is given its signature as one.
        assert written
        assert not written.startswith(f"{name}(")
