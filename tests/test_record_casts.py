"""The recording of casts: its counts beside those of torch's dispatcher, and the advice."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import mlp
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import amp_patch as amp
from amp_patch import casting
from amp_patch.tools.cast_report import CastRecord, CastReport, Place, advice_on
from amp_patch.tools.matrix_sizes import matrix_sizes
from amp_patch.tools.record_casts import record_casts

HALF = (torch.float16, torch.bfloat16, torch.float32)


class TinyGPT(nn.Module):
    """An embedding, an encoder layer, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.block(self.embedding(tokens)))
        return F.softmax(hidden @ self.embedding.weight.t(), dim=-1)


class TinyResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head((x + self.norm(self.conv(x)).relu()).mean((2, 3)))


class TinyLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][-1]) + self.head(self.lstm(x)[0][0])


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (TinyGPT, lambda: torch.randint(0, 16, (2, 4))),
    "resnet": (TinyResNet, lambda: torch.randn(2, 3, 4, 4)),
    "lstm": (TinyLSTM, lambda: torch.randn(3, 2, 4)),
}


class CastCounter(TorchDispatchMode):
    """Counts what the dispatcher casts, and the bytes: an account of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) == "aten._to_copy.default" and result.dtype is not args[0].dtype:
            self.casts += 1
            self.bytes += sum(one.numel() * one.element_size() for one in (args[0], result))
        return result


def backward_casts_of(loss: torch.Tensor) -> int:
    """The steps of the graph of `loss` that cast a gradient back."""
    found, seen, ahead = 0, set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += node.name() == "ToCopyBackward0"
        ahead += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_torchs_dispatcher(name: str, opt_level: str) -> None:
    build, batch = MODELS[name]
    model, inputs = build(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    with CastCounter() as counted:
        expected = model(inputs).sum()
    amp.clear_cache()
    with record_casts() as report:
        loss = model(inputs).sum()
        loss.backward()
    assert torch.equal(loss, expected)
    assert report.total("casts") == counted.casts > 0
    assert report.total("cast_bytes") == counted.bytes
    assert report.total("backward_casts") == backward_casts_of(expected)


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_torchs_profiler(name: str) -> None:
    build, batch = MODELS[name]
    model, inputs = amp.initialize(build(), opt_level="O4", verbosity=0), batch()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(inputs)
    amp.clear_cache()
    with record_casts() as report:
        model(inputs)
    events = Counter(event.name for event in profiled.events())
    # Kernels may cast inside themselves, which is no doing of amp's.
    asked_for = [
        event
        for event in profiled.events()
        if event.name == "aten::_to_copy" and event.cpu_parent.cpu_parent is None
    ]
    assert report.total("casts") == len(asked_for)
    names = {"gpt": "aten::scaled_dot_product_attention", "resnet": "aten::conv2d"}
    names["lstm"] = "aten::lstm"
    calls = Counter()
    for record in report.records:
        calls[record.place.operation.rpartition(".")[2]] += record.calls
    assert calls[names[name].removeprefix("aten::")] == events[names[name]]


def test_bytes_are_those_computed_by_hand() -> None:
    model = amp.initialize(nn.Linear(3, 5), opt_level="O1", verbosity=0)
    with record_casts() as report:
        model(torch.ones(2, 3)).float().sum().backward()
    linear, explicit = (
        next(one for one in report.records if one.place.operation == name)
        for name in ("F.linear", "Tensor.float")
    )
    # 6 inputs, 15 weights and 5 biases are read in 4 bytes each and written in 2; backward, the
    # weights' and biases' gradients are read in 2 and written in 4. The inputs need none.
    assert (linear.calls, linear.casts, linear.backward_casts) == (1, 3, 2)
    assert linear.cast_bytes == (6 + 15 + 5) * 6
    assert linear.backward_bytes == (15 + 5) * 6
    assert dict(linear.dtypes) == {"float16": 1}
    assert linear.place.rule == "HALF"
    assert (explicit.casts, explicit.cast_bytes, explicit.place.rule) == (1, 60, "EXPLICIT")


def test_cache_hits_are_saved_casts() -> None:
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    with record_casts() as report:
        for _ in range(3):
            model(torch.ones(1, 4))
    record = report.records[0]
    assert (record.casts, record.saved) == (3 + 2, 4)  # inputs thrice, weight and bias once


def test_call_site_and_module_path_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    amp.initialize(model, opt_level="O1", verbosity=0)
    with record_casts() as report:
        model(torch.ones(1, 4))
    assert sorted(one.place.module for one in report.records) == ["0", "1.0"]
    for record in report.records:
        file, _, line = record.place.site.rpartition(":")
        assert Path(file).name == "test_record_casts.py"
        assert "model(torch.ones(1, 4))" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_entry_and_exit_of_a_cast_model_are_recorded() -> None:
    model = amp.initialize(nn.Linear(3, 5), opt_level="O3", verbosity=0)
    with record_casts() as report:
        model(torch.ones(2, 3))
    found = {one.place.operation: (one.casts, one.cast_bytes) for one in report.records}
    assert found == {"model entry": (1, 6 * 6), "model exit": (1, 10 * 6)}
    assert {one.place.module for one in report.records} == {"Linear"}


def test_user_functions_are_recorded() -> None:
    class Library:
        @staticmethod
        def double(x: torch.Tensor) -> torch.Tensor:
            return x + x

    casting.register_half_function(Library, "double")
    try:
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        with record_casts() as report:
            Library.double(torch.ones(3))
    finally:
        casting.unregister_function(Library, "double")
    (record,) = report.records
    assert record.place.operation.endswith("double")
    assert (record.casts, record.cast_bytes, dict(record.dtypes)) == (1, 18, {"float16": 1})


@pytest.fixture
def operation_of_aten() -> Iterator[None]:
    casting.register_half_function(torch.ops.aten, "mm")
    yield
    casting.unregister_function(torch.ops.aten, "mm")


@pytest.mark.usefixtures("operation_of_aten")
def test_operations_by_every_name_are_recorded() -> None:
    kept = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    left, right = torch.ones(8, 8), torch.ones(8, 8)
    calls = {
        "matmul": lambda: torch.matmul(left, right),
        "Tensor.matmul": lambda: left.matmul(right),
        "Tensor.__matmul__": lambda: left @ right,
        "ops.aten.mm": lambda: torch.ops.aten.mm(left, right),
        "F.linear": lambda: F.linear(left, right),
    }
    for name, call in calls.items():
        with record_casts() as report:
            found = call()
        assert found.dtype is torch.float16, name
        (record,) = report.records
        assert record.place.operation == name
        assert (record.casts, record.calls, record.sizes) == (2, 1, {(8, 8, 8)})
    del kept


class TestAdvice:
    def test_product_of_127_by_65_is_reported(self) -> None:
        model = amp.initialize(nn.Linear(127, 65), opt_level="O1", verbosity=0)
        with record_casts() as report:
            model(torch.ones(8, 127))
        (text,) = report.advice
        assert "sizes 8 x 127 x 65 are no multiples of 8" in text
        assert "pad to 8 x 128 x 72" in text

    def test_sizes_in_eights_are_not(self) -> None:
        model = amp.initialize(nn.Linear(16, 8), opt_level="O1", verbosity=0)
        with record_casts() as report:
            model(torch.ones(8, 16))
        assert report.advice == []

    def test_result_that_goes_up_and_straight_back_is_reported(self) -> None:
        model = amp.initialize(nn.Linear(8, 8), opt_level="O1", verbosity=0)
        with record_casts() as report:
            model(model(torch.ones(8, 8)).exp())
        island = next(one for one in report.records if one.place.operation == "Tensor.exp")
        assert island.round_trips == 1
        text = "\n".join(report.advice)
        assert "1 result(s) were cast up and straight back" in text
        assert "an FP32 island that may cost more than it protects" in text

    def test_island_that_protects_is_left_in_peace(self) -> None:
        model = amp.initialize(nn.Linear(8, 8), opt_level="O1", verbosity=0)
        with record_casts() as report:
            model((model(torch.ones(8, 8)).half() + 11).exp())
        assert "may cost more than it protects" not in "\n".join(report.advice)

    def test_weight_cast_again_at_every_batch_is_reported(self) -> None:
        model = amp.initialize(nn.Linear(8, 8, bias=False), opt_level="O1", verbosity=0)
        with torch.no_grad(), record_casts() as report:
            for _ in range(3):
                model(torch.ones(8, 8))
        assert (
            "the weight of shape (8, 8) was cast 2 times more than it changed" in report.advice[0]
        )
        with torch.no_grad(), record_casts() as report, casting.keep_casts():
            for _ in range(3):
                model(torch.ones(8, 8))
        assert report.advice == []

    def test_weight_that_was_trained_in_between_is_not(self) -> None:
        model = nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        with record_casts() as report:
            for _ in range(3):
                with amp.scale_loss(model(torch.ones(8, 8)).float().mean(), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        assert not [text for text in report.advice if "more than it changed" in text]

    def test_advice_follows_from_a_record_alone(self) -> None:
        record = CastRecord(Place("mm", "a.py:1", "head", "HALF"), sizes={(8, 8, 8), (7, 8, 8)})
        assert advice_on(record) == []  # it ran in FP32 only
        record.dtypes["float16"] = 1
        assert "sizes 7 x 8 x 8" in advice_on(record)[0]


@pytest.mark.parametrize(
    ("operation", "shapes", "sizes"),
    [
        ("F.linear", [(2, 3, 5), (7, 5)], (6, 5, 7)),
        ("matmul", [(4, 2, 3), (4, 3, 5)], (2, 3, 5)),
        ("Tensor.__matmul__", [(3,), (3, 5)], (1, 3, 5)),
        ("addmm", [(5,), (2, 3), (3, 5)], (2, 3, 5)),
        ("conv2d", [(1, 3, 8, 8), (16, 3, 3, 3)], (3, 16)),
        ("softmax", [(2, 3)], None),
    ],
)
def test_sizes_of_products(
    operation: str, shapes: list[tuple[int, ...]], sizes: tuple[int, ...] | None
) -> None:
    assert matrix_sizes(operation, [torch.empty(shape) for shape in shapes], {}) == sizes


class TestReport:
    @pytest.fixture
    def report(self) -> CastReport:
        model = amp.initialize(mlp(), opt_level="O1", verbosity=0)
        with record_casts() as report:
            model(torch.randn(4, 6)).sum().backward()
        return report

    def test_print_is_sorted_by_cost(self, report: CastReport) -> None:
        moved = [record.moved for record in report.records]
        assert moved == sorted(moved, reverse=True)
        assert report.records[0].place.module in str(report).splitlines()[3]

    def test_dict_is_plain_data(self, report: CastReport) -> None:
        data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert data["totals"]["casts"] == sum(row["casts"] for row in data["records"])
        assert {"operation", "site", "module", "rule"} <= data["records"][0].keys()
        assert data["advice"] == report.advice

    def test_empty_report_can_be_read(self) -> None:
        assert "0 calls" in str(CastReport())
        assert CastReport().to_dict()["records"] == []


def test_without_amp_there_is_nothing_to_record() -> None:
    with pytest.raises(amp.AmpError, match=r"^record_casts: expected an earlier call"):
        record_casts().__enter__()


def test_recording_in_a_recording_is_refused() -> None:
    amp.initialize(mlp(), opt_level="O1", verbosity=0)
    with record_casts(), pytest.raises(amp.AmpError, match="no recording inside another"):
        record_casts().__enter__()


@pytest.mark.parametrize("raises", [False, True])
def test_afterwards_all_is_as_it_was(raises: bool) -> None:
    model = amp.initialize(mlp(), opt_level="O1", verbosity=0)
    wrapper = vars(F)["linear"]
    before = wrapper.call, dict(vars(torch.Tensor))
    expected = pytest.raises(ZeroDivisionError) if raises else nullcontext()
    with expected, record_casts():
        assert wrapper.call is not before[0]
        model(torch.randn(4, 6))
        print(1 / (not raises))
    assert (wrapper.call, dict(vars(torch.Tensor))) == before
    assert vars(F)["linear"] is wrapper
    assert model(torch.randn(4, 6)).dtype is torch.float16


def test_methods_that_cast_pass_for_themselves_inside() -> None:
    """As torch.compile and torch.overrides want it, which look them up by hash and name."""
    plain = {name: getattr(torch.Tensor, name) for name in ("to", "half", "bfloat16", "float")}
    kept = amp.initialize(nn.Linear(8, 8), opt_level="O1", verbosity=0)
    with record_casts():
        for name, method in plain.items():
            assert (vars(torch.Tensor)[name], vars(torch.Tensor)[name].__name__) == (method, name)
            assert vars(torch.Tensor)[name] in {method}
    del kept


def test_casts_that_code_asks_for_by_the_class_are_recorded() -> None:
    kept = amp.initialize(nn.Linear(8, 8), opt_level="O1", verbosity=0)
    with record_casts() as report:
        torch.Tensor.half(torch.ones(3))
        torch.ones(3).to(torch.float32)  # none
    (record,) = report.records
    assert (record.place.operation, record.casts, record.cast_bytes) == ("Tensor.half", 1, 18)
    del kept


def test_results_are_the_same_with_and_without() -> None:
    model = amp.initialize(TinyGPT(), opt_level="O1", verbosity=0)
    tokens = torch.randint(0, 16, (2, 4))
    plain = model(tokens)
    with record_casts():
        recorded = model(tokens)
    assert torch.equal(plain, recorded)


def test_off_it_costs_nothing() -> None:
    """The call is the same function as ever: nothing is there to cost anything."""
    amp.initialize(mlp(), opt_level="O1", verbosity=0)
    x, weight = torch.ones(8, 8).half(), torch.ones(8, 8).half()
    call = vars(F)["linear"].call

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(200):
            F.linear(x, weight)
        return time.perf_counter() - started

    seconds()
    before = min(seconds() for _ in range(5))
    with record_casts():
        F.linear(x, weight)
    after = min(seconds() for _ in range(5))
    print(f"200 calls before and after a recording: {before * 1e3:.2f} and {after * 1e3:.2f} ms")
    assert vars(F)["linear"].call is call
