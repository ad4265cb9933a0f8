"""Step times: measured where run, inferred elsewhere, unmoved by a lone slow step."""

from __future__ import annotations

import pytest

from knockon.engine.step_times import StepTimes

WIDTHS = (1, 4, 8, 12, 16)


def test_a_batch_counts_towards_the_smallest_bucket_that_holds_it() -> None:
    times = StepTimes(WIDTHS, (1, 2, 4, 8))
    assert [times.bucket(b) for b in (1, 2, 3, 4, 5, 8, 9, 100)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepTimes(WIDTHS).seconds(1, 8) is None


def test_a_seed_stands_until_measured_and_then_gives_way() -> None:
    times = StepTimes(WIDTHS, seeds={(1, 8): 0.010})
    assert times.seconds(1, 8) == 0.010
    assert times.trusted(1, 8)
    for _ in range(40):
        times.update(1, 8, 0.013)
    assert times.seconds(1, 8) == pytest.approx(0.013, rel=0.01)


def test_the_first_call_of_a_shape_is_not_believed_alone() -> None:
    times = StepTimes(WIDTHS)
    times.update(1, 8, 0.9)
    assert not times.trusted(1, 8)
    times.update(1, 8, 0.01)
    assert times.trusted(1, 8)
    assert times.seconds(1, 8) == pytest.approx(0.01)


def test_until_it_is_trusted_a_slow_first_step_counts_for_no_more_than_its_neighbours_say() -> None:
    times = StepTimes(WIDTHS, (1,), seeds={(1, 1): 0.01, (1, 16): 0.025})
    times.update(1, 8, 0.9)
    assert times.seconds(1, 8) == pytest.approx(0.017)
    times.update(1, 4, 0.009)
    assert times.seconds(1, 4) == 0.009


def test_a_faster_step_is_half_believed_of_a_time_grown_old_and_of_that_alone() -> None:
    times = StepTimes(WIDTHS, (1,), seeds={(1, 8): 0.02, (1, 16): 0.03})
    times.update(1, 8, 0.01)
    assert times.seconds(1, 8) == 0.02
    for _ in range(20):
        times.update(1, 16, 0.03)
    times.update(1, 8, 0.01)
    assert times.seconds(1, 8) == pytest.approx(0.015)
    assert times.seconds(1, 16) == pytest.approx(0.03)


def test_a_lone_slow_step_moves_nothing_and_a_lasting_change_does() -> None:
    times = StepTimes(WIDTHS, seeds={(1, 8): 0.01})
    for _ in range(5):
        times.update(1, 8, 0.01)
    times.update(1, 8, 1.0)
    times.update(1, 8, 0.01)
    assert times.seconds(1, 8) == pytest.approx(0.01)
    for _ in range(30):
        times.update(1, 8, 0.02)
    assert times.seconds(1, 8) == pytest.approx(0.02, rel=0.01)


def test_a_change_at_one_width_is_half_believed_of_the_others() -> None:
    times = StepTimes(WIDTHS, seeds={(1, 8): 0.01, (1, 16): 0.012, (2, 8): 0.01})
    for _ in range(50):
        times.update(1, 8, 0.014)
    assert times.seconds(1, 16) == pytest.approx(0.014, rel=0.01)
    assert times.seconds(2, 8) == 0.01


def test_times_stay_positive() -> None:
    times = StepTimes(WIDTHS, seeds={(1, 1): 0.001, (1, 16): 1.0})
    for _ in range(100):
        times.update(1, 16, 0.0001)
    assert (times.seconds(1, 1) or 0) > 0
    assert (times.seconds(1, 16) or 0) > 0


def test_between_two_widths_of_a_bucket_times_are_linear() -> None:
    times = StepTimes(WIDTHS, seeds={(4, 1): 0.01, (4, 16): 0.04, (1, 8): 5.0})
    assert times.seconds(4, 8) == pytest.approx(0.01 + 0.03 * 7 / 15)


@pytest.mark.parametrize("falling", [False, True])
def test_inferred_times_never_fall_with_rows(falling: bool) -> None:
    seeds = {(1, 1): 0.01, (1, 16): 0.02, (8, 8): 0.015 if falling else 0.05}
    times = StepTimes(WIDTHS, (1, 2, 4, 8, 16, 32), seeds)
    for width in WIDTHS:
        column = [times.seconds(b, width) for b in (2, 4, 16, 32)]
        assert column == sorted(column)
    for batch in (2, 4, 16, 32):
        row = [times.seconds(batch, width) for width in WIDTHS]
        assert row == sorted(row)
