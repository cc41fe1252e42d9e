"""Where the traffic of a tuning comes from, and what is said of a file that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from batching.simulation import Arrival
from broker import TrafficRow
from inference import Encoded, RowError
from tuning.errors import TrafficError
from tuning.traffic import Traffic, TrafficFile, made_up, recorded


def words(rows: Sequence[object]) -> list[Encoded | RowError]:
    return [
        RowError("InvalidInput", "it is rude") if row == "rude" else Encoded(row, len(str(row).split())) for row in rows
    ]


def read(tmp_path: Path, *lines: str) -> TrafficFile:
    file = tmp_path / "traffic.jsonl"
    file.write_text("\n".join(lines))
    return TrafficFile.read(file)


def test_a_file_gives_times_and_tokens_in_order_from_second_zero(tmp_path: Path) -> None:
    file = read(tmp_path, '{"at": 12.5, "tokens": 7}', "", '{"at": 10, "text": "three short words"}')
    assert file.traffic(words).arrivals == [Arrival(0.0, 3), Arrival(2.5, 7)]
    assert file.texts == ["three short words"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "this is not JSON"),
        ("[1, 2]", 'an object with "at" and either "tokens" or "text" is needed'),
        ('{"tokens": 3}', 'an object with "at"'),
        ('{"at": 1}', 'either "tokens" or "text"'),
        ('{"at": 1, "tokens": 3, "text": "x"}', 'either "tokens" or "text"'),
        ('{"at": -1, "tokens": 3}', '"at" must be seconds from 0 on, not -1'),
        ('{"at": NaN, "tokens": 3}', '"at" must be seconds from 0 on, not nan'),
        ('{"at": true, "tokens": 3}', '"at" must be seconds'),
        ('{"at": 1, "tokens": 0}', '"tokens" must be a whole number from 1 on, not 0'),
        ('{"at": 1, "tokens": 2.5}', "not 2.5"),
        ('{"at": 1, "text": 3}', '"text" must be a text, not 3'),
    ],
)
def test_a_fault_names_its_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(TrafficError) as caught:
        read(tmp_path, '{"at": 0, "tokens": 1}', line)
    assert str(caught.value).startswith(f"{tmp_path / 'traffic.jsonl'}, line 2: ")
    assert said in str(caught.value)


def test_a_text_that_the_model_refuses_names_its_line(tmp_path: Path) -> None:
    file = read(tmp_path, '{"at": 0, "tokens": 1}', '{"at": 2, "text": "kind"}', '{"at": 1, "text": "rude"}')
    with pytest.raises(TrafficError, match="line 3: the model refuses this text: it is rude"):
        file.traffic(words)


@pytest.mark.parametrize("lines", [[], ['{"at": 1, "tokens": 1}'], ['{"at": 1, "tokens": 1}'] * 3])
def test_rows_without_a_rate_are_no_traffic(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(TrafficError, match="tells no rate"):
        read(tmp_path, *lines)


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match="No such file"):
        TrafficFile.read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(TrafficError, match="is not UTF-8"):
        TrafficFile.read(tmp_path / "binary")


def test_a_recorded_row_that_stands_for_several_is_spread_to_the_next() -> None:
    found = recorded([TrafficRow(1_000, 5, 1, 2), TrafficRow(3_000, 0, 0, 2)])
    assert found.arrivals == [Arrival(0.0, 5, 1), Arrival(1.0, 5, 1), Arrival(2.0, 1, 0), Arrival(2.0, 1, 0)]


def test_rows_recorded_at_one_moment_tell_no_rate() -> None:
    with pytest.raises(TrafficError, match="3 recorded rows tell no rate"):
        recorded([TrafficRow(5, 1, 0)] * 3)


def test_traffic_can_be_brought_to_another_rate() -> None:
    found = Traffic([Arrival(0.0, 1), Arrival(1.0, 2), Arrival(4.0, 3)], "x")
    assert found.rate == 0.5
    faster = found.at_rate(5.0)
    assert [round(arrival.at, 6) for arrival in faster.arrivals] == [0.0, 0.1, 0.4]
    assert faster.source == "x, brought to 5 rows/s"


def test_the_busiest_stretch_is_the_one_with_most_rows() -> None:
    times = [0.0, 5.0, 10.0, 10.5, 10.6, 11.5, 20.0]
    found = Traffic([Arrival(at, 1) for at in times], "x")
    assert [round(one.at, 6) for one in found.busiest(1.0, 100).arrivals] == [0.0, 0.5, 0.6]
    assert [round(one.at, 6) for one in found.busiest(100.0, 2).arrivals] == [0.0, 0.1]


def test_what_is_made_up_has_the_rate_and_keeps_to_the_longest() -> None:
    found = made_up(20.0, 100)
    assert found.rate == pytest.approx(20.0, rel=0.1)
    assert 1 <= found.lengths[0] < found.quantile(0.5) < found.lengths[-1] <= 100
    assert set(made_up(20.0, 1).lengths) == {1}
