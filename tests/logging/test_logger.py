"""The logger: one line per message, by rank, into stderr and files."""

import logging
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossalai.logging import DistributedLogger, disable_existing_loggers, get_dist_logger

pytestmark = pytest.mark.unit


@pytest.fixture
def logger() -> Iterator[DistributedLogger]:
    logger = get_dist_logger(f"test.{uuid.uuid4().hex}")
    yield logger
    for handler in logging.getLogger(logger.name).handlers:
        handler.close()


def test_there_is_one_logger_per_name():
    assert get_dist_logger() is get_dist_logger("colossalai")
    assert get_dist_logger(name="colossalai") is get_dist_logger()
    assert get_dist_logger("one") is not get_dist_logger("other")


def test_a_second_object_over_a_name_does_not_print_twice(capsys: pytest.CaptureFixture[str]):
    name = f"test.{uuid.uuid4().hex}"
    DistributedLogger(name)
    DistributedLogger(name).info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_a_line_has_time_level_rank_and_message(
    logger: DistributedLogger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "3")
    logger.warning("100% of %s")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] WARNING rank 3 \| 100% of %s\n", captured.err), (
        captured.err
    )


def test_a_line_is_one_write(logger: DistributedLogger, monkeypatch: pytest.MonkeyPatch):
    writes: list[str] = []

    class Stream:
        def write(self, text: str) -> None:
            writes.append(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr("sys.stderr", Stream())
    logger.info("two\nlines")
    assert len(writes) == 1
    assert writes[0].endswith("two\nlines\n")


def test_ranks_limit_who_speaks(
    logger: DistributedLogger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    logger.info("rank zero only", ranks=[0])
    monkeypatch.setenv("RANK", "1")
    logger.info("not heard", ranks=[0])
    logger.error("also one", ranks=[0, 1])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("| ")[1] for line in lines] == ["rank zero only", "also one"]


def test_set_level_is_about_stderr(
    logger: DistributedLogger, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    logger.log_to_file(tmp_path, level="DEBUG")
    logger.set_level("error")
    logger.debug("fine")
    logger.error("bad")
    assert "fine" not in (err := capsys.readouterr().err)
    assert "bad" in err
    assert re.findall(r"\| (\w+)", (tmp_path / "rank_0.log").read_text()) == ["fine", "bad"]
    logger.set_level(logging.DEBUG)
    logger.debug("now")
    assert "now" in capsys.readouterr().err


def test_an_unknown_level_is_refused(logger: DistributedLogger, tmp_path: Path):
    with pytest.raises(ValueError, match=r"'LOUD' is not a log level; use one of DEBUG, INFO"):
        logger.set_level("LOUD")
    with pytest.raises(ValueError, match="'LOUD'"):
        logger.log_to_file(tmp_path, level="LOUD")


def test_files_are_named_by_rank(logger: DistributedLogger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "2")
    assert logger.log_to_file(tmp_path / "new" / "folder", suffix="run") == (
        tmp_path / "new" / "folder" / "rank_2_run.log"
    )
    logger.info("to the file")
    assert "rank 2 | to the file" in (tmp_path / "new" / "folder" / "rank_2_run.log").read_text()


def test_a_file_is_appended_or_overwritten(logger: DistributedLogger, tmp_path: Path):
    log_file = tmp_path / "rank_0.log"
    log_file.write_text("from before\n")
    logger.log_to_file(tmp_path)
    logger.info("first")
    assert log_file.read_text().startswith("from before\n")
    logger.log_to_file(tmp_path, mode="w")
    logger.info("second")
    assert log_file.read_text().count("second") == 1
    assert "first" not in log_file.read_text()


def test_a_file_for_a_folder_and_a_wrong_mode_are_refused(logger: DistributedLogger, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        logger.log_to_file(tmp_path / "file")
    with pytest.raises(ValueError, match="mode='x'"):
        logger.log_to_file(tmp_path, mode="x")


def test_log_once(logger: DistributedLogger, capsys: pytest.CaptureFixture[str]):
    for _ in range(3):
        logger.log_once("has no effect")
        logger.log_once("has no effect", level="INFO")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == ["WARNING", "INFO"]


def test_disable_existing_loggers(monkeypatch: pytest.MonkeyPatch):
    chatty, child = logging.getLogger("chatty"), logging.getLogger("chatty.child")
    other, ours = logging.getLogger("chattyother"), logging.getLogger("colossalai.x")
    before = {
        logger: logger.level
        for logger in logging.root.manager.loggerDict.values()
        if hasattr(logger, "level")
    }
    try:
        disable_existing_loggers(include=["chatty"])
        assert [each.level for each in (chatty, child, other)] == [
            logging.WARNING,
            logging.WARNING,
            logging.NOTSET,
        ]
        disable_existing_loggers(exclude=["colossalai"])
        assert other.level == logging.WARNING
        assert ours.level == logging.NOTSET
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def test_the_rank_of_the_process_group_wins_over_the_environment(
    capsys: pytest.CaptureFixture[str], logger: DistributedLogger, monkeypatch: pytest.MonkeyPatch
):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setenv("RANK", "1")
    logger.info("message")
    assert "rank 5 |" in capsys.readouterr().err


def test_importing_the_logger_does_not_need_torch(tmp_path: Path):
    import subprocess
    import sys

    import colossalai.logging._logger as module

    code = f"import runpy, sys; runpy.run_path({module.__file__!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_a_handler_of_the_user_sees_what_is_logged(logger: DistributedLogger):
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger.name).addHandler(handler)
    logger.set_level("INFO")
    logger.debug("for the handler")
    assert seen == ["for the handler"]
