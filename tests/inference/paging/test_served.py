"""Models that are served: what they compute in pages is what they compute plainly; all others are refused."""

import logging
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from colossalai.inference import Request, SamplingParams
from colossalai.inference._llm import LLM
from colossalai.inference.paging import Runner, StepArrays, check_model
from colossalai.inference.products import make_faster
from colossalai.inference.products._faster import FastBlock, FastModel
from colossalai.inference.scheduling import BlockPool, RunningSequence, Scheduler
from tests.inference.models import greedy, prompts, tiny

pytestmark = pytest.mark.unit

VOCAB = 100
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
SHARED = SIZES | {"num_key_value_heads": 2}
FAMILIES = {
    "Llama": SHARED,
    "Mistral": SHARED | {"sliding_window": 7},
    "Qwen2": SHARED,
    "Qwen3": SHARED | {"head_dim": 8},
    "Gemma": SIZES | {"num_key_value_heads": 1, "head_dim": 8},
    # Attention of transformers with a cap takes its softmax in float32.
    "Gemma2": SHARED | {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 3.0},
    "Gemma3": SHARED | {"head_dim": 8, "sliding_window": 6},
    "GptOss": SHARED
    | {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {
        "experts_implementation": "eager",
    },
    "GPT2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.3},
    "OPT": {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    | {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "GPTNeoX": SIZES,
    "Phi": SIZES,
    "Phi3": SHARED | {"pad_token_id": 0},
    "Mixtral": SHARED | {"num_local_experts": 4, "experts_implementation": "eager"},
}
LENGTHS = (13, 3, 6, 25)


def built(family, **more):
    import transformers

    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(0)
    sizes = FAMILIES.get(family, {}) | more
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)).double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_schedule_computes_what_plain_forwards_do(family):
    model = built(family)
    runner = Runner(model, block_size=4, device=torch.device("cpu"))
    runner.find_shapes()
    check_model(runner, VOCAB, 64)
    assert len(runner.shapes) == 3
    runner.allocate(64)
    pool = BlockPool(64, 4)
    scheduler = Scheduler(pool, max_running=4, max_tokens=10)
    generator = torch.Generator().manual_seed(1)
    for number, length in enumerate(LENGTHS):
        prompt = tuple(torch.randint(5, VOCAB, (length,), generator=generator).tolist())
        request = Request(request_id=str(number), prompt_token_ids=prompt)
        scheduler.add(RunningSequence(request, index=0, order=(0, number, 0), root=b"root"))
    worst, num_drawn = 0.0, 0
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule()
        ends = np.cumsum([len(chunk.token_ids) for chunk in step.chunks])
        drawn = [(chunk, end - 1) for chunk, end in zip(step.chunks, ends, strict=True) if chunk.num_draws]
        logits = runner.run(StepArrays.of(step, [row for _, row in drawn]))
        for (chunk, _), found in zip(drawn, logits, strict=True):
            sequence = chunk.sequence
            with torch.no_grad():
                plain = model(torch.tensor([sequence.tokens])).logits[0, -1]
            worst = max(worst, float((found - plain).abs().max() / plain.abs().max()))
            scheduler.advance(chunk, [[int(plain.argmax())]])
            num_drawn += 1
            if len(sequence.tokens) >= sequence.num_prompt + 6:
                scheduler.remove(sequence)
    assert worst < (1e-6 if family == "Gemma2" else 1e-9)
    assert num_drawn == 6 * len(LENGTHS)
    pool.check([])


# For each its sizes, and the words that the refusal has.
LFM2 = SHARED | {"layer_types": ["conv", "full_attention", "conv"]}
EXPERTS = {"num_local_experts": 2, "head_dim": 8}
FALCON = {
    name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
}
REFUSED = {
    "Lfm2": (LFM2, ["Lfm2ForCausalLM", "['conv']", "model.layers.0.conv (Lfm2ShortConv)"]),
    "Falcon": (FALCON, ["FalconForCausalLM", "its attention does not go through the attention interface"]),
    "Mamba": (
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3},
        ["MambaForCausalLM", "['linear_attention']", "backbone.layers.0 (MambaBlock)"],
    ),
    "Llama4": (
        SHARED | EXPERTS | {"attention_chunk_size": 6},
        ["Llama4TextAttention", "layer type 'chunked_attention'"],
    ),
    "GPTJ": (
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        ["GPTJForCausalLM", "transformer.h.0.attn (GPTJAttention)"],
    ),
    "Bert": ({name: SIZES[name] for name in SIZES}, ["BertSelfAttention", "is_causal=False"]),
}


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_keep_another_state_are_refused_by_name(family):
    import transformers

    sizes, words = REFUSED[family]
    config = getattr(transformers, "Llama4TextConfig" if family == "Llama4" else f"{family}Config")(**sizes)
    kind = "BertForMaskedLM" if family == "Bert" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(config).eval()
    named = model.config._attn_implementation
    with pytest.raises(ValueError, match="cannot be served") as refused:
        LLM(model, kv_memory=2**20)
    for word in words:
        assert word in str(refused.value)
    assert model.config._attn_implementation == named


