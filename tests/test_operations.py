"""What each kind of operation gives under casts, in every spelling."""

# ruff: noqa: ARG005 (every case takes the same arguments)

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_patch as amp
from amp_patch import AmpWarning

HALF, FLOAT = "half", "float"
LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}


@pytest.fixture(params=LEVELS)
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Casts are active; gives the half dtype."""
    model = nn.Linear(1, 1)
    amp.initialize(model, opt_level=request.param, verbosity=0)
    yield LEVELS[request.param]
    del model


def _square(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape or (4, 4), generator=generator) + 0.1).to(dtype)


# h is half, f float32; both are 4 x 4 and positive, i is an index.
Case = Callable[[Tensor, Tensor, Tensor], Any]
RESULTS: dict[str, tuple[str, Case]] = {
    "einsum": (HALF, lambda h, f, i: torch.einsum("ij,jk->ik", h, f)),
    "einsum of a list": (HALF, lambda h, f, i: torch.einsum("ij,jk->ik", [h, f])),
    "chain_matmul": (HALF, lambda h, f, i: torch.linalg.multi_dot([h, f, h])),
    "multi_dot": (HALF, lambda h, f, i: torch.linalg.multi_dot([f, h])),
    "tensordot": (HALF, lambda h, f, i: torch.tensordot(h, f, dims=1)),
    "scaled_dot_product_attention": (
        HALF,
        lambda h, f, i: F.scaled_dot_product_attention(h[None], f[None], h[None], attn_mask=f),
    ),
    "attention with a bool mask": (
        HALF,
        lambda h, f, i: F.scaled_dot_product_attention(f[None], f[None], h[None], attn_mask=f > 0),
    ),
    "multi_head_attention": (
        HALF,
        lambda h, f, i: nn.MultiheadAttention(4, 2)(h[:, None], f[:, None], f[:, None])[0],
    ),
    "grouped_mm": (
        HALF,
        lambda h, f, i: F.grouped_mm(f.repeat(1, 2)[None], _square(1, 8, 8).to(h.dtype)),
    ),
    "linear_cross_entropy": (FLOAT, F.linear_cross_entropy),
    "mv": (HALF, lambda h, f, i: torch.mv(f, h[0])),
    "addmv": (HALF, lambda h, f, i: torch.addmv(f[0], h, f[1])),
    "addr": (HALF, lambda h, f, i: f.addr(h[0], f[1])),
    "dot": (FLOAT, lambda h, f, i: torch.dot(h[0], f[0])),
    "vdot": (FLOAT, lambda h, f, i: h[0].vdot(f[0])),
    "inner": (FLOAT, lambda h, f, i: torch.inner(h, h)),
    "vecdot": (FLOAT, lambda h, f, i: torch.linalg.vecdot(h, f)),
    "bilinear": (HALF, lambda h, f, i: nn.Bilinear(4, 4, 2)(h, f)),
    "lstm": (HALF, lambda h, f, i: nn.LSTM(4, 3)(f)[0]),
    "gru cell": (HALF, lambda h, f, i: nn.GRUCell(4, 3)(h)),
    "prelu": (HALF, lambda h, f, i: nn.PReLU()(f)),
    "conv_tbc": (HALF, lambda h, f, i: torch.conv_tbc(h[None], f[None], f[0])),
    "batch_norm": (HALF, lambda h, f, i: nn.BatchNorm1d(4)(h)),
    "softmax": (FLOAT, lambda h, f, i: F.softmax(h, dim=-1)),
    "log_softmax": (FLOAT, lambda h, f, i: h.log_softmax(-1)),
    "softmin": (FLOAT, lambda h, f, i: F.softmin(h, dim=-1)),
    "gumbel_softmax": (FLOAT, lambda h, f, i: F.gumbel_softmax(h)),
    "gelu": (HALF, lambda h, f, i: F.gelu(h)),
    "std": (FLOAT, lambda h, f, i: h.std()),
    "var_mean": (FLOAT, lambda h, f, i: torch.var_mean(h)[0]),
    "mean": (HALF, lambda h, f, i: h.mean()),
    "sum": (FLOAT, lambda h, f, i: h.sum(0)),
    "nansum": (FLOAT, lambda h, f, i: torch.nansum(h)),
    "cumprod": (FLOAT, lambda h, f, i: h.cumprod(0)),
    "norm": (FLOAT, lambda h, f, i: torch.linalg.norm(h)),
    "cov": (FLOAT, lambda h, f, i: torch.cov(h)),
    "trace": (FLOAT, lambda h, f, i: h.trace()),
    "log1p": (FLOAT, lambda h, f, i: torch.special.log1p(h)),
    "cdist": (FLOAT, lambda h, f, i: torch.cdist(h, f)),
    "huber_loss": (FLOAT, lambda h, f, i: F.huber_loss(h, f)),
    "xlogy": (FLOAT, lambda h, f, i: torch.special.xlogy(h, f)),
    "square": (HALF, lambda h, f, i: torch.square(h)),
    "normalize": (FLOAT, lambda h, f, i: F.normalize(h)),
    "cosine_similarity": (FLOAT, lambda h, f, i: torch.cosine_similarity(h, f)),
    "interpolate nearest": (HALF, lambda h, f, i: F.interpolate(h[None], scale_factor=2)),
    "interpolate bilinear": (
        FLOAT,
        lambda h, f, i: F.interpolate(h[None, None], scale_factor=2, mode="bilinear"),
    ),
    "grid_sample": (
        FLOAT,
        lambda h, f, i: F.grid_sample(
            h[None, None], f[None, :, :2, None].expand(1, 4, 2, 2), align_corners=False
        ),
    ),
    "ctc_loss": (
        FLOAT,
        lambda h, f, i: F.ctc_loss(
            h.log_softmax(-1)[:, None].to(h.dtype),
            i[None, :1] * 0 + 1,
            i[:1] * 0 + 4,
            i[:1] * 0 + 1,
        ),
    ),
    "cross_entropy": (FLOAT, lambda h, f, i: F.cross_entropy(h, i)),
    "gaussian_nll_loss": (FLOAT, lambda h, f, i: F.gaussian_nll_loss(h, f, h)),
    "multilabel_soft_margin_loss": (
        FLOAT,
        lambda h, f, i: F.multilabel_soft_margin_loss(h, f.round()),
    ),
    "index_add": (FLOAT, lambda h, f, i: f.index_add(0, i, h)),
    "scatter_add": (FLOAT, lambda h, f, i: torch.scatter_add(h, 0, i[None], f)),
    "scatter_reduce": (FLOAT, lambda h, f, i: h.scatter_reduce(0, i[None], f, "amax")),
    "index_put": (FLOAT, lambda h, f, i: torch.index_put(h, (i,), f)),
    "lerp": (FLOAT, lambda h, f, i: torch.lerp(h, f, 0.5)),
    "masked_scatter": (FLOAT, lambda h, f, i: h.masked_scatter(f > 0.5, f)),
    "where": (FLOAT, lambda h, f, i: torch.where(f > 0.5, h, f)),
    "cat": (FLOAT, lambda h, f, i: torch.cat([h, f])),
    "block_diag": (FLOAT, lambda h, f, i: torch.block_diag(h, f)),
    "add": (FLOAT, lambda h, f, i: h + f),
    "add of half": (HALF, lambda h, f, i: h + h),
    "fft": (FLOAT, lambda h, f, i: torch.fft.rfft(h).abs()),
    "svd": (FLOAT, lambda h, f, i: torch.linalg.svd(h)[1]),
    "inverse": (FLOAT, lambda h, f, i: torch.inverse(h)),
    "svd_lowrank": (FLOAT, lambda h, f, i: torch.svd_lowrank(h, 2)[1]),
    "quantile": (FLOAT, lambda h, f, i: torch.quantile(h, 0.5)),
    "embedding": (FLOAT, lambda h, f, i: F.embedding(i, f)),
    "embedding of a half table": (HALF, lambda h, f, i: F.embedding(i, h)),
    "embedding_bag": (
        FLOAT,
        lambda h, f, i: F.embedding_bag(i[None], f, mode="sum", per_sample_weights=h[:1]),
    ),
    "avg_pool3d": (HALF, lambda h, f, i: F.avg_pool3d(h[None, None, None], (1, 2, 2))),
    "pow operator": (FLOAT, lambda h, f, i: h**2),
    "pow reflected": (FLOAT, lambda h, f, i: 2**h),
    "matmul operator": (HALF, lambda h, f, i: f @ h),
    "matmul of an unbound method": (HALF, lambda h, f, i: torch.Tensor.matmul(f, h)),
    "matmul by keyword": (HALF, lambda h, f, i: torch.matmul(input=f, other=h)),
    "linear by keyword": (HALF, lambda h, f, i: F.linear(f, weight=h, bias=f[0])),
    "expit follows": (HALF, lambda h, f, i: torch.special.expit(h)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_result_has_the_dtype_of_the_policy(half: torch.dtype, name: str) -> None:
    kind, case = RESULTS[name]
    result = case(_square(dtype=half), _square(), torch.arange(4))
    assert result.dtype is (half if kind == HALF else torch.float32)
    assert result.isfinite().all()


@pytest.mark.parametrize("owner", [F, torch], ids=["F", "torch"])
def test_layer_norm_is_float_in_float16_and_follows_bfloat16(half: torch.dtype, owner: Any) -> None:
    result = owner.layer_norm(_square(dtype=half), (4,), _square()[0], _square()[1])
    assert result.dtype is (torch.float32 if half is torch.float16 else half)


@pytest.mark.parametrize(
    "call",
    [
        lambda one, two, out: torch.matmul(one, two, out=out),
        lambda one, two, out: torch.pow(one, two, out=out),
        lambda one, two, out: torch.cumsum(one, 0, out=out),
        lambda one, two, out: torch.index_add(one, 0, torch.arange(4), two, out=out),
    ],
    ids=["half rule", "float rule", "sum", "promote rule"],
)
@pytest.mark.parametrize("is_half", [True, False], ids=["half out", "float out"])
def test_out_is_written_in_its_own_dtype(
    half: torch.dtype, call: Callable[..., Tensor], is_half: bool
) -> None:
    out = torch.empty(4, 4, dtype=half if is_half else torch.float32)
    one, two = _square(dtype=half), _square()
    assert call(one, two, out) is out
    with amp.disable_casts():
        expected = call(one.float(), two, torch.empty(4, 4))
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.02)  # rounded to 8 bits


def test_out_of_several_tensors_is_written(half: torch.dtype) -> None:
    outs = tuple(torch.empty(0, dtype=half) for _ in range(3))
    result = torch.linalg.svd(_square(dtype=half), out=outs)
    assert result[1] is outs[1]
    assert outs[1].shape == (4,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtype_that_the_user_asks_for_is_honoured(half: torch.dtype, dtype: torch.dtype) -> None:
    value = _square(dtype=half)
    assert value.sum(dtype=dtype).dtype is dtype
    assert F.softmax(value, -1, dtype=dtype).dtype is dtype
    assert torch.cumsum(value, 0, dtype=dtype).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_wide_and_complex_tensors_are_left_alone(half: torch.dtype, dtype: torch.dtype) -> None:
    value = _square(dtype=dtype)
    for result in (value @ value, value.exp(), value.sum(), value**2, torch.linalg.inv(value)):
        assert result.dtype is dtype


def test_integers_are_left_alone(half: torch.dtype) -> None:
    value = torch.arange(4)
    assert value.sum().dtype is torch.int64
    assert torch.dot(value, value).dtype is torch.int64
    assert (value**2).dtype is torch.int64


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "exp_": lambda h: h.exp_(),
    "torch.exp_": torch.exp_,
    "pow_": lambda h: h.pow_(2),
    "cumsum_": lambda h: h.cumsum_(0),
    "renorm_": lambda h: h.renorm_(2, 0, 1.0),
    "log1p_": lambda h: h.log1p_(),
    "xlogy_": lambda h: h.xlogy_(torch.full((4, 4), 2.0)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_member_of_the_float_list_computes_in_float_and_writes_back(
    half: torch.dtype, name: str
) -> None:
    value = _square(dtype=half)
    with amp.disable_casts():
        expected = value.float()
        IN_PLACE[name](expected)
    assert IN_PLACE[name](value) is value
    assert torch.equal(value, expected.to(half))


def test_power_assignment_keeps_the_tensor(half: torch.dtype) -> None:
    value = same = _square(dtype=half)
    value **= 2
    assert value is same
    assert value.dtype is half


def test_gradient_flows_through_what_is_written_back(half: torch.dtype) -> None:
    leaf = _square().requires_grad_()
    (leaf.to(half) * 1).exp_().float().sum().backward()
    torch.testing.assert_close(leaf.grad, leaf.detach().exp(), atol=0.02, rtol=0.02)


def test_what_is_written_into_keeps_its_dtype(half: torch.dtype) -> None:
    target, source, index = torch.zeros(4, 4), _square(dtype=half), torch.arange(4)
    target.index_add_(0, index, source)
    target.scatter_add_(0, index[None].expand(4, 4), source)
    target[target > 100] = source[target > 100]
    target[index] = source
    target.addmm_(source, source)
    target.lerp_(source, 0.5)
    narrow = source.clone()
    narrow[index] = target
    narrow.index_copy_(0, index, target)
    assert (target.dtype, narrow.dtype) == (torch.float32, half)
    assert target.isfinite().all()


def test_mask_value_beyond_float16_is_kept_out_of_place_and_limited_in_place() -> None:
    model = nn.Linear(1, 1)
    amp.initialize(model, opt_level="O1", verbosity=0)
    scores, mask = _square(dtype=torch.float16), torch.ones(4, 4, dtype=torch.bool)
    for filled in (
        scores.masked_fill(mask, -1e9),
        torch.masked_fill(scores, mask, torch.finfo(torch.float32).min),
        torch.where(mask, -1e9, scores),
        scores.index_fill(0, torch.arange(4), -(10**9)),
    ):
        assert filled.dtype is torch.float32
        assert torch.equal(filled.softmax(-1), torch.full((4, 4), 0.25))
    assert F.pad(scores, (1, 1), value=-1e9)[0, 0] == -1e9
    assert torch.full_like(scores, -1e9).dtype is torch.float32
    smallest = torch.finfo(torch.float16).min
    for filled in (
        scores.clone().masked_fill_(mask, -1e9),
        scores.clone().fill_(-(10**9)),
        scores.clone().index_fill_(0, torch.arange(4), -1e9),
    ):
        assert filled.dtype is torch.float16
        assert (filled == smallest).all()
    scores[mask] = -1e9
    assert (scores == smallest).all()
    assert scores.masked_fill(mask, -torch.inf).dtype is torch.float16
    assert scores.clamp(min=-1e9).dtype is torch.float16


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_mask_value_in_a_tensor_leaves_fully_masked_rows_uniform(opt_level: str) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level=opt_level, verbosity=0)
    half = torch.float16 if opt_level == "O1" else torch.bfloat16
    scores, mask = _square(dtype=half), torch.ones(4, 4, dtype=torch.bool)
    for number in (-1e9, torch.finfo(torch.float32).min):
        value = torch.tensor(number)
        written = scores.clone()
        written[mask] = value
        for filled in (
            torch.where(mask, value, scores),
            scores.where(~mask, other=value),
            scores.masked_fill(mask, value),
            scores.clone().masked_fill_(mask, value=value),
            scores.index_fill(0, torch.arange(4), value),
            written,
        ):
            assert torch.equal(filled.float().softmax(-1), torch.full((4, 4), 0.25))
        assert value == number
    for number in (torch.inf, -torch.inf, torch.nan):
        value = torch.tensor(number)
        assert torch.where(mask, value, scores).float().equal(value.expand(4, 4)) or value.isnan()
        assert scores.masked_fill(mask, value).isfinite().sum() == 0
    weight = torch.tensor(-3.0, requires_grad=True)
    torch.where(mask, weight, scores).sum().backward()
    assert weight.grad == 16


def test_index_of_an_assignment_is_no_value() -> None:
    model = nn.Linear(1, 1)
    amp.initialize(model, opt_level="O1", verbosity=0)
    value = torch.zeros(70_000, dtype=torch.float16)
    value[69_999] = 1.0
    assert value[69_999] == 1


def test_binary_cross_entropy_of_half_is_float_with_one_warning(half: torch.dtype) -> None:
    chance, target = _square(dtype=half), _square().round().clamp(0, 1)
    with pytest.warns(AmpWarning, match="binary_cross_entropy_with_logits") as caught:
        loss = F.binary_cross_entropy(chance.clamp(0, 1), target)
    assert len(caught) == 1
    assert loss.dtype is torch.float32
    F.binary_cross_entropy(chance.clamp(0, 1), target)  # a second warning would be an error


def test_binary_cross_entropy_of_float_is_as_it_was(half: torch.dtype) -> None:
    chance = _square().clamp(0, 1)
    assert F.binary_cross_entropy(chance, chance.round()).dtype is torch.float32


def test_weight_table_of_an_embedding_is_never_cast(half: torch.dtype) -> None:
    table = nn.Embedding(10, 4)
    assert table(torch.arange(3)).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors_without_half_kernels_run_in_float(half: torch.dtype) -> None:
    matrix = torch.eye(4).to_sparse_csr()
    assert torch.equal(torch.mm(matrix, _square(dtype=half)), _square(dtype=half).float())
    for product in (matrix @ _square(dtype=half), matrix.matmul(_square(dtype=half))):
        assert torch.equal(product, _square(dtype=half).float())
    assert torch.equal((torch.eye(4).to_sparse() @ _square()).float(), _square(dtype=half).float())


def test_running_statistics_are_never_half(half: torch.dtype) -> None:
    norm = nn.BatchNorm1d(4)
    norm(_square(dtype=half))
    assert norm.running_mean.dtype is torch.float32
    assert (norm.running_mean != 0).all()


def test_half_statistics_of_float_input_are_updated(half: torch.dtype) -> None:
    mean, variance = torch.zeros(4, dtype=half), torch.ones(4, dtype=half)
    F.batch_norm(_square(), mean, variance, training=True)
    assert mean.dtype is half
    assert (mean != 0).all()


def test_error_of_the_user_is_the_error_of_plain_torch(half: torch.dtype) -> None:
    for call in (
        lambda: torch.matmul(_square(4, 4), _square(3, 3)),
        lambda: F.threshold(_square(dtype=half), "no number", 0.0),
        lambda: torch.exp("no tensor"),
        lambda: torch.index_add(_square(), 9, torch.arange(4), _square(dtype=half)),
    ):
        with pytest.raises(Exception) as casting:  # noqa: PT011 (whatever torch raises)
            call()
        with amp.disable_casts(), pytest.raises(casting.type):
            call()
