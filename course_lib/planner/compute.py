"""Compute time of one device: matrix products by their shape, everything else by the bytes it moves.

A layer is a handful of matrix products with small kernels between them. Products are limited by arithmetic, the
kernels between them by memory: a norm does a few operations on every number it reads.

    matrix product   seconds = FLOPs / (peak x fraction(shape))
    the rest         seconds = bytes read and written / (memory bandwidth x fraction)
    any kernel       a few microseconds to begin and end

    fraction(shape) = ceiling x waves / (waves + 1/2) x k / (k + K0)      waves = tiles of the result / cores

A product is distributed over the cores in tiles of the result, and the last wave of tiles leaves cores idle, half of
them on average. When its inner loop of k steps is done, a tile of n numbers is written: 2 n bytes at a core's share of
the memory bandwidth, in the time of K0 = peak / bandwidth steps of 2 n operations. The more a device computes for each
byte it moves, the longer k has to be.

In 8 and 4 bits these products take a half and a quarter of the time, and casting to them is one more small kernel:
"fp8" has a scale for each tensor, "mxfp8" for 32 numbers, "nvfp4" for 16. Everything else stays in 16 bits: attention,
norms, embeddings, logits, gradients; and in 32 bits the optimizer with its master weights.

All of these are seconds of the device. A host that begins kernels more slowly than the device ends them makes a step
longer, and is not counted: on one H100, eager PyTorch took 63 ms for a step of 350 million parameters and 2,048 tokens
of which the kernels took 23, and the estimate is 24.

NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantization).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from course_lib.planner.hardware import Device
from course_lib.planner.spec import Matrix, ModelSpec, Slice

TILE = 128 * 256  # results that one core computes at a time: the large tile of vendors' libraries
WAVE = 0.5  # the part of the last wave of tiles that is idle on average
# Factor on the bytes where small kernels are not fused: fusing made 175B 19% faster (SC21 paper, section 5.8).
UNFUSED = 3.5
# Reads and writes of each routed copy: sorted by device, then by expert; back by device, and summed up for its token. A
# library's all-to-alls need further kernels before and after them. Fitted to published steps of mixtures.
ROUTING = {"fused": 7, "capacity": 17, "all-to-all": 17}
# Seconds that a device waits for its host in a layer with experts, and twice that in backward: after a library's
# all-to-all the host has to learn how many tokens each expert received before it can launch their products. Fitted, as
# the above, to the mean error; chosen without any one source, release, chip or model they come out the same or near.
ROUTING_WAIT = {"fused": 0.1e-3, "capacity": 0.1e-3, "all-to-all": 1.2e-3}
KERNEL = 4e-6  # seconds that a kernel needs to begin and end
BACKWARD_BYTES = 1.5  # a kernel that reads x and writes y forward, reads x and dy and writes dx backward
SIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2, "mxfp8": 2, "nvfp4": 2}  # bytes of an activation
# Bytes that are moved to cast one number: read for its scale, read to cast, written by rows for one product and by
# columns for another. At least 6, 4 and 5. Fitted to the published steps of Megatron Bridge and DGX Cloud together.
CAST = {"fp8": 8, "mxfp8": 11, "nvfp4": 14}


class Product(NamedTuple):
    """`batch` matrix products [m, k] x [k, n]."""

    m: float
    n: float
    k: float
    batch: float = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


def product_seconds(product: Product, device: Device, precision: str) -> float:
    tiles = max(1.0, product.m * product.n * product.batch / TILE)
    waves = tiles / device.cores
    writing = device.peak[precision] / device.bandwidth  # K0
    fraction = device.matmul * waves / (waves + WAVE) * product.k / (product.k + writing)
    return product.flops / (device.peak[precision] * fraction) + KERNEL


class LayerTimes(NamedTuple):
    """Seconds of one micro-batch in one layer on one device, without traffic.

    backward: gradients of the inputs.  weight_grad: those of the weights.
    selective: what "selective" recomputation computes twice: attention from the scores to their sum over the values;
        norms and the activation function where attention is one kernel, which does so anyway, and what latents are
        multiplied with.
    """

    forward: float
    backward: float
    weight_grad: float
    selective: float


def layer_times(model: ModelSpec, device: Device, cut: Slice) -> LayerTimes:
    """One layer on one of tp x cp devices, from the shapes of what each of them computes."""
    precision = cut.precision
    tokens = cut.micro_batch * model.sequence / cut.cp
    attention, attention_backward = _attention(model, device, cut)
    products = [*(product_of(matrix, tokens, cut) for matrix in model.matrices), *_expert_products(model, cut)]
    small = small_kernel_seconds(_layer_bytes(model, cut, tokens), device, cut)
    cast, cast_backward = _cast_seconds(model, device, cut)
    waits = ROUTING_WAIT[cut.dispatch] if model.experts else 0.0
    # Gradients of biases and norms are sums over all tokens, so what comes in from above is read once more.
    summed = 4 * model.hidden + (sum(p.n for p in products if p.m == tokens) if model.biases else 0)
    bias = streaming_seconds(SIZE[precision] * tokens * summed, device)
    each = [product_seconds(p, device, precision) for p in products]
    again = small_kernel_seconds(_pointwise_bytes(model, cut, tokens), device, cut)
    again += sum(each[1:3]) if model.latent else 0.0  # up to queries, keys and values
    inputs = sum(product_seconds(Product(p.m, p.k, p.n, p.batch), device, precision) for p in products)
    weights = sum(product_seconds(Product(p.k, p.n, p.m, p.batch), device, precision) for p in products)
    # The gradients of a micro-batch are added to those of the ones before: two reads and a write, and one write before.
    added = streaming_seconds(4 * SIZE[precision] * sum(p.k * p.n * p.batch for p in products), device)
    return LayerTimes(
        sum(each) + attention + small + cast + 6 * KERNEL + waits,
        inputs + attention_backward + cast_backward + BACKWARD_BYTES * small + 9 * KERNEL + 2 * waits,
        weights + added + bias,
        again if model.flash_attention else attention,
    )


def product_of(matrix: Matrix, tokens: float, cut: Slice) -> Product:
    """The product of one device. What tensor ranks do not cut they share by positions, if they share those at all."""
    by_positions = cut.tp if cut.sequence_parallel else 1
    m, n, k = {"columns": (1, cut.tp, 1), "rows": (1, 1, cut.tp), "": (by_positions, 1, 1)}[matrix.cut]
    return Product(tokens / m, matrix.outputs / n, matrix.inputs / k)


def routed_tokens(model: ModelSpec, cut: Slice) -> float:
    """Copies of tokens that the experts of the busiest device receive in one micro-batch: top-k for each token."""
    return model.active_experts * model.imbalance * cut.micro_batch * model.sequence / (cut.cp * cut.tp)


def _expert_products(model: ModelSpec, cut: Slice) -> list[Product]:
    """The products of a device's experts, each with an equal part of the copies."""
    here, copies = model.experts // cut.ep, routed_tokens(model, cut)
    return [Product(copies / here, one.outputs, one.inputs, here) for one in model.mlp(model.expert_ffn) if here]


