"""Published models, for lessons and scenarios to plan with."""

from __future__ import annotations

from functools import partial

from course_lib.planner.spec import ModelSpec

# Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1: layers, hidden, heads; with heads that divide
# the hidden size, and a hidden size that they divide, where the table's do not.
_SHAPES = {
    "125M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "760M": (24, 1536, 16),
    "1.3B": (24, 2048, 16),
    "2.7B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "175B": (96, 12288, 96),
}
GPT3 = {name: ModelSpec(*shape, sequence=2048, vocab=50257, flash_attention=True) for name, shape in _SHAPES.items()}

# Llama Team 2024, "The Llama 3 Herd of Models", table 3: layers, hidden, heads and sequence.
_llama3 = partial(ModelSpec, kv_heads=8, vocab=128256, gated_mlp=True, tied_embeddings=False, flash_attention=True)
LLAMA3 = {
    "70B": _llama3(80, 8192, 64, 8192, ffn_hidden=28672),
    "405B": _llama3(126, 16384, 128, 8192, ffn_hidden=53248),
}

_sparse = partial(ModelSpec, gated_mlp=True, tied_embeddings=False, flash_attention=True)
_qwen3 = partial(_sparse, kv_heads=4, head_width=128, sequence=4096, vocab=151936, experts=128, active_experts=8)
MIXTURES = {
    # Jiang et al. 2024, "Mixtral of Experts", table 1.
    "Mixtral 8x7B": _sparse(32, 4096, 32, 4096, 32000, kv_heads=8, experts=8, active_experts=2, expert_ffn=14336),
    # Qwen Team 2025, "Qwen3 Technical Report", table 2; widths from the published config.json.
    "Qwen3 30B": _qwen3(48, 2048, 32, expert_ffn=768),
    "Qwen3 235B": _qwen3(94, 4096, 64, expert_ffn=1536),
    # OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2. Half of its layers attend to 128 positions only;
    # here all of them attend to all.
    "GPT OSS 120B": _sparse(
        36, 2880, 64, 4096, 201088, kv_heads=8, head_width=64, biases=True, experts=128, active_experts=4, expert_ffn=2880
    ),
    # DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 4.2, without multi-token prediction.
    "DeepSeek V3": _sparse(
        61, 7168, 128, 4096, 129280, ffn_hidden=18432, head_width=128, latent=(1536, 512, 64),
        experts=256, active_experts=8, expert_ffn=2048, shared_experts=1, dense_layers=3,
    ),
}  # fmt: skip
