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
