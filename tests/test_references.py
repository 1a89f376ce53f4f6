"""References to torch functions taken before `initialize`: rebound, or at least listed."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import importlib.util
import sys
import time
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp

HALF = torch.bfloat16
SCRIPT = """
import torch
from torch import matmul, mm as product
from torch.nn.functional import linear, softmax as weights, conv2d, scaled_dot_product_attention
from torch import nn, Tensor

unbound = Tensor.matmul

class Attention(nn.Module):
    def forward(self, x):
        scores = matmul(x, x)
        return linear(weights(scores, -1), product(x, x)), unbound(x, x)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of a user, loaded before `initialize`."""
    module = types.ModuleType("users_script")
    monkeypatch.setitem(sys.modules, "users_script", module)
    exec(SCRIPT, vars(module))  # noqa: S102
    return module


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(4, 4)


def start(model: nn.Module) -> None:
    amp.initialize(model, opt_level="O4", verbosity=0)


def listed() -> set[tuple[str, str]]:
    """Functions and their places. Slow: walks all objects."""
    return {(one.function, one.place) for one in amp.stored_references()}


def test_names_in_loaded_modules_are_rebound_and_given_back(
    script: types.ModuleType, model: nn.Module
) -> None:
    before = dict(vars(script))
    x = torch.ones(4, 4)
    start(model)
    assert [one.dtype for one in script.Attention()(x)] == [HALF, HALF]
    assert script.weights(x.to(HALF), -1).dtype is torch.float32
    amp.uninitialize()
    after = vars(script)
    assert before.keys() == after.keys()
    assert all(after[name] is value for name, value in before.items())
    assert [one.dtype for one in script.Attention()(x)] == [torch.float32] * 2


def test_names_taken_during_the_session_are_plain_after_it(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    plain = {"linear": F.linear, "matmul": torch.matmul}
    start(model)
    module = types.ModuleType("imported_meanwhile")
    monkeypatch.setitem(sys.modules, "imported_meanwhile", module)
    exec("from torch.nn.functional import linear\nfrom torch import matmul", vars(module))  # noqa: S102
    assert module.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF
    amp.uninitialize()
    assert module.linear is plain["linear"]
    assert module.matmul is plain["matmul"]


def test_names_that_the_user_binds_anew_are_left_to_them(
    script: types.ModuleType, model: nn.Module
) -> None:
    start(model)
    script.matmul = "something else"
    del script.product
    amp.uninitialize()
    assert script.matmul == "something else"
    assert not hasattr(script, "product")


def test_several_sessions_one_after_another_leave_no_trace(
    script: types.ModuleType, model: nn.Module
) -> None:
    plain = [script.linear]
    for level in ("O1", "O4", "O0", "O5", "O4"):
        amp.initialize(model, opt_level=level, verbosity=0)
        assert (script.linear is plain[0]) is (level in ("O0", "O5"))
        amp.uninitialize()
    assert script.linear is plain[0]


def test_modules_that_are_odd_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    class Odd(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("do not touch")

    monkeypatch.setitem(sys.modules, "odd", Odd("odd"))
    monkeypatch.setitem(sys.modules, "nothing", None)
    monkeypatch.setitem(sys.modules, "no_module", object())
    start(model)
    assert isinstance(amp.stored_references(), list)


def test_module_that_refuses_new_values_is_passed_over_and_listed(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    class Frozen(types.ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            raise RuntimeError("read only")

    module = Frozen("users_constants")
    vars(module).update(product=torch.cross, torch=torch)
    monkeypatch.setitem(sys.modules, "users_constants", module)
    start(model)
    assert ("torch.cross", "module users_constants, name product") in listed()


def test_no_code_of_the_user_runs_when_modules_and_objects_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError("do not touch")

        __eq__ = __getattribute__
        __hash__ = None

    class Odd(nn.Module):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name.startswith("_") else 1 / 0

        @property
        def broken(self) -> Any:
            raise RuntimeError("do not touch")

    (tmp_path / "lazily.py").write_text("raise RuntimeError('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("lazily")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazily", lazy)
    spec.loader.exec_module(lazy)
    owner = Meta("Owner", (), {"held": torch.cross})
    user = types.ModuleType("users_script")
    vars(user).update(
        torch=torch, owner=owner, one=object.__new__(owner), gone=weakref.proxy(set())
    )
    monkeypatch.setitem(sys.modules, "users_script", user)
    start(Odd())
    assert ("torch.cross", "class Owner, attribute held") in listed()


class Holder:
    shared = staticmethod(torch.mm)

    def __init__(self) -> None:
        self.activation = F.kl_div
        self.table = {"mm": torch.mm}
        self.listed = [torch.bmm]
        self.partial = functools.partial(torch.softmax, dim=-1)


def test_attributes_in_a_model_are_rebound_and_given_back() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.product = torch.mm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.product(x, x)

    net, plain = Net(), [torch.mm]
    start(net)
    assert net(torch.ones(2, 2)).dtype is HALF
    assert ("torch.mm", "Module object, attribute product") not in listed()
    amp.uninitialize()
    assert net.inner.product is plain[0]


def default_of(x: torch.Tensor, operation: Any = torch.logsumexp) -> torch.Tensor:
    return operation(x, -1)


def closure_of() -> Any:
    held = torch.cumprod

    def inner(x: torch.Tensor) -> torch.Tensor:
        return held(x, -1)

    return inner


TABLE = {"attention": F.scaled_dot_product_attention}


def test_functions_in_objects_are_listed_with_their_place(model: nn.Module) -> None:
    holder, inner = Holder(), closure_of()
    start(model)
    assert listed() >= {
        ("torch.nn.functional.kl_div", "Holder object, attribute activation"),
        ("torch.mm", "Holder object, attribute table"),
        ("torch.mm", "class Holder, attribute shared"),
        ("torch.bmm", "Holder object, attribute listed"),
        ("torch.softmax", "Holder object, attribute partial"),
        ("torch.logsumexp", "function default_of, a default"),
        ("torch.cumprod", "function closure_of.<locals>.inner, its closure"),
        ("torch.nn.functional.scaled_dot_product_attention", f"module {__name__}, name TABLE"),
    }
    del holder, inner


def test_a_listed_reference_reads_as_a_sentence(model: nn.Module) -> None:
    holder = Holder()
    start(model)
    sentences = [str(one) for one in amp.stored_references()]
    assert "torch.nn.functional.kl_div in Holder object, attribute activation" in sentences
    del holder


def test_functions_taken_anew_are_not_listed(model: nn.Module) -> None:
    start(model)
    before = len(amp.stored_references())
    holder = Holder()
    assert len(amp.stored_references()) == before
    del holder


def test_nothing_is_listed_where_no_casts_are_active(model: nn.Module) -> None:
    assert amp.stored_references() == []
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert amp.stored_references() == []


def test_generated_code_meets_the_casts_at_the_home_of_a_function(model: nn.Module) -> None:
    plain = [torch._C._nn.linear]
    start(model)
    assert torch._C._nn.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF
    amp.uninitialize()
    assert torch._C._nn.linear is plain[0]


def run_file(path: Path, source: str) -> types.ModuleType:
    """What torch.hub and loaders of configurations do: `sys.modules` never shows the result."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


