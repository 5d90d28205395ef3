"""When is there a watchdog, and how patient is it?"""

import pytest

from colossalai.context import Config, ConfigException
from colossalai.context._features import check_config
from colossalai.context._supervision import is_debugging
from colossalai.monitor._options import watchdog_options

pytestmark = pytest.mark.unit

VARIABLE = "COLOSSALAI_WATCHDOG_TIMEOUT"


def options(written, world_size=2):
    return watchdog_options(written, group_timeout=1800.0, world_size=world_size)


def test_by_default_it_is_earlier_than_the_library():
    found = options(None)
    assert (found.timeout, found.action, found.watches_steps) == (1620.0, "end", False)
    assert (found.notice, found.poll_s) == (60.0, 5.0)


def test_a_rank_alone_is_watched_only_on_demand():
    assert options(None, world_size=1) is None
    assert options({"timeout": 5}, world_size=1).timeout == 5.0


@pytest.mark.parametrize("written", [False, {"timeout": 0}])
def test_it_can_be_switched_off(written):
    assert options(written) is None


def test_the_environment_wins(monkeypatch):
    monkeypatch.setenv(VARIABLE, "30")
    assert options({"timeout": 5, "action": "report"}).timeout == 30.0
    assert options({"timeout": 5, "action": "report"}).action == "report"
    assert options(False).timeout == 30.0
    monkeypatch.setenv(VARIABLE, "0")
    assert options({"timeout": 5}) is None


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_an_environment_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=VARIABLE):
        options(None)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"watchdog": True}, "must be a dict"),
        ({"watchdog": {"timeout": -1}}, "watchdog.timeout"),
        ({"watchdog": {"notice": 0}}, "watchdog.notice"),
        ({"watchdog": {"time": 5}}, "timeout"),
        ({"watchdog": {"action": "explode"}}, "end, report"),
        ({"watchdog": {"folder": 5}}, "watchdog.folder"),
        ({"debug": "yes"}, "True or False"),
    ],
)
def test_a_wrong_config_is_refused(config, word):
    with pytest.raises(ConfigException, match=word):
        check_config(Config(config), 1)


def test_the_debug_mode_is_asked_for_by_environment_or_config(monkeypatch):
    assert is_debugging(Config(debug=True))
    assert not is_debugging(Config())
    monkeypatch.setenv("COLOSSALAI_DEBUG", "0")
    assert not is_debugging(Config(debug=True))
    monkeypatch.setenv("COLOSSALAI_DEBUG", "1")
    assert is_debugging(Config())
    monkeypatch.setenv("COLOSSALAI_DEBUG", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        is_debugging(Config())
