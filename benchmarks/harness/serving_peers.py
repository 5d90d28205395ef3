"""Other engines for benchmarks/serving.py, which starts this script in a separate environment for each.

    envs/vllm/bin/python benchmarks/harness/serving_peers.py vllm FOLDER DTYPE MAX_RUNNING [int8]

The script reads a load from each line of its input, {"prompts": [[token, ...], ...], "new": [count, ...]},
answers greedily, and writes a line {"wall": seconds, "cpu": seconds}. With "int8", weights are in 8 bits
where the library supports it. Other output of a library is written to standard error. The script does not
import colossalai, which its environment can lack.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable

Answer = Callable[[list[list[int]], list[int]], object]


def vllm(folder: str, dtype: str, max_running: int, *, is_int8: bool) -> Answer:
    if is_int8:
        raise RuntimeError("it quantizes no model by itself on CPU")
    # One process and one thread, like the others.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(min(os.sched_getaffinity(0)))
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_num_seqs=max_running,
        max_model_len=4096,
        enable_prefix_caching=False,
    )

    def answer(prompts: list[list[int]], new: list[int]) -> None:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in new
        ]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = engine.generate(given, params, use_tqdm=False)
        assert [len(each.outputs[0].token_ids) for each in found] == new

    return answer


def openvino(folder: str, dtype: str, max_running: int, *, is_int8: bool) -> Answer:
    import openvino_genai as genai
    from openvino import Tensor, save_model
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    target = tempfile.mkdtemp()
    OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, load_in_8bit=is_int8
    ).save_pretrained(target)
    # The pipeline requires a tokenizer even for token inputs; any tokenizer works.
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    made.train_from_iterator(["hello world"] * 3, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    parts = convert_tokenizer(wrapped, with_detokenizer=True)
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        save_model(part, f"{target}/openvino_{name}.xml")
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs = 1, max_running
    scheduling.enable_prefix_caching = False
    hints = {
        "INFERENCE_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "KV_CACHE_PRECISION": {"float32": "f32", "bfloat16": "bf16"}[dtype],
    }
    if not is_int8:  # otherwise activations are quantized to 8 bits, its default
        hints["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    pipeline = genai.ContinuousBatchingPipeline(target, scheduling, "CPU", hints)

    def answer(prompts: list[list[int]], new: list[int]) -> None:
        configs = []
        for count in new:
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = count
            config.ignore_eos, config.do_sample = True, False
            configs.append(config)
        found = pipeline.generate([Tensor([prompt]) for prompt in prompts], configs)
        assert [len(each.m_generation_ids[0]) for each in found] == new

    return answer


def ctranslate2(folder: str, dtype: str, max_running: int, *, is_int8: bool) -> Answer:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        """Converter for a model without a tokenizer: the vocabulary consists of the token numbers."""

        def load_tokenizer(self, *_: object, **__: object) -> object:
            return None

    loader = ctranslate2.converters.transformers._MODEL_LOADERS["LlamaConfig"]
    type(loader).get_vocabulary = lambda _, model, __: [str(n) for n in range(model.config.vocab_size)]
    type(loader).set_vocabulary = lambda _, spec, tokens: spec.register_vocabulary(tokens)
    type(loader).set_config = lambda *_: None
    target = tempfile.mkdtemp()
    Converter(folder).convert(target, force=True)
    kind = {"float32": "int8_float32", "bfloat16": "int8_bfloat16"}[dtype] if is_int8 else dtype
    generator = ctranslate2.Generator(target, compute_type=kind, inter_threads=1, intra_threads=1)

    def answer(prompts: list[list[int]], new: list[int]) -> None:
        given = [[str(token) for token in prompt] for prompt in prompts]
        longest = max(new)
        found = generator.generate_batch(
            given,
            max_length=longest,
            min_length=longest,
            max_batch_size=max_running,
            end_token=[],
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        assert len(found) == len(prompts)

    return answer


def main() -> None:
    name, folder, dtype, max_running, *words = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = {"vllm": vllm, "openvino": openvino, "ctranslate2": ctranslate2}[name](
        folder, dtype, int(max_running), is_int8="int8" in words
    )
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        answer(load["prompts"], load["new"])
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(seconds), file=out, flush=True)


if __name__ == "__main__":
    main()
