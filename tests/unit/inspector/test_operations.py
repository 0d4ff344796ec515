"""Test the history, time range, lines and problems of the operations page."""

from __future__ import annotations

import pytest
from support.inspector import NOW_S, OBSERVED, WORKER

from clawstream.inspector.errors import InvalidAddress
from clawstream.inspector.operations import history
from clawstream.inspector.operations.history import LEVELS, POINTS, History
from clawstream.inspector.operations.observation import samples_of
from clawstream.inspector.operations.sparkline import path_of
from clawstream.inspector.operations.time_range import ALIGN_S, DEFAULT, RANGES, time_range
from clawstream.inspector.web.rendering import _age, _size


class TestHistory:
    def test_keeps_peaks_and_shows_gaps(self) -> None:
        made = History()
        for time_s, value in ((1000, 1.0), (1004, 9.0), (1012, 2.0), (1031, 3.0)):
            made.add(time_s, {("lag", "a"): value})
        x, series = made.lines("lag", 1000, 1040)
        assert (x, series) == ([1000, 1010, 1020, 1030], {"a": [9.0, 2.0, None, 3.0]})
        assert made.lines("lag", 900, 990).series == made.lines("other", 0, 2000).series == {}

    def test_a_week_fits_into_few_points_without_losing_a_peak(self) -> None:
        made, week = History(), 604_800
        for time_s in range(0, week, 60):
            made.add(time_s, {("lag", "a"): 500.0 if time_s == 6000 else 1.0})
        for length_s in (900, 3600, 43_200, week):
            x, series = made.lines("lag", week - length_s, week)
            values = [v for v in series["a"] if v is not None]
            assert len(x) <= POINTS + 1 and values[-1] == 1.0
            assert (500.0 in values) == (length_s == week)
        held = sum(len(line._times) for line in made._series["lag", "a"])
        assert held <= sum(level.kept for level in LEVELS)

    def test_series_without_new_values_are_forgotten_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(history, "SERIES_MAX", 2)
        made = History()
        for number, name in enumerate("abac"):
            made.add(number, {("lag", name): 1.0})
        assert set(made.lines("lag", 0, 10).series) == {"a", "c"}

    def test_a_clock_that_goes_back_keeps_the_order(self) -> None:
        made = History()
        for time_s, value in ((1000, 1.0), (900, 5.0), (1010, 2.0)):
            made.add(time_s, {("lag", "a"): value})
        assert made.lines("lag", 1000, 1020).series == {"a": [5.0, 2.0]}


class TestTimeRange:
    def test_ends_now_and_pages_ask_the_same(self) -> None:
        first, second = time_range("6h", "", NOW_S), time_range("6h", "", NOW_S + ALIGN_S - 1)
        assert first == second and first.is_live and NOW_S < first.to_s <= NOW_S + ALIGN_S
        assert first.to_s - first.from_s == RANGES["6h"][0]

    def test_an_end_is_fixed_and_moves_by_a_length(self) -> None:
        fixed = time_range("1h", "2026-11-26T12:00:00", NOW_S)
        assert (fixed.is_live, fixed.until) == (False, "2026-11-26T12:00:00")
        assert fixed.moved(-1) == "2026-11-26T11:00:00" and fixed.moved(1) == "2026-11-26T13:00:00"
        assert time_range("1h", "2026-11-26T13:00:00+01:00", NOW_S) == fixed
        assert fixed.texts == ("2026-11-26 11:00", "12:00")
        assert time_range("24h", fixed.until, NOW_S).texts[1] == "2026-11-26 12:00"

    @pytest.mark.parametrize("until", ["soon", "0001-01-01T00:00:00", "9999-12-31T23:59:59"])
    def test_what_cannot_be_read_is_named(self, until: str) -> None:
        with pytest.raises(InvalidAddress, match="until"):
            time_range("", until, NOW_S)
        with pytest.raises(InvalidAddress, match="range: '100y'"):
            time_range("100y", "", NOW_S)
        assert time_range("", "", NOW_S) == time_range(DEFAULT, "", NOW_S)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ([], ""),
        ([None, None], ""),
        ([0.0, 0.0], "M0,19 L120,19"),
        ([0.0, 4.0, 2.0], "M0,19 L60,1 L120,10"),
        ([1.0, None, 1.0], "M0,1 h0.1 M120,1 h0.1"),
    ],
)
def test_a_line_of_values_is_a_path(values: list[float | None], path: str) -> None:
    assert path_of(values) == path


def test_low_values_stay_low() -> None:
    assert path_of([0.0, 2.0], least=20.0) == "M0,19 L120,17.2"


def test_ages_and_sizes_have_one_unit() -> None:
    assert [_age(s) for s in (None, -1, 119, 120, 7200, 2e5)] == [
        "–", "0 s", "119 s", "2 min", "2 h", "2 d",
    ]  # fmt: skip
    assert [_size(n) for n in (None, 0, 1023, 1536, 5 << 40, 1 << 60)] == [
        "–", "0 B", "1,023 B", "1.5 KiB", "5 TiB", "1,048,576 TiB",
    ]  # fmt: skip


class TestObservation:
    def test_judged_consumers_and_workers_are_sampled(self) -> None:
        assert samples_of(OBSERVED) == {
            ("consumer", "claw-lake claw.steps"): 21.0,
            ("consumer", "claw-lake claw.rewards"): 1.0,
            ("lag_seconds", "claw-lake"): 21.0,
            ("lag_records", "claw-lake"): 9,
            ("versions_behind", "w"): 2,
        }

    def test_a_worker_is_silent_after_five_reports(self) -> None:
        assert [WORKER._replace(age_s=age).is_silent for age in (9.0, 10.0, 11.0)] == [0, 0, 1]