UNLISTED = """
import functools
from torch import matmul, nn
from torch.nn.functional import linear, softmax

def product(x):
    return matmul(x, x)

def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner

class Net(nn.Module):
    @decorated
    def forward(self, x):
        return linear(x, x), product(x)
"""


def of_model(loaded: types.ModuleType) -> Any:
    return loaded.Net()


def of_loaded_function(loaded: types.ModuleType) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = loaded.Net().forward.__func__

        def forward(self, x: torch.Tensor) -> Any:
            return self.call(self, x)

    return Net()


def of_nested_model(loaded: types.ModuleType) -> Any:
    return nn.Sequential(nn.Identity(), loaded.Net())


@pytest.mark.parametrize("build", [of_model, of_nested_model, of_loaded_function])
def test_names_in_a_file_that_is_no_listed_module_are_rebound_and_given_back(
    tmp_path: Path, build: Any
) -> None:
    loaded = run_file(tmp_path / "hubconf.py", UNLISTED)
    before, net = dict(vars(loaded)), build(loaded)
    names = vars(loaded)
    del loaded  # as loaders do; its functions keep its names
    start(net)
    assert [one.dtype for one in net(torch.ones(2, 2))] == [HALF, HALF]
    assert not {place for _, place in listed() if "hubconf" in place}
    amp.uninitialize()
    assert names.keys() == before.keys()
    assert all(names[name] is value for name, value in before.items())


@pytest.mark.parametrize("held", ["function", "module", "class", "object"])
def test_what_a_loaded_module_has_from_such_a_file_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: nn.Module, held: str
) -> None:
    loaded = run_file(tmp_path / "hubconf.py", UNLISTED)
    user = types.ModuleType("users_script")
    monkeypatch.setitem(sys.modules, "users_script", user)
    parts = {"function": loaded.product, "module": loaded, "class": loaded.Net}
    vars(user).update(torch=torch, part=parts.get(held, loaded.Net()))
    start(model)
    assert [one.dtype for one in loaded.Net()(torch.ones(2, 2))] == [HALF, HALF]
    amp.uninitialize()
    assert [one.dtype for one in loaded.Net()(torch.ones(2, 2))] == [torch.float32] * 2


def test_such_a_file_is_not_kept_alive_by_the_casts(tmp_path: Path) -> None:
    net = run_file(tmp_path / "hubconf.py", UNLISTED).Net()
    start(net)
    code = weakref.ref(type(net))
    del net
    gc.collect()
    assert code() is None


