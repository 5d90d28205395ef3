"""Rollouts in processes of Ray: two ranks, each with an engine in an actor of one Ray on this machine.

Ray listens on every address that it finds, so all of it runs in a network namespace that has loopback alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]
JOB = """
import json, sys, tempfile
import pytest, ray, torch
import colossalai
from colossalai.booster import Booster
from colossalai.chat import RolloutEngine
from colossalai.chat._fit import step_of
from colossalai.cluster import gather_values
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from tests.chat.test_rollout import squares
from tests.chat.tiny import PLUGINS, causal, tokenizer

colossalai.launch_from_torch({}, verbose=False)
rank, quiet = gpc.get_global_rank(), {"log_to_driver": False, "logging_level": "ERROR"}
with pytest.raises(ValueError, match="Ray is not running: start it with `ray start --head`"):
    RolloutEngine(causal(), tokenizer(), max_length=60, placement="ray")
if rank == 0:
    own = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
    context = ray.init(**own, **quiet, _temp_dir=sys.argv[2])
address = gather_values(context.address_info["address"] if rank == 0 else "")[0]
if rank == 1:
    ray.init(address=address, **quiet)
raw = causal().float()
booster = Booster(plugin=PLUGINS[sys.argv[1]]())
model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=0.01))
here = RolloutEngine(model, tokenizer(), max_length=60)
there = RolloutEngine(model, tokenizer(), max_length=60, placement="ray", resources={"num_cpus": 1})
ids = tokenizer()("3+4=" * 8).input_ids
batch = {"input_ids": torch.tensor([ids, ids])}, {"counts": torch.ones(2)}
for _ in range(3):
    params = [SamplingParams(n=2, seed=rank, max_tokens=6)]
    drawn = [engine.generate([ids], params)[0] for engine in (here, there)]
    print(json.dumps([[[each.token_ids, each.logprobs] for each in answers] for answers in drawn]))
    step_of([batch], model, optimizer, booster=booster, criterion=squares)
    here.sync()
    there.sync()
if rank == 1:
    there.close()
with pytest.raises(RuntimeError, match="weights did not reach the engine of rank 1"):
    there.sync()
there.close()
gather_values(None)  # rank 0 takes Ray along
ray.shutdown()
"""


@pytest.mark.parametrize("plan", ["ddp", "tp 2"])
def test_an_engine_elsewhere_draws_what_one_here_does(plan: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = f"ip link set lo up && exec {sys.executable} -m colossalai.cli run --nproc_per_node 2 job.py"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with tempfile.TemporaryDirectory() as folder:  # paths of its sockets have to be short
        ended = subprocess.run(
            ["unshare", "--net", "sh", "-c", f"{command} '{plan}' {folder}"],
            cwd=tmp_path,
            env={**os.environ, **token, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[[")]
    assert len(found) == 6
    for here, there in found:
        for own, other in zip(here, there, strict=True):
            assert own[0] == other[0]
            assert own[1] == pytest.approx(other[1], abs=1e-5)
    assert len({str(each[1]) for here, _ in found for each in here}) == 12
