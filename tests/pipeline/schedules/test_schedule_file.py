"""A schedule goes through a file unchanged, and mistakes in a file are found by row and column."""

import re

import pytest
from hypothesis import given, settings

from colossalai.pipeline.schedules._csv import read_schedule, write_schedule
from colossalai.pipeline.schedules._generators import make_schedule
from colossalai.pipeline.schedules._validate import ScheduleError, validate
from tests.pipeline.schedules.schedule_strategies import parsed, schedules

pytestmark = pytest.mark.unit


@settings(max_examples=60)
@given(schedule=schedules())
def test_a_schedule_goes_through_a_file(schedule, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / f"{schedule.name}.csv"
    write_schedule(schedule, path)
    assert read_schedule(path) == schedule


def test_columns_are_times(tmp_path):
    path = tmp_path / "a.csv"
    write_schedule(make_schedule("1f1b", 2, 2), str(path))
    assert path.read_text() == "0F0,0F1,,,0B0,,,0B1,\n,1F0,1B0,,1F1,1B1,,,\n"


def test_a_file_by_hand(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0, 0F1,,0B0,0B1\r\n,1F0,1I0,1F1,1I1,1W0,1W1\r\n,,\r\n\r\n")
    schedule = read_schedule(path)
    wanted = parsed("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W0 1W1", rank_of_stage=(0, 1), num_microbatches=2)
    assert (schedule.actions, schedule.rank_of_stage) == (wanted.actions, wanted.rank_of_stage)
    assert (schedule.name, schedule.num_microbatches) == ("mine", 2)
    validate(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2, column 2: '1X0' is not an action; write the stage, one of F, B, I, W"),
        ("0F0,,0SEND_F0\n", "row 1, column 3: '0SEND_F0' is not an action"),
        ("0F0,0B0\n,\n1F0,1B0\n", "row 2 has no action"),
        ("0F0,0B0\n1F0,1B0,0F1\n", "row 2: 0F1 is on stage 0, which row 1 has"),
        ("0F0,0B0\n2F0,2B0\n", "has stage 2, but no row has stage 1"),
        ("", "has no actions: a row for each rank"),
        (",,\n", "has no actions: a row for each rank"),
    ],
)
def test_a_mistake_is_named_by_its_place(text, message, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=re.escape(message)) as caught:
        read_schedule(path)
    assert str(path) in str(caught.value)


def test_a_schedule_that_cannot_be_run_is_not_written(tmp_path):
    with pytest.raises(ScheduleError, match="missing"):
        write_schedule(parsed("0F0", "1B0", rank_of_stage=(0, 1), num_microbatches=1), tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
