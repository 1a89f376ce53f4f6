"""Several processes train one model. What they do is in distributed_worker.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed_worker
import pytest
import torch
from networks import ROUNDING_UNIT

import amp_patch as amp

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)

LAUNCH_SECONDS = 90
TERMINATION_SECONDS = 10

# After ten to fifty updates, relative to how far the weights have moved: a few roundings of
# weights, gradients and activations, which do not all go the same way. O3 rounds every update too.
HALF, BFLOAT = ROUNDING_UNIT[torch.float16], ROUNDING_UNIT[torch.bfloat16]
TOLERANCE = {"O0": 1e-5, "O1": 3 * HALF, "O2": 3 * HALF, "O3": 8 * HALF}
TOLERANCE |= {"O4": 3 * BFLOAT, "O5": 3 * BFLOAT}

Results = dict[str, dict[str, list[Any]]]


def launch(world_size: int, results: Path) -> None:
    """Run the worker on `world_size` ranks; no process is left, whatever happens."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # on a free port
    command += ["--nproc-per-node", str(world_size), distributed_worker.__file__, str(results)]
    source = str(Path(amp.__file__).parent.parent)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LAUNCH_SECONDS)
        except BaseException:
            process.terminate()  # lets the launcher end its workers
            try:
                process.wait(TERMINATION_SECONDS)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        pytest.fail(f"{world_size} ranks ended with {process.returncode}:\n{output}", pytrace=False)


def launch_once(world_size: int, folder: Path) -> Path:
    """The file of results, made by whichever of pytest's own workers comes first."""
    results = folder / f"{world_size}_ranks.json"
    claim, failure = results.with_suffix(".claim"), results.with_suffix(".failed")
    try:
        claim.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + LAUNCH_SECONDS + TERMINATION_SECONDS
        while not results.exists() and not failure.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        if not results.exists():
            pytest.fail(f"{world_size} ranks failed, see another test of this file", pytrace=False)
        return results
    try:
        unfinished = results.with_suffix(".unfinished")
        launch(world_size, unfinished)
        return unfinished.rename(results)
    except BaseException:
        failure.touch()
        raise


