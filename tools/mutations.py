"""Break the core in twenty ways, and check that tests find each.

    python tools/mutations.py                     # all, in half an hour
    python tools/mutations.py 3 7 --json found.json

Each mutation replaces one line of a copy of the last commit: a sign, a
divisor, an axis, a missing reduction, a skipped wait. The tests beside it
then have to fail. The exit code is 1 if a mutation is not found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1800.0  # of the tests of one mutation; a skipped reduction can hang


@dataclass(frozen=True)
class Mutation:
    """One wrong line.

    Attributes:
        fault: What is wrong then.
        path: The file, in the package.
        old: The text that is replaced, which the file has once.
        new: The replacement.
        tests: The tests that have to find it.
    """

    fault: str
    path: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "DDP divides gradients twice",
        "nn/parallel/_reducer.py",
        "bucket.flat.div_(bucket.sync.divisor)",
        "bucket.flat.div_(bucket.sync.divisor**2)",
        "tests/nn tests/parity",
    ),
    Mutation(
        "ZeRO adds sections instead of averaging them",
        "zero/_exchange.py",
        "return torch.div(own, divisor, out=out)",
        "return torch.div(own, 1, out=out)",
        "tests/zero tests/parity",
    ),
    Mutation(
        "ZeRO reads gathered weights before they have come",
        "zero/_weights.py",
        "            wait()  # for the sections of the other ranks",
        "            pass",
        "tests/zero tests/parity",
    ),
    Mutation(
        "Gemini scales its gradients the wrong way",
        "zero/_bucket_grads.py",
        "            self.slice *= factor",
        "            self.slice /= factor",
        "tests/zero tests/parity",
    ),
    Mutation(
        "clipping enlarges small gradients",
        "amp/_gradients.py",
        "(norm + 1e-6)).clamp(max=1.0))",
        "(norm + 1e-6)).clamp(min=1.0))",
        "tests/amp tests/parity",
    ),
    Mutation(
        "the norm of cut parameters misses the other ranks",
        "tensor/_norm.py",
        "            dist.all_reduce(part, op=op, group=process_group)",
        "            pass",
        "tests/tensor tests/amp tests/parity",
    ),
    Mutation(
        "a tensor-parallel linear layer adds no terms of other ranks",
        "nn/layer/tensor_parallel/_linear.py",
        "y = all_reduce_in_place(functional.linear(x, w.t()), reduce_y)",
        "y = functional.linear(x, w.t())",
        "tests/parity tests/nn",
    ),
    Mutation(
        "it adds no gradients of weights that other ranks hold, too",
        "nn/layer/tensor_parallel/_linear.py",
        "                dw = all_reduce(dw, ctx.copy_w)",
        "                pass",
        "tests/parity tests/nn",
    ),
    Mutation(
        "the softmax over cut classes has its own largest logit",
        "nn/loss/_cross_entropy.py",
        "            largest = all_reduce(largest, axis, torch.distributed.ReduceOp.MAX)",
        "            pass",
        "tests/nn/test_parallel_loss.py",
    ),
    Mutation(
        "label smoothing has the wrong sign",
        "nn/loss/_chunks.py",
        "values.sub_(smoothing / terms.vocabulary.num_classes * scale)",
        "values.add_(smoothing / terms.vocabulary.num_classes * scale)",
        "tests/nn/test_linear_cross_entropy.py",
    ),
    Mutation(
        "the balance of experts is that of one rank",
        "nn/layer/moe/_balance.py",
        "            counts = all_reduce(counts, replicas)",
        "            pass",
        "tests/nn/layer/moe tests/parity",
    ),
    Mutation(
        "results of experts come back to other tokens",
        "nn/layer/moe/_dispatch.py",
        "    return _added(compute(rows, counts.tolist()), weights, slots)",
        "    return _added(compute(rows, counts.tolist()).flip(0), weights, slots)",
        "tests/nn/layer/moe tests/parity",
    ),
    Mutation(
        "stages keep their own gradients of a tied weight",
        "pipeline/stages/_tied_weights.py",
        "        param.grad = all_reduce_in_place(grad, share.axis)",
        "        param.grad = grad",
        "tests/pipeline tests/parity",
    ),
    Mutation(
        "ring attention scales its scores by the head size",
        "nn/layer/sequence_parallel/_ring_attention.py",
        "scale=1.0 / math.sqrt(head_size) if scale is None else scale,",
        "scale=1.0 / head_size if scale is None else scale,",
        "tests/nn tests/parity",
    ),
    Mutation(
        "a short window of accumulation stays scaled",
        "runtime/_accumulation.py",
        "            self.scale_grads(1.0 / factor)",
        "            self.scale_grads(factor)",
        "tests/runtime tests/booster tests/engine",
    ),
    Mutation(
        "ranks read sums in shared memory before they are complete",
        "communication/shared_memory/_collectives.py",
        "            slots.wait(REDUCED)  # the sums of all sections are complete; the next line copies them",
        "            pass",
        "tests/communication",
    ),
    Mutation(
        "a loaded part comes from the place of its own tensor",
        "checkpoint_io/resharding/_tensors.py",
        "target = common.moved(box.offsets, sign=-1).of(out)",
        "target = common.moved(shard.box.offsets, sign=-1).of(out)",
        "tests/checkpoint_io",
    ),
    Mutation(
        "all ranks along dp draw the same random numbers",
        "context/_random.py",
        'data_seed = mix_seed(seed, "data", dp_rank, pp_rank)',
        'data_seed = mix_seed(seed, "data", 0, pp_rank)',
        "tests/context tests/parity",
    ),
    Mutation(
        "gradients under a loss scale are multiplied by it",
        "amp/_gradients.py",
        "            self._factor = 1.0 / scale",
        "            self._factor = scale",
        "tests/amp",
    ),
    Mutation(
        "only one rank learns of an overflow",
        "amp/_loss_scaling.py",
        "        dist.all_reduce(finding, op=dist.ReduceOp.MAX, group=group)",
        "        pass",
        "tests/amp tests/zero",
    ),
]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation.

    Attributes:
        number: Its number, from 1.
        fault: What was wrong.
        found_by: The first test that failed; empty if all passed.
        seconds: Until then.
    """

    number: int
    fault: str
    found_by: str
    seconds: float


