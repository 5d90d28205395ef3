"""A logger for a job of many ranks.

It uses the standard library's `logging`, so that users' filters and handlers work, and adds three
things: every line names the global rank that wrote it, a call can be limited to some ranks, and a line leaves
the process in one write, so that lines of different ranks on the same terminal do not interleave.

torch is not imported here: a process that has not imported `torch.distributed` cannot have initialised it.
"""

import functools
import logging
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

_LINE = "[%(asctime)s] %(levelname)-7s rank %(global_rank)d | %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class DistributedLogger:
    """A logger whose calls can be limited to some global ranks.

    Get one with `get_dist_logger`, which returns the same object for the same name. Messages go to stderr as
    `[2026-01-31 12:00:00] INFO    rank 0 | message`, from level INFO on.

    Args:
        name: The name of the standard library's logger underneath.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._once: set[tuple[int, str]] = set()
        self._logger = logging.getLogger(name)
        self._logger.propagate = False  # a handler on the root logger would print every line twice
        self._console = _console_handler(self._logger)
        self._use_lowest_level()

    def debug(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Log `message` at level DEBUG, on the global `ranks` only if given."""
        self._log(logging.DEBUG, message, ranks)

    def info(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Log `message` at level INFO, on the global `ranks` only if given."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Log `message` at level WARNING, on the global `ranks` only if given."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Log `message` at level ERROR, on the global `ranks` only if given."""
        self._log(logging.ERROR, message, ranks)

    def log_once(
        self, message: str, *, level: str | int = "WARNING", ranks: Collection[int] | None = None
    ) -> None:
        """Log `message` the first time it is seen in this process and never again.

        For settings that have no effect and for fallbacks to slower code.

        Args:
            message: The text, compared with earlier ones.
            level: The level, by name or number.
            ranks: The global ranks that log; all if not given.
        """
        key = (_level_number(level), message)
        if key not in self._once:
            self._once.add(key)
            self._log(*key, ranks)

    def set_level(self, level: str | int) -> None:
        """Set the lowest level that is shown on stderr; log files keep their own.

        Args:
            level: The level, by name or number.

        Raises:
            ValueError: `level` is unknown.
        """
        self._console.setLevel(_level_number(level))
        self._use_lowest_level()

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str | int = "INFO", suffix: str | None = None
    ) -> Path:
        """Also write to `path/rank_<global rank>[_<suffix>].log`, one file per rank.

        Call it after `colossalai.launch`: the file is named after the rank that the process has at this
        moment. A second call for the same file replaces the first one.

        Args:
            path: A folder, made if it does not exist.
            mode: `"a"` appends to a file from an earlier run, `"w"` starts it anew.
            level: The lowest level that is written.
            suffix: An addition to the file name.

        Returns:
            The path of this rank's file.

        Raises:
            ValueError: `path` is a file, or the mode or the level is unknown.
        """
        if mode not in ("a", "w"):
            raise ValueError(
                f"mode={mode!r} is not a way to open a log file; use 'a' (append) or 'w' (overwrite)"
            )
        level_number = _level_number(level)
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise ValueError(
                f"path={str(path)!r} is a file; give a folder: every rank writes its own file in it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank_{_global_rank()}" if suffix is None else f"rank_{_global_rank()}_{suffix}"
        log_file = folder / f"{stem}.log"
        self._close_file(log_file)
        handler = logging.FileHandler(log_file, mode=mode, encoding="utf-8")
        handler.setLevel(level_number)
        handler.setFormatter(logging.Formatter(_LINE, _TIME))
        self._logger.addHandler(handler)
        self._use_lowest_level()
        return log_file

    def _log(self, level: int, message: str, ranks: Collection[int] | None) -> None:
        global_rank = _global_rank()
        if ranks is None or global_rank in ranks:
            # The message is an argument, not the format: a '%' in it is only a character.
            self._logger.log(level, "%s", message, extra={"global_rank": global_rank})

    def _close_file(self, log_file: Path) -> None:
        for handler in self._logger.handlers[:]:
            if isinstance(handler, logging.FileHandler) and handler.baseFilename == os.path.abspath(log_file):
                self._logger.removeHandler(handler)
                handler.close()

    def _use_lowest_level(self) -> None:
        """Set the logger's level to the lowest of its handlers', a user's own handler included."""
        lowest = min(handler.level for handler in self._logger.handlers)
        self._logger.setLevel(max(lowest, 1))  # 0 would not mean "everything" but the parent logger's level


class _ConsoleHandler(logging.Handler):
    """Write to the `sys.stderr` of the moment, which a progress bar or a test may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line and its end in one call, so that nothing of another rank comes between them."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)  # the standard library's way: report it, never end the training for it


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """Return the one logger of this name.

    Args:
        name: A dotted name as in the standard library's `logging.getLogger`.
    """
    return _logger_of(name)


def disable_existing_loggers(
    include: Sequence[str] | None = None, exclude: Sequence[str] = ("colossalai",)
) -> None:
    """Silence chatty libraries: existing loggers show warnings and errors only.

    A name stands for the logger and everything below it: `"torch"` also covers `"torch.distributed"`.

    Args:
        include: Silence these only; all existing loggers if not given.
        exclude: Leave these as they are.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if not isinstance(logger, logging.Logger) or _covers(exclude, name):
            continue
        if include is None or _covers(include, name):
            logger.setLevel(logging.WARNING)


@functools.cache
def _logger_of(name: str) -> DistributedLogger:
    return DistributedLogger(name)


def _console_handler(logger: logging.Logger) -> logging.Handler:
    """Return the logger's handler for stderr, added if this is the first `DistributedLogger` over it."""
    for present in logger.handlers:
        if isinstance(present, _ConsoleHandler):
            return present
    handler = _ConsoleHandler(level=logging.INFO)
    handler.setFormatter(logging.Formatter(_LINE, _TIME))
    logger.addHandler(handler)
    return handler


def _covers(names: Sequence[str], name: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in names)


def _level_number(level: str | int) -> int:
    if isinstance(level, int):
        return level
    if level.upper() not in _LEVELS:
        raise ValueError(f"level={level!r} is not a log level; use one of {', '.join(_LEVELS)}")
    return logging.getLevelNamesMapping()[level.upper()]


def _global_rank() -> int:
    """Return the rank in the default process group, else the launcher's RANK, else 0."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))