@pytest.fixture(scope="module", params=[2, 4], ids=["2-ranks", "4-ranks"])
def world_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def results(world_size: int, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by the workers of one run
    return json.loads(launch_once(world_size, folder).read_text("utf-8"))


def trained(cases: dict[str, list[Any]]) -> Iterator[tuple[str, list[Any]]]:
    assert cases
    for name, ranks in cases.items():
        assert "digest" in ranks[0]
        yield name, ranks


def assert_same_everywhere(cases: dict[str, list[Any]]) -> None:
    for name, ranks in trained(cases):
        for figure in ("digest", "state", "skipped"):
            assert all(rank[figure] == ranks[0][figure] for rank in ranks), (name, figure)


def assert_near_plain_training(cases: dict[str, list[Any]]) -> None:
    for name, ranks in trained(cases):
        level = re.findall(r"O[0-5]", name)[0]
        assert ranks[0]["is_finite"], name
        assert ranks[0]["distance"] < TOLERANCE[level], name


TRAINING = (
    "fifty_steps",
    "default_scales",
    "accumulation",
    "accumulation_at_scale_one",
    "odd_accumulation",
    "overflow_inside_no_sync",
    "overflow_of_the_averaging_block",
    "delayed_check",
    "sharded",
    "sharded_accumulation",
)


@pytest.mark.parametrize("scenario", TRAINING)
def test_ranks_hold_the_same_bits(results: Results, scenario: str) -> None:
    assert_same_everywhere(results[scenario])


@pytest.mark.parametrize("scenario", TRAINING)
def test_ranks_train_as_one_process_in_fp32_with_all_their_batches(
    results: Results, scenario: str
) -> None:
    assert_near_plain_training(results[scenario])


def test_overflow_on_one_rank_before_or_after_averaging_skips_on_all(results: Results) -> None:
    for level, ranks in results["fifty_steps"].items():
        for rank in ranks:
            assert rank["skipped"] == [7, 23], level
            expected = {"loss_scale": distributed_worker.START_SCALE / 4, "unskipped": 26}
            assert rank["state"] == {"loss_scaler0": expected}, level


def test_overflow_on_one_rank_inside_no_sync_drops_the_window_on_all(results: Results) -> None:
    for name, ranks in results["overflow_inside_no_sync"].items():
        assert ranks[0]["skipped"] == ([2] if name.startswith("window") else []), name


def test_overflow_of_the_averaging_block_drops_the_window(results: Results) -> None:
    for name, ranks in results["overflow_of_the_averaging_block"].items():
        assert ranks[0]["skipped"] == [2], name


def test_check_that_is_left_to_the_step_is_agreed_too(results: Results) -> None:
    for level, ranks in results["delayed_check"].items():
        assert ranks[0]["skipped"] == [1], level


@pytest.mark.parametrize(
    ("case", "skipped"),
    [("together", [[False, False], [True, True]]), ("apart", [[False, False], [False, True]])],
)
def test_each_optimizer_is_agreed_on_in_one_reduction_also_where_a_rank_has_no_gradients(
    results: Results, case: str, skipped: list[list[bool]]
) -> None:
    for rank in results["two_optimizers"][case]:
        assert rank["skipped"] == skipped
        assert rank["reductions"] == [2, 2]  # one number for each of two optimizers, once a block


def test_ranks_that_do_not_agree_talk_to_nobody(results: Results) -> None:
    ranks = results["two_optimizers"]["not agreed"]
    assert all(rank["reductions"] == [] for rank in ranks)
    assert [rank["skipped"][1] == [False, True] for rank in ranks] == [
        number == 1 for number in range(len(ranks))
    ]


def test_block_without_gradients_is_not_a_clean_one(results: Results) -> None:
    for rank in results["no_gradients"]["on any rank"]:
        assert rank["state"]["loss_scaler0"]["unskipped"] == 0


def test_block_with_gradients_on_one_rank_is_clean_on_all(results: Results) -> None:
    for rank in results["no_gradients"]["but on rank 0"]:
        assert rank["state"]["loss_scaler0"]["unskipped"] == 1


def test_scale_grows_once_a_window_where_gradients_come_with_its_last_block(
    results: Results,
) -> None:
    for level, ranks in results["sharded_accumulation"].items():
        assert ranks[0]["state"]["loss_scaler0"]["loss_scale"] == 4.0 * 2**6, level


def test_only_the_first_rank_logs_overflows(results: Results) -> None:
    lines = [rank["lines"] for rank in results["log_lines"]["O1"]]
    assert lines[0] > 0
    assert not any(lines[1:])


def test_checkpoint_of_the_first_rank_resumes_all(results: Results, world_size: int) -> None:
    for level, ranks in results["resume"].items():
        for rank in ranks:
            assert rank["first"][0] == rank["second"][0], level
            # The sum of three or more numbers depends on the order of the buckets, which DDP
            # changes after its first step: from there on it is not exact in plain FP32 either.
            assert world_size > 2 or rank["first"][1] == rank["second"][1], level


def test_model_in_ddp_is_refused_with_the_right_order(results: Results) -> None:
    for level in ("O1", "O2", "O3"):
        for rank in results["refusals"][f"wrapped, {level}"]:
            assert (
                "wrapped in DistributedDataParallel; wrap what initialize returns"
                in (rank["message"])
            )


def test_sharded_model_is_refused_at_levels_that_cast_it(results: Results) -> None:
    for level in ("O2", "O3", "O5"):
        for rank in results["refusals"][f"sharded, {level}"]:
            assert rank["message"].startswith(f"models: {level} casts whole weights, found the")
            assert "MixedPrecisionPolicy of fully_shard" in rank["message"]
            assert rank["dtypes"] == ["torch.float32"]
