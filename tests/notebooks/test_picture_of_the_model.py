"""The picture of a small GPT in lesson 01 shows the parts that the model has, in the order in which it uses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any
from xml.etree import ElementTree

import torch
from torch import nn

from course_lib.model import MLP, Attention, GPTConfig, Head, TinyGPT, Transformer
from tests.notebooks.lesson import NOTEBOOKS

CONFIG = GPTConfig(layers=3)


@cache
def words() -> list[str]:
    """The texts in the picture, from left to right, and at one place from top to bottom."""
    texts = ElementTree.parse(NOTEBOOKS / "images" / "model.svg").iterfind("{*}text")
    return [text.text or "" for text in sorted(texts, key=lambda text: (int(text.attrib["x"]), int(text.attrib["y"])))]


def below(box: str) -> str:
    """The text in a box below its name."""
    return " ".join(words()[words().index(box) + 1 :][:2])


def names(part: Callable[[GPTConfig], nn.Module]) -> list[str]:
    module = part(CONFIG)
    return [name for name, _ in module.named_children()]


def called(model: nn.Module) -> list[str]:
    """The kinds of a model's parts, in the order in which their forward passes begin."""
    seen: list[str] = []
    for part in model.modules():
        part.register_forward_pre_hook(lambda module, _: seen.append(type(module).__name__))
    model(torch.zeros((1, 4), dtype=torch.long))
    return seen


def test_boxes_stand_in_the_order_of_the_model() -> None:
    boxes = [word for word in words() if word in ("tokens", "embedding", "norm", "attention", "MLP", "head", "logits")]
    assert boxes == ["tokens", "embedding", "norm", "attention", "norm", "MLP", "head", "logits"]
    kinds = {"Embedding": "embedding", "LayerNorm": "norm", "Attention": "attention", "MLP": "MLP", "Head": "head"}
    model = TinyGPT(GPTConfig(layers=1))
    # The embedding's two tables have the same kind as the whole, and the head begins with its own norm.
    order = [kinds[kind] for kind in called(model) if kind in kinds]
    assert [one for one, before in zip(order, [None, *order], strict=False) if one != before] == [*boxes[1:-1], "norm"]


def test_what_a_box_says_is_in_its_part() -> None:
    assert below("attention") == "query, key, value, then out"
    assert names(Attention) == ["query", "key", "value", "out"]
    assert below("MLP") == "up, GELU, down"
    assert names(MLP) == ["up", "down"]
    assert below("head") == "norm, then a matrix"
    assert names(Head) == ["norm", "output"]
    assert below("embedding") == "a row for each token"
    embedding: Any = TinyGPT(CONFIG).blocks[0]
    assert embedding.token.num_embeddings == CONFIG.vocab


def test_there_are_several_layers_and_hidden_states_keep_their_shape() -> None:
    assert "a layer, or transformer block: several of them, one after the other" in words()
    assert "hidden states: a row of numbers for each place in the text, always of the same shape" in words()
    blocks: Any = TinyGPT(CONFIG).blocks
    assert [type(block) for block in blocks[1:-1]] == 3 * [Transformer]
    states = [torch.zeros((2, 5), dtype=torch.long)]
    for block in blocks:
        states.append(block(states[-1]))
    assert {tuple(state.shape) for state in states[1:-1]} == {(2, 5, CONFIG.hidden)}
    assert states[-1].shape == (2, 5, CONFIG.vocab)


def test_a_residual_goes_around_attention_and_around_the_mlp() -> None:
    assert words().count("residual") == words().count("+") == 2
    layer: Any = TinyGPT(CONFIG).blocks[1]
    x = torch.randn(1, 4, CONFIG.hidden)
    after_attention = x + layer.attention(layer.attention_norm(x))
    assert torch.equal(layer(x), after_attention + layer.mlp(layer.mlp_norm(after_attention)))


def test_no_number_is_in_it_that_could_be_wrong() -> None:
    assert not re.search(r"\d", " ".join(words()))
