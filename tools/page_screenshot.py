"""Take the picture of `colossalai serve` in docs/features/inference.md.

    python tools/page_screenshot.py docs/features/served_page.png
    python tools/page_screenshot.py --scheme dark docs/features/served_page.png

The server, the page and the browser are real. The engine is the tests' one,
which returns a given text at a given pace, so that the picture needs no trained
model.
"""

import argparse
import os
import shutil
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from colossalai.serving import Server, ServerOptions
from tests.serving.fake import FakeService, make_tokenizer

QUESTION = "Why are keys and values kept in blocks?"
FIRST = (
    "Requests end at different lengths. If each had one piece of memory for its longest possible answer, "
    "most of it would never be used.\n\nIn blocks of 16 tokens a request takes memory as it grows and gives "
    "it back when it ends, and requests that begin with the same prompt share the blocks of it."
)
NEXT = "And when there are none left?"
SECOND = (
    "Then the youngest request gives its blocks back and waits. It is computed again later, and its text "
    "stays the same, since each token is drawn from the seed, the request and the position alone."
)
SIZE = {"width": 1120, "height": 660}
STEP_S = 0.03
SHOWN_S = 90  # of curves


def ask_beside(url: str, over: threading.Event) -> None:
    """Be the other clients: several at a time, then a pause."""
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        number = 1
        while not over.is_set():
            number = number % 7 + 1
            client.post("/v1/completions", json={"prompt": [[5, 6]] * number, "max_tokens": 40 + 20 * number})
            over.wait(0.3 * number)


def main() -> None:
    """Serve, talk, and take the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    options = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
    service = FakeService(tokenizer, window=2048, slots=4, step_s=STEP_S)
    service.info = replace(service.info, name="example")
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (FIRST, SECOND))

    def answer(prompt: tuple[int, ...], num: int, index: int = 0) -> list[int]:
        words = second if len(prompt) > len(first) else first  # the first answer is in the second prompt
        return (words * (1 + num // len(words)))[:num]

    service.answer_ids = answer  # type: ignore[method-assign]
    with Server(service, ServerOptions(port=0)) as server, sync_playwright() as driver:
        others = threading.Thread(target=ask_beside, args=(server.url, over))
        others.start()
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=browser_path, args=arguments)
        page = browser.new_page(viewport=SIZE, color_scheme=options.scheme)
        page.goto(server.url)
        page.fill("#max-tokens", str(len(first)))
        page.wait_for_selector("#send:enabled")
        page.wait_for_timeout(1000 * SHOWN_S)
        page.fill("#text", QUESTION)
        page.press("#text", "Enter")
        page.wait_for_selector("#send:visible")
        page.fill("#text", NEXT)
        page.press("#text", "Enter")
        page.wait_for_timeout(1000 * STEP_S * len(second) / 2)
        page.screenshot(path=options.file)
        over.set()
        browser.close()
        others.join()
    service.stop()


if __name__ == "__main__":
    main()
