"""Tiny models in folders, as `save_pretrained` leaves it, and `colossalai serve` in a process of its own."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import torch

from tests.launcher.command import Command, is_gone
from tests.launcher.command import start as start_command

START_S = 300.0
WINDOW = 512
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def save_tiny(folder: Path, *, family: str = "Llama", **options: Any) -> Path:
    """Write a model with its tokenizer and chat template, the same values each time.

    Args:
        folder: Where to.
        family: Prefix of the class in transformers.
        **options: Entries of the config that differ.
    """
    import transformers

    from tests.inference.tiny_tokenizers import byte_level

    tokenizer = byte_level()
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3}
    if family == "Llama":
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": WINDOW}
    config = getattr(transformers, f"{family}Config")(**sizes | options)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family == "Llama":
        (folder / "chat_template.jinja").write_text(CHAT)
    return folder


@dataclass
class ServedFolder:
    """The command, and a client that knows its port once it is ready."""

    command: Command
    headers: dict[str, str] = field(default_factory=dict)
    port: int = 0

    def wait_until_ready(self, num_starts: int = 1) -> "ServedFolder":
        """Wait for the line that tells the port, and for /ready."""
        deadline = time.monotonic() + START_S
        while True:
            found = re.findall(r"serving on http://[\d.]+:(\d+)", self.log)
            if len(found) >= num_starts:
                self.port = int(found[-1])
                if self.get("/ready").status_code == 200:
                    return self
            assert self.command.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    @property
    def log(self) -> str:
        """What it and its ranks have written."""
        return self.command.out + self.command.err

    @property
    def pids(self) -> list[int]:
        """The command itself, and all that it has started."""
        root = psutil.Process(self.command.process.pid)
        return [root.pid, *(process.pid for process in root.children(recursive=True))]

    def pid_of(self, rank: int) -> int:
        """Return the process of a rank."""
        found = [pid for pid in self.pids if _rank_of(pid) == str(rank)]
        assert len(found) == 1, found
        return found[0]

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask for a page."""
        with self.client() as client:
            return client.get(path, headers=headers)

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        """Ask for an answer."""
        with self.client() as client:
            return client.post(path, json=body)

    def text(self, prompt: str = "the quick", **body: Any) -> str:
        """Return a greedy continuation."""
        asked = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **body}
        answer = self.post("/v1/completions", **asked)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def client(self) -> httpx.Client:
        """Return a client; it is to be closed."""
        base = f"http://127.0.0.1:{self.port}"
        options: dict[str, Any] = {"verify": False, "trust_env": False}  # reading certificates takes longer
        return httpx.Client(base_url=base, timeout=START_S, headers=self.headers, **options)

    def end(self) -> int:
        """Ask it to end, and return its exit code."""
        self.command.process.terminate()
        return self.command.wait()


def serve_folder(folder: Path, *words: str, key: str | None = None) -> ServedFolder:
    """Start `colossalai serve words...` with its output in files of `folder`."""
    command = start_command(folder, "serve", *words)
    return ServedFolder(command, {"authorization": f"Bearer {key}"} if key else {})


def are_gone(pids: list[int]) -> bool:
    """Say whether processes have ended."""
    return all(map(is_gone, pids))


def _rank_of(pid: int) -> str | None:
    try:
        return psutil.Process(pid).environ().get("RANK")
    except psutil.Error:
        return None
