"""The memory of a device at the fullest moment of a step, in bytes by part, and whether it fits.

    parameters   gradients   optimizer        by precision; sharded over data ranks by ZeRO stage 3, 2, 1
    bf16, fp16       2        2 (or 4)   12   32-bit master copy and two moments of Adam: 16 (or 18) bytes a parameter
    fp32             4           4        8   two moments: 16 bytes too
    activations                               kept by forward for backward: layers x micro-batches in flight
    logits                                    on the last stage, for one micro-batch, as wide as the vocabulary
    buffers                                   messages, buckets, a layer's backward, what ZeRO-2 and 3 unshard
    margin                                    all that is not a tensor: driver, communication library, holes

Software differs in what it keeps. These are what lean software does (Megatron-LM: the loss and the activation function
in one kernel each); `plain` is what software without such kernels keeps besides (torchtitan, DeepSpeed):

    low  =  tensors x e^-SPREAD              high  =  (tensors + plain) x holes x e^SPREAD      and driver, libraries
    fits, if all of this is below what the device has; may fit, if only `low` is; does not fit otherwise

Rajbhandari et al. 2020, "ZeRO" (SC20), section 3 and table 1; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4; Megatron-LM's theoretical_memory_usage.py (18 bytes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

from course_lib.planner.bubbles import in_flight
from course_lib.planner.compute import CAST, SIZE, routed_tokens
from course_lib.planner.hardware import GiB
from course_lib.planner.spec import Depth, ModelSpec, Parameters, Plan, Slice, layers_of_stages

BUCKET = 25 * 2**20  # bytes of gradients that are sent together
DRIVER = 1 * GiB  # its context, the libraries' code, and what the device keeps for itself
CHANNELS = GiB // 2  # what the communication library keeps for each group that a device is in
HOLES = 0.03  # share of all tensors that the allocator cannot fill: 1.0, 1.5 and 5.3% (nanotron/old_bench, 2024)
# How far nine in ten measured steps are outside of what lean and plain software need, in logarithms
# (tests/planner/test_memory_interval.py fits it).
SPREAD = 0.12
PLAIN_LOSS = 8  # bytes of a logit besides: a copy in 32 bits, and its gradient
Pair: TypeAlias = "tuple[int, int]"  # for parameters in every layer, and for those of experts
Fit = Literal["fits", "may fit", "does not fit"]
FITS: tuple[Fit, ...] = get_args(Fit)


class StateBytes(NamedTuple):
    """Bytes of a parameter, of its gradient and of its optimizer state (Adam)."""

    parameter: int
    gradient: int
    optimizer: int


RECIPES = {
    **dict.fromkeys(("bf16", "fp16"), StateBytes(2, 2, 12)),
    "fp32": StateBytes(4, 4, 8),
    # Products in 8 bits or fewer: a copy of the weights beside the 16-bit ones.
    **dict.fromkeys(("fp8", "mxfp8", "nvfp4"), StateBytes(3, 2, 12)),
}


def recipe(plan: Plan) -> StateBytes:
    bytes_of = RECIPES[plan.precision]
    return bytes_of._replace(gradient=4) if plan.fp32_gradients else bytes_of


class Memory(NamedTuple):
    """Bytes on one device at its fullest, by purpose. `rank` is its place in the pipeline.

    The first six are what lean software allocates.  plain: what plain software keeps besides, see `_plain`.
    libraries: what communication keeps outside of tensors.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    plain: float = 0.0
    libraries: float = 0.0
    rank: int = 0

    @property
    def parts(self) -> dict[str, float]:
        return {**dict(zip(self._fields[:6], self[:6], strict=True)), "margin": self.margin}

    @property
    def tensors(self) -> float:
        """Bytes that the allocator of lean software counts as allocated."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def margin(self) -> float:
        return HOLES * self.tensors + DRIVER + self.libraries

    @property
    def total(self) -> float:
        return (1 + HOLES) * self.tensors + DRIVER + self.libraries

    @property
    def low(self) -> float:
        """The least that the device may need."""
        return math.exp(-SPREAD) * self.tensors + DRIVER

    @property
    def high(self) -> float:
        """The most that the device may need, with plain software."""
        return math.exp(SPREAD) * (1 + HOLES) * (self.tensors + self.plain) + DRIVER + self.libraries

    def fit(self, capacity: float) -> Fit:
        """Whether the interval lies below a capacity, around it, or above."""
        return "fits" if self.high <= capacity else "may fit" if self.low <= capacity else "does not fit"


def memory_of_worst_device(model: ModelSpec, plan: Plan, n_micro_batches: int) -> Memory:
    """The memory of the fullest device. All devices of one pipeline rank are alike."""
    return max(memory_of(candidates(model, plan.depth), model, plan, n_micro_batches), key=lambda memory: memory.total)


def memory_of(ranks: Iterable[int], model: ModelSpec, plan: Plan, n_micro_batches: int) -> Iterator[Memory]:
    """The memory of a device of each of these pipeline ranks."""
    tokens = plan.micro_batch * model.sequence / plan.cp
    whole = 1 / plan.tp if plan.sequence_parallel else 1.0  # not cut by tensor parallelism alone
    again, kept = (layer_activations(model, plan.slice, recompute) for recompute in (plan.recompute, "none"))
    of_layer = plan.recomputed * again + (1 - plan.recomputed) * kept
    lasting, once = _buffers(model, plan, tokens, whole), _backward_of_a_layer(model, plan, tokens)
    once += kept if plan.recompute == "full" else 0.0  # the layer that is being computed again
    plain_layer, sent = _plain(model, plan)
    libraries = CHANNELS * sum(size > 1 for size in (plan.tp, plan.cp, plan.dp * plan.cp, plan.pp, plan.ep))
    shares = (plan.tp, plan.ep), (plan.sharing, plan.expert_sharing)
    held = _held(tuple(ranks), model, plan.depth, *shares, recipe(plan), plan.zero)
    for rank, layers, is_first, is_last, (parameters, gradients, optimizer) in held:
        micro_batches = in_flight(plan, rank, n_micro_batches) / plan.virtual_stages
        activations = (1 - plan.offloaded) * micro_batches * layers * of_layer
        activations += micro_batches * tokens * model.hidden * whole if is_first and model.dropout else 0.0
        logits = _logits(model, plan, tokens, whole) if is_last else 0.0
        # Logits are gone when the backward of the layers begins, so only the larger of the two counts.
        buffers = lasting + max(once - logits, 0.0) + _matrices_of_ends(model, plan, is_first, is_last)
        plain = tokens * micro_batches * (layers * plain_layer + sent)
        plain += PLAIN_LOSS * tokens * model.vocab / plan.tp if is_last else 0.0
        plain += parameters if _sums_apart(plan) and plan.zero < 2 else 0.0  # 16-bit gradients of all layers
        yield Memory(parameters, gradients, optimizer, activations, logits, buffers, plain, libraries, rank)


def model_state(parameters: int, plan: Plan, sharing: int | None = None) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state on a device that has so many parameters before ZeRO.

    sharing: over how many replicas ZeRO shards them; None: over the plan's, which are not those of experts.
    """
    return _state(parameters, recipe(plan), plan.zero, sharing or plan.sharing)


