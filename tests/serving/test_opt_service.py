"""examples/opt_service: server.sh with a tiny checkpoint in folders of a user's choice, on another port."""

import os
import subprocess
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.launcher.command import Command, path_with_command, wait_until
from tests.serving.served_folder import START_S, ServedFolder, save_tiny

pytestmark = pytest.mark.unit
EXAMPLE = Path(__file__).parents[2] / "examples/opt_service"
SMALL = (
    "model_class = lambda: opt_125M(num_hidden_layers=2, num_attention_heads=2, hidden_size=32, ffn_dim=48, "
)
SMALL += "vocab_size=320, word_embed_proj_dim=32, max_position_embeddings=64)"


@pytest.mark.long
def test_the_server_of_the_tutorial(tmp_path: Path, job_port: int) -> None:
    from transformers import OPTForCausalLM

    from colossalai.inference.models import opt_125M

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "ffn_dim": 48}
    sizes |= {"vocab_size": 320, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    OPTForCausalLM(opt_125M(**sizes)).save_pretrained(tmp_path / "checkpoint")
    save_tiny(tmp_path / "checkpoint/tokenizer")
    config = (EXAMPLE / "opt_config.py").read_text()
    assert "model_class = opt_125M\n" in config
    (tmp_path / "opt_config.py").write_text(config.replace("model_class = opt_125M", SMALL))
    port = str(job_port)
    folders = {"CONFIG_DIR": str(tmp_path), "CHECKPOINT_DIR": str(tmp_path / "checkpoint"), "PORT": port}
    root = str(EXAMPLE.parents[1])
    environment = {**os.environ, **folders, "PYTHONPATH": root, "PATH": path_with_command()}
    with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [str(EXAMPLE / "server.sh"), "--kv-memory", "16MiB"], env=environment, stdout=out, stderr=err
        )
    served = ServedFolder(Command(process, tmp_path), port=int(port))
    try:

        def is_ready() -> bool:
            assert process.poll() is None, served.log
            try:
                return served.get("/ready").status_code == 200
            except httpx.ConnectError:
                return False

        wait_until(is_ready, START_S)
        answer = served.post("/generation", prompt="the quick", max_tokens=8)
        assert answer.status_code == 200
        assert set(answer.json()) == {"text"}
        assert "/generation" in served.get("/docs").text + served.get("/openapi.json").text
        assert f"whoever reaches port {port} of this machine may ask" in served.log
        assert served.end() == 0
    finally:
        served.command.end()


def test_a_missing_command_is_said_in_words(tmp_path: Path) -> None:
    found = subprocess.run(
        ["/bin/bash", str(EXAMPLE / "server.sh")],
        cwd=EXAMPLE.parents[1],  # which has a folder of that name
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 127
    assert "colossalai is not on PATH" in found.stderr


def test_the_folders_of_the_container_are_the_default() -> None:
    script = (EXAMPLE / "server.sh").read_text()
    for word in ("CONFIG_DIR:-/config}", "CHECKPOINT_DIR:-/model_checkpoint}", "PORT:-8020}"):
        assert word in script
    assert os.access(EXAMPLE / "server.sh", os.X_OK)
    assert subprocess.run(["bash", "-n", str(EXAMPLE / "server.sh")], check=False).returncode == 0