def _cast_seconds(model: ModelSpec, device: Device, cut: Slice) -> tuple[float, float]:
    """Seconds forward and backward of casting to 8 or 4 bits: what goes into products, and gradients of what comes out.

    Tensor ranks share it: what they gather they cast before. Weights are cast once in a step, which is not counted.
    """
    if cut.precision not in CAST:
        return 0.0, 0.0
    tokens, experts = cut.micro_batch * model.sequence / (cut.cp * cut.tp), _expert_products(model, cut)
    inputs = tokens * sum(one.inputs for one in model.matrices) + sum(p.m * p.k * p.batch for p in experts)
    outputs = tokens * sum(one.outputs for one in model.matrices) + sum(p.m * p.n * p.batch for p in experts)
    n_bytes = CAST[cut.precision]
    return streaming_seconds(n_bytes * inputs, device), streaming_seconds(n_bytes * outputs, device)


def _attention(model: ModelSpec, device: Device, cut: Slice) -> tuple[float, float]:
    """Seconds forward and backward of the attention itself, between the projections."""
    precision = product_precision(cut)
    heads, width = cut.micro_batch * model.heads / cut.tp, model.attention_width // model.heads
    rows = model.sequence / cut.cp
    scores = Product(rows, model.sequence, width, heads)
    # One kernel, which skips the masked half; backward recomputes the scores: 5 products, not 2.
    if model.flash_attention:
        seconds = scores.flops / (device.peak[precision] * device.attention) + KERNEL
        return seconds, 2.5 * seconds
    mix = Product(rows, width, model.sequence, heads)
    through = [scores, mix, Product(rows, width, model.sequence, heads), Product(model.sequence, width, rows, heads)]
    n_bytes = SIZE[cut.precision] * heads * rows * model.sequence * (4.5 if model.dropout else 2)
    small = small_kernel_seconds(n_bytes, device, cut) + 2 * KERNEL
    forward = product_seconds(scores, device, precision) + product_seconds(mix, device, precision)
    backward = sum(product_seconds(p, device, precision) for p in through)
    return forward + small, backward + BACKWARD_BYTES * small


