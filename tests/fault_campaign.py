"""Inject faults into training, thousands of them, and look for the least trace of any.

An episode trains a tiny model for a while. Between iterations that go well there are iterations
with one fault each: a loss or a single gradient that becomes inf, -inf, NaN or huge, or an
exception at some point of the loop. After each fault every weight, master, state, count and
statistic is what it was, bit for bit, and in the end the episode has trained what the same episode
without faults trains. `python tests/fault_campaign.py --faults 20000 --seed 1` runs more of them.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp

SCALE = 2.0**10  # far from the range of float16 on both sides; set anew before each iteration
VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "huge": 3e38}
POINTS = (
    "forward",
    "before-block",
    "before-backward",
    "backward",
    "after-backward",
    "after-block",
    "step",
)
ERRORS: tuple[type[BaseException], ...] = (MemoryError, KeyboardInterrupt, GeneratorExit)
FAULTS_IN_EPISODE = 24


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where, and at which of the visits of that place in one iteration."""

    site: str
    value: float = math.nan
    error: type[BaseException] | None = None
    visit: int = 0
    parameter: int = 0

    def __str__(self) -> str:
        what = self.value if self.error is None else self.error.__name__
        return f"{what} in {self.site}, visit {self.visit}, parameter {self.parameter}"


def value_faults() -> list[Fault]:
    """Numbers that must make an iteration be skipped."""
    return [
        Fault(site, value, visit=visit, parameter=parameter)
        for site, value, visit in itertools.product(("loss", "gradient"), VALUES.values(), range(2))
        for parameter in range(4 if site == "gradient" else 1)
    ]


def error_faults() -> list[Fault]:
    """Exceptions that end an iteration early, as an interrupted loop does."""
    return [
        Fault(site, error=error, visit=visit)
        for site, error, visit in itertools.product(POINTS, ERRORS, range(2))
        if site != "step" or not visit
    ]