def test_a_layer_that_keeps_a_state_of_its_own_is_refused():
    """Shapes and names are those of Llama; it is given away by computing something else in chunks."""
    model = tiny("Llama")

    class Remembering(type(model.model.layers[1].mlp)):
        def forward(self, x):
            return super().forward(x + functional.pad(x, (0, 0, 1, -1)))  # the token before, in this call

    model.model.layers[1].mlp.__class__ = Remembering
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM cannot be served: cut into chunks, its outputs differ"
    ):
        LLM(model, kv_memory=2**20)


def test_dropout_is_asked_to_be_off():
    model = tiny("GPT2").train()
    model.transformer.h[0].eval()  # as a frozen layer is
    before = {name: module.training for name, module in model.named_modules()}
    LLM(model, kv_memory=2**20)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert set(before.values()) == {False, True}


@pytest.fixture
def engine_and_model():
    model = tiny("Llama")
    return LLM(model, kv_memory=2**22).engine, model


def submit(engine, prompt, num_tokens):
    found = []
    request = Request(
        request_id="a",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=num_tokens, temperature=0),
    )
    engine.submit(request, lambda delta: found.extend(delta.token_ids))
    return found


def test_the_same_object_runs_plainly_between_steps(engine_and_model):
    engine, model = engine_and_model
    served, plain = prompts(30, 20)
    given = torch.tensor([plain])
    twin = tiny("Llama")
    with torch.no_grad():
        before = twin(given).logits
    text = greedy(twin, plain, 5)
    found = submit(engine, served, 8)
    for _ in range(8):
        engine.step()
        with torch.no_grad():
            assert torch.equal(model(given).logits, before)
        assert greedy(model, plain, 5) == text
    assert tuple(found) == greedy(twin, served, 8)


def test_the_same_object_runs_plainly_in_other_threads_during_steps(engine_and_model):
    engine, model = engine_and_model
    served, plain = prompts(30, 20)
    given = torch.tensor([plain, plain[::-1]])
    mask = torch.ones_like(given)
    mask[1, :4] = 0  # so that a mask is made, and counts
    twin = tiny("Llama")
    with torch.no_grad():
        before = twin(given, attention_mask=mask).logits
    expected = greedy(twin, served, 8)
    is_over = threading.Event()
    unequal, num_runs = [], 0

    def run_plainly():
        nonlocal num_runs
        while not is_over.is_set():
            with torch.no_grad():
                found = model(given, attention_mask=mask).logits
            num_runs += 1
            if not torch.equal(found, before):
                unequal.append((found - before).abs().max())

    thread = threading.Thread(target=run_plainly)
    thread.start()
    try:
        while num_runs < 30 and thread.is_alive():
            found = submit(engine, served, 8)
            while engine.has_work:
                engine.step()
            assert tuple(found) == expected
    finally:
        is_over.set()
        thread.join()
    assert not unequal
    assert num_runs >= 30, "a plain forward has failed"


