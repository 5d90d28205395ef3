"""A program: a model behind two replicas of Ray Serve on this machine, until a line comes in."""

import json
import sys
import tempfile

import ray
from ray import serve

from docs.deploy.ray_serve import make


def run(folder: str, port: int, key_file: str) -> None:
    """Serve a folder, say so, and wait for a line."""
    args = {"model": folder, "replicas": "2", "kv_memory": str(2**24), "api_key_file": key_file}
    with tempfile.TemporaryDirectory(prefix="ray_", dir="/tmp") as temporary:  # paths of sockets are short
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temporary)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(make(args), name="served")
            sys.stdout.write(json.dumps({"ready": port}) + "\n")
            sys.stdout.flush()
            sys.stdin.readline()
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