class Trial:
    """Models, optimizers and a loop over them in which a fault can be armed."""

    def __init__(self, opt_level: str, loop: str, optimizer: str) -> None:
        self.models = [tiny_model() for _ in range(2 if loop == "two-optimizers" else 1)]
        self.optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in self.models]
        self.loop = LOOPS[loop]
        self.armed: Fault | None = None
        self.visits = 0
        self.has_fired = False
        setting = amp.DynamicLossScale(initial=SCALE)
        amp.initialize(
            self.models,
            self.optimizers,
            opt_level=opt_level,
            loss_scale=setting,
            min_loss_scale=2.0**-10,
            num_losses=2,
            verbosity=0,
        )
        self.models[0].register_forward_pre_hook(lambda *_: self.visit("forward"))
        self.optimizers[0].register_step_pre_hook(lambda *_: self.visit("step"))
        for i, parameter in enumerate(self.models[-1].parameters()):
            parameter.register_hook(lambda gradient, i=i: self._gradient(i, gradient))

    def iterate(self, batches: Sequence[Any], fault: Fault | None = None) -> bool:
        """One iteration of the loop. Returns whether the fault was met on the way."""
        amp.load_state_dict(
            {name: {"loss_scale": SCALE, "unskipped": 0} for name in amp.state_dict()}
        )
        self.armed, self.visits, self.has_fired = fault, 0, False
        try:
            self.loop(self, batches)
        finally:
            self.armed = None
        return self.has_fired

    def block(self, loss: torch.Tensor, **options: Any) -> None:
        """The block around backward, with places for faults in it."""
        self.visit("before-block")
        with amp.scale_loss(self._loss(loss), self.optimizers, **options) as scaled:
            self.visit("before-backward")
            scaled.backward()
            self.visit("after-backward")
        self.visit("after-block")

    def visit(self, site: str) -> None:
        """A place at which an exception can be raised."""
        if self._meets(site) and self.armed is not None and self.armed.error is not None:
            raise self.armed.error

    def _meets(self, site: str) -> bool:
        fault = self.armed
        if fault is None or fault.site != site:
            return False
        self.visits += 1
        if self.visits != fault.visit + 1:
            return False
        self.has_fired = True
        return True

    def _loss(self, loss: torch.Tensor) -> torch.Tensor:
        fault = self.armed
        if fault is None or not self._meets("loss"):
            return loss
        # The scaled loss is above the range of FP32: 3e38 * 2^10.
        return loss * 0 + loss.detach().sign() * fault.value + loss * fault.value

    def _gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        if index == 0:
            self.visit("backward")
        fault = self.armed
        if fault is None or index != fault.parameter or not self._meets("gradient"):
            return None
        bad = gradient.clone()
        if fault.value == VALUES["huge"]:
            bad *= fault.value
        if bad.isfinite().all():  # a huge multiple of a tiny number may be finite, and right
            bad.view(-1)[0] = math.inf if fault.value == VALUES["huge"] else fault.value
        return bad

    def everything(self) -> list[torch.Tensor]:
        """Copies of all that training makes, in a fixed order."""
        found = [tensor.detach().clone() for tensor in self._weights()]
        buffers = [b.clone() for model in self.models for b in model.buffers()]
        return [*found, *buffers]

    def trained(self) -> list[torch.Tensor]:
        """Copies of what an interrupted iteration must not change: all but statistics of norms."""
        return [tensor.detach().clone() for tensor in self._weights()]

    def _weights(self) -> Iterator[torch.Tensor]:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            yield from model.parameters()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    state = optimizer.state.get(parameter, {})
                    for name in sorted(state):
                        value = state[name]
                        if value is not None:
                            yield value if torch.is_tensor(value) else torch.tensor(value)

    def forget_gradients(self) -> None:
        """What a loop does before it goes on."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def tiny_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, eps=1e-3),
}


def loss_of(model: nn.Module, one: Any) -> torch.Tensor:
    return F.mse_loss(model(one[0]).float(), one[1]) + 0.5


def step_all(trial: Trial) -> None:
    for optimizer in trial.optimizers:
        optimizer.step()


def plain(trial: Trial, batches: Sequence[Any]) -> None:
    trial.forget_gradients()
    trial.block(loss_of(trial.models[0], batches[0]))
    step_all(trial)


def accumulating(trial: Trial, batches: Sequence[Any]) -> None:
    trial.forget_gradients()
    for one in batches:
        trial.block(loss_of(trial.models[0], one))
    step_all(trial)


def delaying(trial: Trial, batches: Sequence[Any]) -> None:
    for i, one in enumerate(batches):
        trial.block(loss_of(trial.models[0], one), delay_unscale=i < len(batches) - 1)
    step_all(trial)
    trial.forget_gradients()


def two_optimizers(trial: Trial, batches: Sequence[Any]) -> None:
    trial.forget_gradients()
    first, second = trial.models
    for one in batches:
        trial.block(loss_of(first, one) + loss_of(second, one))
    step_all(trial)


def two_losses(trial: Trial, batches: Sequence[Any]) -> None:
    trial.forget_gradients()
    for i, one in enumerate(batches):
        trial.block(loss_of(trial.models[0], one), loss_id=i)
    step_all(trial)


def clipping(trial: Trial, batches: Sequence[Any]) -> None:
    trial.forget_gradients()
    trial.block(loss_of(trial.models[0], batches[0]))
    torch.nn.utils.clip_grad_norm_(amp.master_params(trial.optimizers[0]), 0.5)
    step_all(trial)


def checking_late(trial: Trial, batches: Sequence[Any]) -> None:
    trial.forget_gradients()
    for one in batches:
        trial.block(loss_of(trial.models[0], one), delay_overflow_check=True)
    step_all(trial)


def closing(trial: Trial, batches: Sequence[Any]) -> None:
    def closure() -> torch.Tensor:
        trial.forget_gradients()
        loss = loss_of(trial.models[0], batches[0])
        trial.block(loss)
        return loss

    trial.optimizers[0].step(closure)


LOOPS: dict[str, Callable[[Trial, Sequence[Any]], None]] = {
    "plain": plain,
    "accumulating": accumulating,
    "delaying": delaying,
    "two-optimizers": two_optimizers,
    "two-losses": two_losses,
    "clipping": clipping,
    "checking-late": checking_late,
    "closing": closing,
}


@dataclass(frozen=True)
class Episode:
    """Where one training takes place, and the faults that it meets."""

    opt_level: str
    loop: str
    optimizer: str
    seed: int
    faults: tuple[Fault, ...]

    def run(self) -> int:
        """Train with and without faults. Returns how many were met; AssertionError at a trace."""
        met, with_faults = self._train(self.faults)
        _, without = self._train((None,) * len(self.faults))
        assert_same(with_faults, without, f"{self}: the end of training")
        return met

    def _train(self, faults: Sequence[Fault | None]) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(self.seed)
        try:
            trial = Trial(self.opt_level, self.loop, self.optimizer)
            met = 0
            for i, fault in enumerate(faults):
                if fault is not None:
                    met += self._inject(trial, fault)
                if i % 3 == 2:
                    torch.manual_seed(1000 * self.seed + i)
                    self._go_on(trial)
            return met, trial.trained()
        finally:
            amp.uninitialize()

    def _inject(self, trial: Trial, fault: Fault) -> int:
        where = f"{self.opt_level} {self.loop} {self.optimizer}, seed {self.seed}: {fault}"
        before = trial.everything()
        try:
            has_met = trial.iterate(batches(), fault)
        except ERRORS:
            trained = trial.trained()
            assert_same(trained, before[: len(trained)], where)  # all but statistics of norms
            trial.forget_gradients()
            self._settle(trial)
            return 1
        assert has_met, f"{where}: not met"
        assert all(amp.step_was_skipped(one) for one in trial.optimizers), f"{where}: not skipped"
        assert_same(trial.everything(), before, where)
        lowest = min(entry["loss_scale"] for entry in amp.state_dict().values())
        assert lowest == SCALE / 2, f"{where}: the scale is {lowest}"
        return 1

    def _settle(self, trial: Trial) -> None:
        """After an exception the statistics of the next window are saved anew by a step."""
        for optimizer in trial.optimizers:
            optimizer.step()  # without gradients: changes nothing

    def _go_on(self, trial: Trial) -> None:
        before = trial.trained()
        trial.iterate(batches())
        after = trial.trained()
        where = f"{self}: an iteration that goes well"
        assert not any(amp.step_was_skipped(one) for one in trial.optimizers), f"{where}: skipped"
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=False)), where
        assert all(t.isfinite().all() for t in trial.everything()), f"{where}: not finite"


def batches() -> list[Any]:
    return [(torch.randn(3, 2), torch.randn(3, 1)) for _ in range(2)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], where: str) -> None:
    """Bit for bit."""
    assert len(found) == len(expected), f"{where}: {len(found)} tensors, not {len(expected)}"
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"{where}: tensor {i} was {other}, is {one}"


def visits_of(loop: str, fault: Fault) -> int:
    """How often an iteration of `loop` comes by the site of `fault`."""
    if fault.site == "step" or loop in ("plain", "clipping", "closing"):
        return 1
    return 2


def episodes(opt_level: str, faults: int, seed: int) -> Iterator[Episode]:
    """Enough episodes at one level for that many faults, in every loop and with every optimizer."""
    randomly = random.Random(f"{opt_level} {seed}")
    places = list(itertools.product(LOOPS, OPTIMIZERS))
    for number in range(math.ceil(faults / FAULTS_IN_EPISODE)):
        loop, optimizer = places[number % len(places)]
        possible = [
            fault
            for fault in (*value_faults(), *error_faults())
            if fault.visit < visits_of(loop, fault)
        ]
        chosen = tuple(randomly.choice(possible) for _ in range(FAULTS_IN_EPISODE))
        yield Episode(opt_level, loop, optimizer, 1 + number, chosen)


def main() -> None:
    """Run a campaign and print what was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore", amp.AmpWarning)
    start, met = time.perf_counter(), collections.Counter[str]()
    for opt_level in amp.OPT_LEVELS:
        share = math.ceil(options.faults / len(amp.OPT_LEVELS))
        for episode in episodes(opt_level, share, options.seed):
            met[opt_level] += episode.run()
    print(
        f"{met.total()} faults in {time.perf_counter() - start:.0f} s, no trace of any: {dict(met)}"
    )


if __name__ == "__main__":
    main()