def _layer_bytes(model: ModelSpec, cut: Slice, tokens: float) -> float:
    """Bytes that a layer's small kernels read and write forward, attention apart.

    Two norms read and write; two sums of the residual stream read two and write one (and a mask of one byte);
    queries, keys, values and what attention makes of them are laid out anew; the MLP's activation function.
    """
    sums = (6 + (1 if model.dropout else 0)) * model.hidden / (cut.tp if cut.sequence_parallel else 1)
    layout = 2 * (2 * model.attention_width + 2 * model.key_value_width) / cut.tp
    moved = tokens * (sums + layout) + ROUTING[cut.dispatch] * routed_tokens(model, cut) * model.hidden
    return SIZE[cut.precision] * moved + _pointwise_bytes(model, cut, tokens)


def _pointwise_bytes(model: ModelSpec, cut: Slice, tokens: float) -> float:
    """Bytes of the two norms and the activation function."""
    norms = 4 * model.hidden / (cut.tp if cut.sequence_parallel else 1)
    experts = routed_tokens(model, cut) * (2 + model.gated_mlp) * model.expert_ffn
    return SIZE[cut.precision] * (tokens * (norms + (model.up_width + model.mlp_width) / cut.tp) + experts)


def product_precision(cut: Slice) -> str:
    """8 and 4 bits are for a layer's products with weights; attention and logits stay at 16."""
    return "bf16" if cut.precision in CAST else cut.precision


def streaming_seconds(n_bytes: float, device: Device) -> float:
    return n_bytes / (device.bandwidth * device.streaming)


def small_kernel_seconds(n_bytes: float, device: Device, cut: Slice) -> float:
    return streaming_seconds(n_bytes, device) * (1 if cut.fused else UNFUSED)


@lru_cache(maxsize=4096)
def logits_times(model: ModelSpec, device: Device, cut: Slice) -> tuple[float, float, float]:
    """Seconds forward, backward and weight_grad of the last product and the loss, whose numbers are 32 bits wide."""
    tokens, vocab, precision = cut.micro_batch * model.sequence / cut.cp, model.vocab / cut.tp, product_precision(cut)
    loss = streaming_seconds(4 * tokens * vocab, device)
    forward = product_seconds(Product(tokens, vocab, model.hidden), device, precision)
    backward = product_seconds(Product(tokens, model.hidden, vocab), device, precision)
    weights = product_seconds(Product(model.hidden, vocab, tokens), device, precision)
    return forward + 4 * loss, backward + 2 * loss, weights
