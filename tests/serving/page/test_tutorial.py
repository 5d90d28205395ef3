"""The OPT tutorial in both languages: commands of our pages, settings of the documented ones, a browser.

The documented pages have the same commands and settings in English and in Chinese. Here each language goes
another of the ways that they leave open: a checkpoint of metaseq or of Hugging Face, http or https.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

from tests.inference.metaseq import write_metaseq
from tests.launcher.command import Command, path_with_command, wait_until
from tests.serving.page.conftest import Tab
from tests.serving.served_folder import START_S, ServedFolder, save_tiny
from tests.tiers import in_soak

pytestmark = pytest.mark.unit
EXAMPLE = Path(__file__).parents[3] / "examples/opt_service"
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "ffn_dim": 48}
SIZES |= {"vocab_size": 320, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
SMALL = f"opt_125M(**{SIZES})"
DOCUMENTED = {"executor_max_batch_size": 16, "cache_size": 50, "cache_list_size": 2}
PAGES = {"en": ("README.md", "The longest river"), "zh": ("README.zh.md", "最长的河流")}


def commands(page: str) -> tuple[str, str, str]:
    """Return the commands of a page: of the container, of the server, and a request."""
    blocks = re.findall(r"^```shell\n(.*?)^```", (EXAMPLE / page).read_text(), re.MULTILINE | re.DOTALL)
    container, server, request = "".join(blocks).splitlines()
    return container, server, request


@pytest.mark.parametrize("language", PAGES)
def test_the_pages_have_the_documented_commands(language: str) -> None:
    page, prompt = PAGES[language]
    container, server, request = commands(page)
    for word in ("-p 8020:8020", "${CHECKPOINT_DIR}:/model_checkpoint", "${CONFIG_DIR}:/config"):
        assert word in container
    assert container.endswith("bash /config/server.sh")  # "the entry of service"
    assert (EXAMPLE / "server.sh").is_file()
    assert "PORT=8020" in server
    assert f'"prompt": "{prompt}"' in request
    config = (EXAMPLE / "opt_config.py").read_text()
    for name, value in DOCUMENTED.items():
        assert f"\n{name} = {value}\n" in config
    assert "\nmodel_class = opt_125M\n" in config
    assert "\ntp_init_size = 1 " in config


def write_checkpoint(folder: Path, *, is_metaseq: bool) -> None:
    from transformers import OPTForCausalLM

    from colossalai.inference.models import opt_125M

    torch.manual_seed(0)
    model = OPTForCausalLM(opt_125M(**SIZES, init_std=0.3))
    folder.mkdir()
    if is_metaseq:
        write_metaseq(model, folder / "restored.pt", is_fused=True, has_projection=True)
    else:
        model.save_pretrained(folder)
    save_tiny(folder / "tokenizer")


def write_config(folder: Path, checkpoint: Path, num_ranks: int) -> None:
    """Adapt the example's config as the documented page says: model class, checkpoint, degree."""
    config = (EXAMPLE / "opt_config.py").read_text()
    config = config.replace("model_class = opt_125M\n", f"model_class = lambda: {SMALL}\n")
    config = config.replace("tp_init_size = 1 ", f"tp_init_size = {num_ranks} ")
    if not (checkpoint / "restored.pt").is_file():
        config = re.sub(r"(?m)^checkpoint = .*$", f"checkpoint = {str(checkpoint)!r}", config)
    folder.mkdir()
    (folder / "opt_config.py").write_text(config)


def certificate(folder: Path) -> list[str]:
    """Return the options for https."""
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"openssl makes no certificate here: {made.stderr.decode()}")
    return ["--ssl-keyfile", str(folder / "key.pem"), "--ssl-certfile", str(folder / "cert.pem")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("language", "scheme", "num_ranks"), [("en", "http", 1), ("zh", "https", 1), in_soak("zh", "https", 2)]
)
def test_the_tutorial(
    language: str, scheme: str, num_ranks: int, tmp_path: Path, open_tab: Callable[..., Tab], job_port: int
) -> None:
    page, prompt = PAGES[language]
    _, server, request = commands(page)
    write_checkpoint(tmp_path / "opt-125m", is_metaseq=language == "en")
    write_config(tmp_path / "config", tmp_path / "opt-125m", num_ranks)
    port = str(job_port)
    words = ["--kv-memory", "16MiB", *(certificate(tmp_path) if scheme == "https" else [])]
    server = server.replace("CONFIG_DIR=examples/opt_service", f"CONFIG_DIR={tmp_path / 'config'}")
    server = server.replace("path/to/opt-125m", str(tmp_path / "opt-125m")).replace("8020", port)
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "PATH": path_with_command()}
    with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {server} {' '.join(words)}"],
            cwd=EXAMPLE.parents[1],
            env=environment,
            stdout=out,
            stderr=err,
        )
    served = ServedFolder(Command(process, tmp_path), port=int(port))
    url = f"{scheme}://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, served.log
        try:
            return httpx.get(f"{url}/ready", verify=False, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(is_ready, START_S)
        asked = request.replace("localhost:8020", url).replace("curl ", "curl --silent --insecure ")
        done = subprocess.run(["bash", "-c", asked], capture_output=True, check=True, timeout=START_S)
        text = json.loads(done.stdout)["text"]
        assert text != ""

        tab = open_tab(url, "/docs#", ignore_https_errors=True)  # "open https://[IP-ADDRESS]:8020/docs#"
        route = tab.one("details:has(code:text-is('/generation'))")
        route.locator("summary").click()
        body = {"prompt": prompt, "max_tokens": 8, "top_k": 5, "top_p": 0.9, "temperature": 0.7}
        route.locator("textarea").fill(json.dumps(body, ensure_ascii=False))
        route.locator("button").click()
        shown = r"""/^200 .*\n{"text":".+"}/.test(one.textContent)"""
        shown = f"[...document.querySelectorAll('pre')].some((one) => {shown})"
        tab.wait_for(shown)

        talk = open_tab(url, ignore_https_errors=True)
        talk.set("#max-tokens", "8")
        talk.send(prompt)
        assert talk.answer() != ""
        assert f"whoever reaches port {port} of this machine may ask" in served.log
        assert served.end() == 0
    finally:
        served.command.end()