Pair = collections.namedtuple("Pair", "first second")  # noqa: PYI024 - the kind that is meant


@dataclasses.dataclass(slots=True)
class Slotted:
    held: Any


class Choice(enum.Enum):
    PRODUCT = functools.partial(torch.mm)


CONTAINERS: dict[str, Any] = {
    "dict": lambda one: {"a": one},
    "list": lambda one: [one],
    "tuple": lambda one: (1, one),
    "set": lambda one: {one},
    "frozenset": lambda one: frozenset({one}),
    "ordered": lambda one: collections.OrderedDict(a=one),
    "default": lambda one: collections.defaultdict(list, a=one),
    "deque": lambda one: collections.deque([one]),
    "proxy": lambda one: types.MappingProxyType({"a": one}),
    "named": lambda one: Pair(one, 1),
    "chained": lambda one: collections.ChainMap({"a": one}),
    "partial": lambda one: functools.partial(map, one),
    "nested": lambda one: {"a": [({"b": one},)]},
    "bound": lambda one: types.MethodType(one, 1),
    "iterator": lambda one: iter([one]),
    "cached": functools.lru_cache,
    "slotted": Slotted,
    "object": lambda one: types.SimpleNamespace(held=one),
}


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with each container, in names, a class, an object, a closure and a model."""
    module = types.ModuleType("users_tables")
    monkeypatch.setitem(sys.modules, "users_tables", module)
    for kind, build in CONTAINERS.items():
        vars(module)[kind] = build(torch.cross)
    cycle: list[Any] = [torch.cross]
    cycle.append(cycle)
    vars(module)["cycle"] = cycle
    return module


def closure_over(held: Any) -> Any:
    def inner() -> Any:
        return held

    return inner


def test_functions_in_containers_of_every_kind_are_listed(
    holding: types.ModuleType, model: nn.Module
) -> None:
    start(model)
    places = {place for name, place in listed() if name == "torch.cross"}
    assert "Slotted object, attribute held" in places
    named = {name for name in vars(holding) if f"module users_tables, name {name}" in places}
    assert named == {*CONTAINERS, "cycle"} - {"slotted"}


def test_containers_are_found_in_classes_objects_closures_and_models() -> None:
    tables = {kind: build for kind, build in CONTAINERS.items() if kind != "slotted"}
    owner = type("Owner", (), {kind: build(torch.cross) for kind, build in tables.items()})
    holder, net, other = owner(), nn.Linear(2, 2), nn.Module()
    for kind, build in tables.items():
        setattr(holder, f"own_{kind}", build(torch.cross))
        setattr(net, kind, build(torch.cross))
        setattr(other, f"nested_{kind}", [build(torch.cross)])
    net.other = other
    closures = [closure_over(build(torch.cross)) for build in tables.values()]
    start(net)
    places = {place for name, place in listed() if name == "torch.cross"}
    assert {f"class Owner, attribute {kind}" for kind in tables} <= places
    assert {f"Owner object, attribute own_{kind}" for kind in tables} <= places
    assert {f"Linear object, attribute {kind}" for kind in tables} <= places
    assert {f"Module object, attribute nested_{kind}" for kind in tables} <= places
    assert "function closure_over.<locals>.inner, its closure" in places
    del holder, closures


def test_a_container_in_a_great_many_others_is_listed_soon(
    holding: types.ModuleType, model: nn.Module
) -> None:
    table = [torch.cross]
    holding.many = [[table] for _ in range(20000)]
    start(model)
    before = time.perf_counter()
    assert ("torch.cross", "module users_tables, name many") in listed()
    assert time.perf_counter() - before < 20  # a minute, if each was compared with each


def test_variables_of_running_functions_are_listed(model: nn.Module) -> None:
    cross, table = torch.cross, [torch.mm]
    start(model)
    places = {(name, place) for name, place in listed() if place.startswith("function test_var")}
    here = f"function {test_variables_of_running_functions_are_listed.__name__}, variable"
    assert places == {("torch.cross", f"{here} cross"), ("torch.mm", f"{here} table")}
    assert torch.cross is not cross
    assert torch.mm is not table[0]


def test_global_names_without_a_module_are_listed(model: nn.Module) -> None:
    names: dict[str, Any] = {}
    exec("from torch import cross\ndef area(x, y): return cross(x, y)", names)  # noqa: S102
    start(model)
    assert ("torch.cross", "function area, its global names") in listed()


def test_neither_torch_nor_amp_is_listed(model: nn.Module) -> None:
    before = set(sys.modules)
    start(model)
    places = {one.place for one in amp.stored_references()}
    assert not [place for place in places if "amp_patch" in place or " torch" in place]
    assert not [place for place in places if "ExitStack" in place]
    assert set(sys.modules) == before