def make_copy(folder: Path) -> None:
    """Write the files of the last commit into a folder."""
    archive = subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "x"], cwd=folder, stdin=archive.stdout, check=True)
    if archive.wait():
        raise SystemExit("git archive has failed: is this a checkout?")


def apply(mutation: Mutation, folder: Path) -> str:
    """Write a mutation into a copy; return the text of the file before."""
    path = folder / "colossalai" / mutation.path
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.path} has {text.count(mutation.old)} times what {mutation.fault!r} replaces"
        )
    path.write_text(text.replace(mutation.old, mutation.new))
    return text


def first_failure(folder: Path, tests: str) -> str:
    """Run tests of a copy until one fails; return its name, empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not cluster and not long"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": LIMIT_S}
    try:
        done = subprocess.run([*command, *tests.split()], check=False, **options)
    except subprocess.TimeoutExpired:
        return "(a hang)"
    lines = done.stdout.splitlines()
    failed = [
        line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))
    ]
    if done.returncode and not failed:
        raise SystemExit(f"the tests do not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0] if failed else ""


def main() -> None:
    """Parse the command line, run, and print a line for each mutation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = range(1, len(MUTATIONS) + 1)
    parser.add_argument(
        "numbers", type=int, nargs="*", help=f"which ones, 1 to {len(MUTATIONS)}; default: all"
    )
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    options = parser.parse_args()
    if unknown := set(options.numbers) - set(numbers):
        parser.error(
            f"no such mutation: {', '.join(map(str, sorted(unknown)))}; there are 1 to {len(MUTATIONS)}"
        )
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        make_copy(Path(folder))
        for number in options.numbers or numbers:
            mutation = MUTATIONS[number - 1]
            text = apply(mutation, Path(folder))
            begun = time.monotonic()
            found_by = first_failure(Path(folder), mutation.tests)
            verdicts.append(Verdict(number, mutation.fault, found_by, round(time.monotonic() - begun, 1)))
            (Path(folder) / "colossalai" / mutation.path).write_text(text)
            print(f"{number:2} {mutation.fault}: {found_by or 'NOT FOUND'}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in verdicts], indent=2) + "\n")
    num_found = sum(bool(each.found_by) for each in verdicts)
    print(f"{num_found} of {len(verdicts)} found")
    raise SystemExit(num_found < len(verdicts))


if __name__ == "__main__":
    main()
