"""The rules as data: the tables, the presets beside torch's own registry, what a user adds."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from amp_patch import AmpError
from amp_patch.casts.presets import PRESETS, REACHED_THROUGH, resolve_rules, rules_table
from amp_patch.casts.rules import DEFAULT_OPERATIONS, OP_RULES, SAFEGUARDS, CastRule, OpRule
from amp_patch.casts.spellings import is_in_place

# What torch casts by other means: inside the kernels of cuDNN, or within the function in C++.
BESIDE_THE_REGISTRY = frozenset(
    {"_VF.lstm", "_VF.gru", "_VF.rnn_tanh", "_VF.rnn_relu", "cross_entropy"}
)


def _rule(rules: tuple[OpRule, ...], qualified_name: str) -> str | None:
    found = [row.rule.name for row in rules if row.qualified_name == qualified_name]
    return found[0] if found else None


def _names_in_presets(name: str) -> Iterator[str]:
    """What an operation of the dispatcher may be called in a preset."""
    yield name
    yield REACHED_THROUGH.get(name, name)
    yield f"_C._nn.{name}"
    for module in ("linalg", "fft"):
        if name.startswith(f"{module}_"):
            yield name.replace("_", ".", 1)
            yield name.removeprefix(f"{module}_")


def _registered(key: str) -> set[str]:
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)  # noqa: SLF001 (no public name)
    return {name.removeprefix("aten::").partition(".")[0] for name in found}


@pytest.mark.parametrize("preset", PRESETS)
def test_no_spelling_has_two_rules(preset: str) -> None:
    found = Counter((id(row.owner), row.name) for row in resolve_rules(preset))
    assert max(found.values()) == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_row_is_an_operation_of_this_torch(preset: str) -> None:
    assert [row for row in resolve_rules(preset) if not hasattr(row.owner, row.name)] == []


def test_qualified_name_leads_to_the_operation() -> None:
    for row in OP_RULES:
        assert pkgutil.resolve_name(row.qualified_name) == getattr(row.owner, row.name)


def test_an_in_place_spelling_is_never_cast_to_another_dtype() -> None:
    rules = {row.rule for row in OP_RULES if is_in_place(row.name)}
    assert rules == {CastRule.MATCH_SELF, CastRule.WRITE_BACK, CastRule.FALLBACK}


@pytest.mark.parametrize(
    ("preset", "key"), [("torch-cuda", "AutocastCUDA"), ("torch-cpu", "AutocastCPU")]
)
def test_preset_holds_what_this_torch_registers(preset: str, key: str) -> None:
    operations = PRESETS[preset]
    unknown = [
        name
        for name in sorted(_registered(key))
        if not any(one in operations for one in _names_in_presets(name))
    ]
    assert not unknown, (
        f"torch {torch.__version__} registers {unknown} for {key}, and the preset {preset!r} does "
        "not know them. Look up their cast in torch/csrc/autocast_mode.h, and add them to the list "
        "of the preset in amp_patch/casts/presets.py; or, if no Python name leads to one, to "
        "REACHED_THROUGH there, with the operation that calls it"
    )


@pytest.mark.parametrize(
    ("preset", "key"), [("torch-cuda", "AutocastCUDA"), ("torch-cpu", "AutocastCPU")]
)
def test_preset_holds_nothing_that_this_torch_does_not_register(preset: str, key: str) -> None:
    registered = {one for name in _registered(key) for one in _names_in_presets(name)}
    stale = PRESETS[preset].keys() - registered - SAFEGUARDS.keys() - BESIDE_THE_REGISTRY
    assert not stale, f"take {sorted(stale)} out of the preset {preset!r}: torch casts them no more"


def test_a_new_registration_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_registered", lambda _: {"brand_new"})
    with pytest.raises(AssertionError, match=r"'brand_new'.*casts/presets\.py"):
        test_preset_holds_what_this_torch_registers("torch-cuda", "AutocastCUDA")


def test_presets_differ_where_their_sources_do() -> None:
    rules = {preset: resolve_rules(preset) for preset in PRESETS}
    found = {
        name: [_rule(rules[preset], name) for preset in PRESETS]
        for name in ("torch:einsum", "torch.nn.functional:gelu", "torch:Tensor.exp", "torch:cat")
    }
    assert found == {
        "torch:einsum": ["HALF", None, "HALF", None],
        "torch.nn.functional:gelu": [None, "FLOAT", None, None],
        "torch:Tensor.exp": ["FLOAT", "FLOAT", "FLOAT", None],
        "torch:cat": [None, "PROMOTE", None, "PROMOTE"],
    }


@pytest.mark.parametrize("preset", ["apex-2019", "torch-cuda"])
def test_strict_preset_refuses_binary_cross_entropy(preset: str) -> None:
    assert _rule(resolve_rules(preset), "torch.nn.functional:binary_cross_entropy") == "REFUSED"


@pytest.mark.parametrize(
    "operation", ["torch.matmul", "Tensor.matmul", "matmul", "torch.Tensor.__matmul__"]
)
def test_one_spelling_stands_for_all(operation: str) -> None:
    rules = resolve_rules(float=[operation])
    for name in ("torch:matmul", "torch:Tensor.matmul", "torch:Tensor.__matmul__"):
        assert _rule(rules, name) == "FLOAT"


def test_function_itself_stands_for_all_its_spellings() -> None:
    rules = resolve_rules(half=[torch.exp, F.gelu, torch.linalg.inv], leave=[torch.Tensor.sum])
    assert _rule(rules, "torch:Tensor.exp") == "HALF"
    assert _rule(rules, "torch:Tensor.exp_") == "MATCH_SELF"
    assert _rule(rules, "torch.nn.functional:gelu") == "HALF"
    assert _rule(rules, "torch.linalg:inv") == "HALF"
    assert _rule(rules, "torch:Tensor.sum") is None
    assert _rule(rules, "torch:sum") is None


def test_in_place_spelling_that_is_forced_keeps_the_dtype_of_its_tensor() -> None:
    rules = resolve_rules(float=["Tensor.add_"])
    assert _rule(rules, "torch:Tensor.add_") == "WRITE_BACK"
    assert _rule(rules, "torch:Tensor.__iadd__") == "WRITE_BACK"
    assert _rule(rules, "torch:add") == "FLOAT"


def test_names_that_only_end_alike_are_kept_apart() -> None:
    rules = resolve_rules(leave=["torch.linalg.cond", "torch.fft.fft"])
    assert _rule(rules, "torch.linalg:cond") is None
    assert _rule(rules, "torch.fft:fft") is None
    assert _rule(rules, "torch.fft:ifft") == "FLOAT"


def test_half_only_casts_nothing_to_float() -> None:
    rules = resolve_rules(half_only=True)
    casting = {CastRule.FLOAT, CastRule.FLOAT_THROUGHOUT, CastRule.NORM, CastRule.WRITE_BACK}
    assert not casting & {row.rule for row in rules}
    assert _rule(rules, "torch:matmul") == "HALF"
    assert _rule(rules, "torch:softmax") == _rule(rules, "torch:Tensor.exp_") == "FALLBACK"


def test_default_without_additions_is_the_table_itself() -> None:
    assert resolve_rules() is OP_RULES


def test_everything_wrong_is_named_at_once() -> None:
    with pytest.raises(AmpError) as caught:
        resolve_rules(
            half=["torch.brand_new", torch.exp], float=[print, "Tensor.exp_"], leave="torch.sum"
        )
    message = str(caught.value)
    assert "half: expected operations of torch" in message
    assert "'torch.brand_new'" in message
    assert "<built-in function print>" in message
    assert "leave: expected a list of operations, found 'torch.sum'" in message
    assert "'exp' is in half and in float; leave it in one of them" in message


def test_unknown_preset_is_refused_with_the_near_one() -> None:
    with pytest.raises(AmpError, match=r"found 'torch_cuda'; did you mean 'torch-cuda'\?"):
        resolve_rules("torch_cuda")


def test_table_names_every_row() -> None:
    words = rules_table(OP_RULES).split()
    for row in OP_RULES:
        assert row.name in words
    assert max(map(len, rules_table().splitlines())) <= 100


def test_safeguards_are_part_of_every_preset() -> None:
    for name, preset in PRESETS.items():
        assert SAFEGUARDS.keys() <= preset.keys(), name
    assert DEFAULT_OPERATIONS is PRESETS["default"]
