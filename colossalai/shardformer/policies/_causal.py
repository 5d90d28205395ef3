"""Policy of causal models of transformers that are not cut: which layer's outputs go to their loss alone."""

from colossalai.shardformer.policies._rule import Policy, Rule

_FAMILIES = {
    **dict.fromkeys(("Gemma", "Mixtral", "Olmo", "Olmo2", "Phi3", "Starcoder2"), ""),
    **{"CodeGen": "codegen", "GPTBigCode": "gpt_bigcode", "GPTJ": "gptj", "GPTNeo": "gpt_neo"},
    **{"Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe", "SmolLM3": "smollm3"},
    **{"StableLm": "stablelm"},
}

CAUSAL: Policy = {
    f"transformers.models.{module}.modeling_{module}.{family}ForCausalLM": Rule(loss_head="lm_head")
    for family, module in ((family, name or family.lower()) for family, name in _FAMILIES.items())
}
