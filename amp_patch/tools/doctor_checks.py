"""The checks of a doctor that are about values and sizes: each looks at one thing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_patch.casts.rules import BCE_HINT
from amp_patch.tools.device_probe import measure_dtypes
from amp_patch.tools.diagnosis import Finding, Severity
from amp_patch.tools.doctor_sources import large_constants, probability_losses
from amp_patch.tools.patient import Patient

_SLOW = 1.05
_MULTIPLE = 8


def check_eps(patient: Patient) -> Iterator[Finding]:
    """An eps that is zero in the half dtype protects from no division by zero."""
    if not patient.policy.casts_model:
        return
    is_half = any(not patient.stays_float(path) for path, _ in patient.model.named_parameters())
    if patient.optimizer is not None and not patient.policy.master_weights and is_half:
        for group in patient.optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and eps > 0 and _rounded(eps, patient.half) == 0:
                yield Finding(
                    "eps",
                    Severity.WRONG,
                    type(patient.optimizer).__name__,
                    f"eps={eps:g} is 0 in {patient.half_name}, and the update divides by zero",
                    "pass eps=1e-4 or so, or use a level with FP32 masters (O2, O5)",
                )
                break
    for path, module in patient.model.named_modules():
        eps = getattr(module, "eps", None)
        is_kept = patient.stays_float(path) or isinstance(module, _BatchNorm)
        if isinstance(eps, float) and eps > 0 and _rounded(eps, patient.half) == 0 and not is_kept:
            yield Finding(
                "eps",
                Severity.RISK,
                path or type(module).__name__,
                f"eps={eps:g} is 0 in {patient.half_name}",
                "1e-5 is large enough; or keep_fp32 for this module",
            )


def check_constants(patient: Patient) -> Iterator[Finding]:
    """Mask values such as -1e9 are -inf in float16; a row that is all -inf is NaN after softmax."""
    if patient.half is not torch.float16:
        return
    for note in large_constants(patient.model, patient.stays_float):
        is_cast = patient.policy.casts_model
        yield Finding(
            "mask constant",
            Severity.WRONG if is_cast else Severity.RISK,
            f"{note.module} ({note.place})",
            f"{note.text} is beyond 65504, the end of float16",
            "use torch.finfo(x.dtype).min, or float('-inf') where no row is masked as a whole",
        )


def check_probability_losses(patient: Patient) -> Iterator[Finding]:
    """A sigmoid before a binary cross entropy rounds what the logarithm needs most."""
    for note in probability_losses(patient.model, patient.stays_float):
        yield _bce(f"{note.module} ({note.place})", note.text)
    for path, module in patient.model.named_modules():
        if isinstance(module, nn.BCELoss) and not patient.stays_float(path):
            yield _bce(path or "BCELoss", "BCELoss")
    if isinstance(patient.model, nn.Sequential):
        for path, module in list(patient.model.named_children())[-1:]:
            if isinstance(module, nn.Sigmoid) and not patient.stays_float(path):
                yield _bce(path, "a model that ends in a sigmoid")


def _bce(where: str, what: str) -> Finding:
    return Finding(
        "bce after sigmoid",
        Severity.RISK,
        where,
        f"{what}: {BCE_HINT.partition(';')[0]}",
        "leave the sigmoid out and use binary_cross_entropy_with_logits (BCEWithLogitsLoss)",
    )


def check_sizes(patient: Patient) -> Iterator[Finding]:
    """Matrix units of GPUs take half operands in eights."""
    for path, module in patient.model.named_modules():
        sizes = {} if patient.stays_float(path) else _sizes(module)
        odd = {name: size for name, size in sizes.items() if size % _MULTIPLE}
        if odd:
            named = ", ".join(f"{name}={size}" for name, size in odd.items())
            padded = ", ".join(f"{-(-size // _MULTIPLE) * _MULTIPLE}" for size in odd.values())
            yield Finding(
                "size off 8",
                Severity.SLOW,
                path or type(module).__name__,
                f"{named}: no multiple of 8, so that GPUs cannot use their matrix units in full",
                f"pad to {padded} where the model allows it",
            )


def _sizes(module: nn.Module) -> dict[str, int]:
    """What decides the shapes of a module's matrix products."""
    if isinstance(module, nn.Linear):
        names: tuple[str, ...] = ("in_features", "out_features")
    elif isinstance(module, nn.modules.conv._ConvNd):  # noqa: SLF001 (no public base)
        is_depthwise = module.groups == module.in_channels
        names = () if is_depthwise else ("in_channels", "out_channels")
    elif isinstance(module, nn.RNNBase):
        names = ("input_size", "hidden_size")
    else:
        names = ()
    return {name: int(getattr(module, name)) for name in names}


def check_speed(patient: Patient) -> Iterator[Finding]:
    """A dtype that this device has no fast arithmetic for."""
    if not (patient.policy.casts_model or patient.policy.patch_torch_functions):
        return
    if patient.stays_float(""):
        return
    device = next((p.device for p in patient.model.parameters()), torch.device("cpu"))
    speeds = measure_dtypes(device)
    own = speeds[patient.half].ratio
    others = {dtype: one for dtype, one in speeds.items() if dtype is not patient.half}
    if own > _SLOW:
        faster = [dtype for dtype, one in others.items() if one.ratio < 1]
        fix = "use O0 here, or another device"
        if faster:
            levels = "O4 or O5" if faster[0] is torch.bfloat16 else "O1 or O2"
            fix = f"use {levels}: {str(faster[0]).removeprefix('torch.')} is fast here"
        yield Finding(
            "slow dtype",
            Severity.SLOW,
            str(device),
            f"a matrix product takes {own:.1f} times as long in {patient.half_name} as in FP32",
            fix,
        )


def check_buffers(patient: Patient) -> Iterator[Finding]:
    """Buffers are cast with the model: tables of positions, masks, statistics."""
    if not patient.policy.casts_model:
        return
    for path, module in patient.model.named_modules():
        is_kept = patient.policy.keep_batchnorm_fp32 and isinstance(module, _BatchNorm)
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{path}.{name}" if path else name
            if (
                is_kept
                or patient.stays_float(full)
                or buffer.dtype is not torch.float32
                or not buffer.numel()
            ):
                continue
            loss = _loss_of(buffer, patient.half)
            if loss:
                yield Finding(
                    "buffer",
                    Severity.RISK,
                    full,
                    f"{loss} in {patient.half_name}",
                    f"keep_fp32=[{full!r}], or keep it as integers",
                )


def _loss_of(buffer: torch.Tensor, half: torch.dtype) -> str:
    values = buffer.detach()[buffer.isfinite()]
    rounded = values.to(half)
    if bool(rounded.isinf().any()):
        return f"values up to {float(values.abs().max()):g} become inf"
    if bool(((rounded == 0) & (values != 0)).any()):
        return f"values down to {float(values[values != 0].abs().min()):g} become 0"
    are_whole = bool((values == values.round()).all())
    if are_whole and bool((rounded.float() != values).any()):
        return f"whole numbers up to {float(values.abs().max()):g} are rounded"
    return ""


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))