def _state(parameters: int, size: StateBytes, zero: int, sharing: int) -> tuple[int, int, int]:
    held = [share(parameters, sharing) if zero >= stage else parameters for stage in (3, 2, 1)]
    return size.parameter * held[0], size.gradient * held[1], size.optimizer * held[2]


@lru_cache(maxsize=4096)
def _held(
    ranks: tuple[int, ...], model: ModelSpec, depth: Depth, cut: Pair, sharing: Pair, size: StateBytes, zero: int
) -> list[tuple[int, int, bool, bool, list[int]]]:
    """For each rank: its number, its layers, whether it has embedding and logits, and the bytes of its model state."""
    found = []
    for rank in ranks:
        held, layers, is_first, is_last = rank_shape(model, depth, rank)
        numbers = share(held.cut, cut[0]) + held.whole, held.routed // cut[1]
        states = (_state(one, size, zero, by) for one, by in zip(numbers, sharing, strict=True))
        found.append((rank, layers, is_first, is_last, [sum(part) for part in zip(*states, strict=True)]))
    return found


def share(n: int, ranks: int) -> int:
    """The largest share when n things are divided among `ranks`."""
    return -(-n // ranks)


@lru_cache(maxsize=4096)
def rank_shape(model: ModelSpec, depth: Depth, rank: int) -> tuple[Parameters, int, bool, bool]:
    """Parameters and layers of one pipeline rank, and whether it has the embedding and the logits."""
    stages, n_stages = depth.stages_of(rank), depth.n_stages
    counts = layers_of_stages(model.layers, n_stages)
    held = model.parameters_of(stages, n_stages)
    return held, sum(counts[stage] for stage in stages), 0 in stages, n_stages - 1 in stages


@lru_cache(maxsize=4096)
def candidates(model: ModelSpec, depth: Depth) -> tuple[int, ...]:
    """The ranks that can be the fullest: earlier ones hold more activations, so the first of each number of layers."""
    first_with: dict[int, int] = {}
    for rank in range(depth.pp):
        first_with.setdefault(rank_shape(model, depth, rank)[1], rank)
    return tuple(sorted({0, depth.pp - 1, *first_with.values()}))


@lru_cache(maxsize=4096)
def layer_activations(model: ModelSpec, cut: Slice, recompute: str) -> float:
    """Bytes that one layer keeps for backward of one micro-batch.

    Without recomputation, for GPT in 16 bits with dropout: s b h (10 + 24 / t + 5 a s / h t), the paper's equation 2
    (34 s b h + 5 a s^2 b on one device); with sequence parallelism all of it is divided by t, its equation 4.
    Selective recomputation drops what takes much memory and little computing: the scores, or, where attention keeps
    none, what norms and the activation function make, and queries, keys and values made of latents. No published
    figure stands behind the latter: it is assumed for Llama 3 405B, which frees tensors early that its paper does
    not name, and only may fit without.
    """
    tokens, size, h = cut.micro_batch * model.sequence / cut.cp, SIZE[cut.precision], model.hidden
    mask = 1 if model.dropout else 0
    again = recompute == "selective" and model.flash_attention  # what norms and the activation function make
    kept = 1 if cut.precision in CAST else size  # bytes of what products read: cast before it is kept
    norms = 2 * size + (0 if again else 2 * kept)
    whole = tokens * h * (norms + 2 * mask) / (cut.tp if cut.sequence_parallel else 1)  # into and out of norms; masks
    if recompute == "full":
        return tokens * h * size / (cut.tp if cut.sequence_parallel else 1)
    # Queries, keys, values, and what goes into `out`.
    heads = tokens * size * (2 * model.attention_width + 2 * model.key_value_width)
    if again and model.latent:  # the latent vectors alone, as in DeepSeek-V3 (its report, section 3.2.3)
        heads = tokens * size * (model.attention_width + cut.tp * sum(model.latent))
    mlp = tokens * (size * model.up_width + (0 if again else kept * model.mlp_width))
    scores = 0.0
    if not model.flash_attention and recompute == "none":  # after softmax, the mask, and after dropout
        scores = tokens * model.sequence * model.heads * (size + mask * (1 + size))
    # Of each copy of a token its input, what the first products make, and what the activation function leaves.
    experts = (
        kept * (model.hidden + (0 if again else model.expert_ffn)) + size * (1 + model.gated_mlp) * model.expert_ffn
    )
    return whole + (heads + mlp + scores) / cut.tp + routed_tokens(model, cut) * experts


def _logits(model: ModelSpec, plan: Plan, tokens: float, whole: float) -> float:
    """Bytes of one micro-batch: inputs of the norm and of the product, the logits, and their softmax in 32 bits."""
    size = SIZE[plan.precision]
    return tokens * (2 * size * model.hidden * whole + (size + 4) * model.vocab / plan.tp)


def _plain(model: ModelSpec, plan: Plan) -> tuple[float, float]:
    """Bytes of activations that plain software keeps besides, for each token in flight: of a layer, and of all stages.

    The gate's activation function, where it is not one kernel with the product, and what a stage has sent on.
    """
    is_again = plan.recompute == "full" or (plan.recompute == "selective" and model.flash_attention)
    width = model.mlp_width + model.active_experts * model.imbalance * model.expert_ffn
    gated = (1 - plan.recomputed * is_again) * model.gated_mlp * width / plan.tp
    sent = plan.virtual_stages * model.hidden / (plan.tp if plan.sequence_parallel else 1) if plan.pp > 1 else 0.0
    return SIZE[plan.precision] * gated, SIZE[plan.precision] * sent


def _backward_of_a_layer(model: ModelSpec, plan: Plan, tokens: float) -> float:
    """Bytes of gradients of the widest thing in a layer, while its backward is computed."""
    scores = 0.0 if model.flash_attention else tokens * model.sequence * model.heads
    copies = routed_tokens(model, plan.slice) * max(model.hidden, (1 + model.gated_mlp) * model.expert_ffn)
    return 2 * SIZE[plan.precision] * (max(scores, tokens * model.up_width) / plan.tp + copies)


def _sums_apart(plan: Plan) -> bool:
    """Whether gradients are computed in 16 bits and summed in 32, in tensors of their own."""
    return recipe(plan).gradient > SIZE[plan.precision]


def _buffers(model: ModelSpec, plan: Plan, tokens: float, whole: float) -> float:
    """Bytes of buffers that are there all the time.

    Messages between stages; a gathered input under sequence parallelism; a bucket of gradients, or under ZeRO-2 in a
    pipeline those of a stage; a layer's gradients before they are added to sums in 32 bits; the layers that ZeRO-3
    gathers.
    """
    size, parameters = recipe(plan), model.layer_parameters
    layer = parameters.cut / plan.tp + parameters.whole + parameters.routed / plan.ep
    message = tokens * model.hidden * SIZE[plan.precision]
    total = 2 * message * whole if plan.pp > 1 else 0.0
    total += message if plan.sequence_parallel else 0.0
    total += SIZE[plan.precision] * layer if _sums_apart(plan) else 0.0
    if plan.dp * plan.cp > 1:
        total += BUCKET
    if plan.zero >= 2 and plan.pp > 1:  # summed over consecutive micro-batches
        total += layer * size.gradient * -(-model.layers // plan.depth.n_stages)
    if plan.zero == 3:  # parameters of this layer and the next, gradients of this one
        total += layer * (2 * size.parameter + size.gradient)
    return total


def _matrices_of_ends(model: ModelSpec, plan: Plan, is_first: bool, is_last: bool) -> float:
    """Bytes of token embedding and logits matrix that are there for a moment: gathered, and a gradient in 16 bits."""
    n_bytes = recipe(plan).parameter * (is_first + is_last) if plan.zero == 3 else 0
    n_bytes += SIZE[plan.precision] if is_last and _sums_apart(plan) else 0
    return n_bytes * model.vocab * model.hidden / plan.tp