def test_a_model_trains_between_steps(engine_and_model):
    engine, model = engine_and_model
    served, batch = prompts(30, 20)
    twin = tiny("Llama")
    given = torch.tensor([batch])

    def train(one):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one.train()
        loss = one(given, labels=given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        one.eval()
        return loss

    found = submit(engine, served, 6)
    for _ in range(2):
        engine.step()
    for _ in range(3):
        assert torch.equal(train(model), train(twin))
        engine.begin_again()
        engine.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    while engine.has_work:
        engine.step()
    assert len(found) == 6
    assert found[-1] == greedy(twin, [*served, *found[:-1]], 1)[0]


NUM_LAYERS = 3
FAST = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Gemma", "GPT2", "OPT")
BLOCKS_OF_ONE = ("Llama", "Qwen2", "Qwen3", "Mistral")  # replaced as a whole


def in_chunks(runner, tokens, cuts):
    """Return the logits of a sequence in a cache of its own, cut into chunks."""
    runner.allocate(16)
    found = []
    for start, end in pairwise(cuts):
        table = np.arange(-(-end // runner.block_size))
        arrays = StepArrays(
            token_ids=np.array(tokens[start:end]),
            starts=np.array([start]),
            counts=np.array([end - start]),
            table_sizes=np.array([len(table)]),
            tables=table,
            copies=np.empty((0, 2), np.int64),
            rows=np.arange(end - start),
        )
        found.append(runner.run(arrays))
    return torch.cat(found)


def check_faster(plain, fast, num_whole):
    """Make one of two equal models faster, and compare their logits.

    In float64 norms of transformers compute in float32, so that no block is found to be equal.
    """
    runner = Runner(fast, block_size=4, device=torch.device("cpu"))
    runner.find_shapes()
    assert len(make_faster(runner, VOCAB)) >= 3
    is_double = next(plain.parameters()).dtype == torch.float64
    num_blocks = sum(isinstance(part, FastBlock) for part in fast.modules())
    assert num_blocks == (0 if is_double else num_whole)
    assert isinstance(getattr(fast, "faster", None), FastModel) == (num_blocks == NUM_LAYERS)
    tokens = [token % VOCAB for token in prompts(40)[0]]
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0]
    error = (in_chunks(runner, tokens, [0, 20, 21, 22, 39, 40]) - expected).abs().max()
    assert error <= (1e-9 if is_double else 1e-4) * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", FAST)
def test_faster_parts_compute_the_same(family, dtype):
    more = {"sliding_window": None} if family == "Mistral" else {}
    plain, fast = (built(family, **more).to(dtype) for _ in range(2))
    check_faster(plain, fast, NUM_LAYERS if family in BLOCKS_OF_ONE else 0)


def test_faster_parts_keep_a_window_that_only_the_config_has():
    plain, fast = (built("Mistral").float() for _ in range(2))
    check_faster(plain, fast, 3)


def test_faster_parts_keep_the_windows_of_layers():
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    plain, fast = (built("Qwen2", **windows).float() for _ in range(2))
    check_faster(plain, fast, 3)


def test_angles_that_depend_on_more_than_positions_are_left_to_the_model():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    fast = built("Llama", rope_parameters=rope).float()
    runner = Runner(fast, block_size=4, device=torch.device("cpu"))
    runner.find_shapes()
    make_faster(runner, VOCAB)
    assert isinstance(fast.model.layers[0].faster, FastBlock)
    assert not hasattr(fast, "faster")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_angles_are_those_of_the_model(kind):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain, fast = (built("Llama", rope_parameters=rope).float() for _ in range(2))
    check_faster(plain, fast, NUM_LAYERS)


def test_a_block_that_only_looks_alike_is_left_as_it_was(caplog):
    plain, fast = built("Llama").float(), built("Llama").float()

    class LouderBlock(type(fast.model.layers[1])):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 1.01

    for model in (plain, fast):
        model.model.layers[1].__class__ = LouderBlock
    logging.getLogger("colossalai").addHandler(caplog.handler)  # it hands nothing on to the root logger
    try:
        check_faster(plain, fast, 2)
    finally:
        logging.getLogger("colossalai").removeHandler(caplog.handler)
    assert not isinstance(getattr(fast.model.layers[1], "faster", None), FastBlock)
    assert "1 parts of LlamaForCausalLM are served as they are" in caplog.text
    assert "model.layers.1 (LouderBlock)" in caplog.text
