"""The page in a browser, of a real model behind `colossalai serve`: chat, stop, a server that dies."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import wait_until
from tests.serving.page.conftest import Tab
from tests.serving.served_folder import ServedFolder, save_tiny, serve_folder

pytestmark = pytest.mark.unit
KEY = "swordfish-on-a-stick-81"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedFolder]:
    (tmp_path / "key.txt").write_text(KEY)
    words = ("--port", "0", "--kv-memory", "32MiB", "--api-key-file", str(tmp_path / "key.txt"))
    served = serve_folder(tmp_path / "run", str(save_tiny(tmp_path / "tiny")), *words, key=KEY)
    try:
        yield served.wait_until_ready()
    finally:
        served.command.end()


def used_blocks(served: ServedFolder) -> int:
    found = re.search(r'colossalai_kv_blocks\{model="tiny",state="used"\} (\d+)', served.get("/metrics").text)
    assert found is not None
    return int(found[1])


@pytest.mark.long
def test_a_real_model(served: ServedFolder, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(f"http://127.0.0.1:{served.port}")
    tab.set("#key", KEY)
    tab.set("#temperature", "0")
    tab.set("#max-tokens", "24")
    tab.send("fox")
    message = {"role": "user", "content": "fox"}
    asked = {"messages": [message], "max_tokens": 24, "temperature": 0}
    expected = served.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"]
    assert tab.answer() == expected != ""

    tab.one("#new").click()
    tab.set("#max-tokens", "")
    tab.set("#temperature", "1")
    # A model without training may end at once: then the next answer is stopped.
    stop = "() => document.getElementById('stop').click()"
    watch = f"new MutationObserver({stop}).observe(document.getElementById('turns'), OPTIONS)"
    tab.page.evaluate(watch.replace("OPTIONS", "{subtree: true, characterData: true}"))
    for _ in range(20):
        tab.send("the quick brown")
        tab.wait_for_end()
        if tab.one(".note").last.text_content() == "stopped":
            break
    assert tab.one(".note").last.text_content() == "stopped"
    assert tab.answer() != ""
    wait_until(lambda: used_blocks(served) == 0)
    assert 'outcome="aborted"} 1.0' in served.get("/metrics").text

    for pid in served.pids:  # what is held cannot answer before it is killed
        os.kill(pid, signal.SIGSTOP)
    tab.send("the lazy dog")
    tab.page.wait_for_selector("#stop:visible")
    for pid in served.pids:
        os.kill(pid, signal.SIGKILL)
    assert tab.problem().startswith("The server cannot be reached.")
    tab.wait_for("document.getElementById('metrics-problem').textContent.includes('cannot be reached')")
    assert tab.one(".turn").count() > 1  # the conversation stays
