"""The memory of a device at the fullest moment of a step, in bytes by part.

    parameters   gradients   optimizer        by precision; sharded over data ranks by ZeRO stage 3, 2, 1
    bf16, fp16       2        2 (or 4)   12   32-bit master copy and two moments of Adam: 16 (or 18) bytes a parameter
    fp32             4           4        8   two moments: 16 bytes too
    activations                               kept by forward for backward: layers x micro-batches in flight
    logits                                    on the last stage, for one micro-batch, as wide as the vocabulary
    buffers                                   messages, buckets and what ZeRO-2 and 3 unshard for a moment
    margin                                    all that is not a tensor: driver, communication library, fragments

Rajbhandari et al. 2020, "ZeRO" (SC20), section 3 and table 1; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4; Megatron-LM's theoretical_memory_usage.py (18 bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from course_lib.planner.bubbles import in_flight
from course_lib.planner.compute import SIZE, routed_tokens
from course_lib.planner.hardware import GiB
from course_lib.planner.spec import Depth, ModelSpec, Parameters, Plan, Slice, layers_of_stages

BUCKET = 25 * 2**20  # bytes of gradients that are sent together
# The margin is fitted to what nvidia-smi showed in BLOOM's chronicles (57, 53 and 40 GB), a quarter above the tensors.
DRIVER = 1 * GiB  # its context and the libraries' code
CHANNELS = GiB // 2  # what the communication library keeps for each group that a device is in
FRAGMENTS = 0.10  # share of all tensors: holes that the allocator cannot fill


class StateBytes(NamedTuple):
    """Bytes of a parameter, of its gradient and of its optimizer state (Adam)."""

    parameter: int
    gradient: int
    optimizer: int


RECIPES = {
    "bf16": StateBytes(2, 2, 12),
    "fp16": StateBytes(2, 2, 12),
    "fp32": StateBytes(4, 4, 8),
    "mxfp8": StateBytes(3, 2, 12),
    "nvfp4": StateBytes(3, 2, 12),
    "fp8": StateBytes(3, 2, 12),  # products in 8 bits: a copy of the weights beside the 16-bit ones
}


def recipe(plan: Plan) -> StateBytes:
    bytes_of = RECIPES[plan.precision]
    return bytes_of._replace(gradient=4) if plan.fp32_gradients else bytes_of


class Memory(NamedTuple):
    """Bytes on one device at its fullest, by purpose. `rank` is its place in the pipeline."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    margin: float
    rank: int = 0

    @property
    def parts(self) -> dict[str, float]:
        return {name: value for name, value in self._asdict().items() if name != "rank"}

    @property
    def total(self) -> float:
        return self.tensors + self.margin

    @property
    def tensors(self) -> float:
        """Bytes that an allocator counts as allocated."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers


def memory_of_worst_device(model: ModelSpec, plan: Plan, n_micro_batches: int) -> Memory:
    """The memory of the fullest device. All devices of one pipeline rank are alike."""
    return max(memory_of(candidates(model, plan.depth), model, plan, n_micro_batches), key=lambda memory: memory.total)


def memory_of(ranks: Iterable[int], model: ModelSpec, plan: Plan, n_micro_batches: int) -> Iterator[Memory]:
    """The memory of a device of each of these pipeline ranks."""
    tokens = plan.micro_batch * model.sequence / plan.cp
    whole = 1 / plan.tp if plan.sequence_parallel else 1.0  # not cut by tensor parallelism alone
    again, kept = (layer_activations(model, plan.slice, recompute) for recompute in (plan.recompute, "none"))
    of_layer = plan.recomputed * again + (1 - plan.recomputed) * kept
    buffers = _buffers(model, plan, tokens, whole)
    libraries = DRIVER + CHANNELS * sum(size > 1 for size in (plan.tp, plan.cp, plan.dp * plan.cp, plan.pp, plan.ep))
    for rank in ranks:
        held, layers, is_first, is_last = rank_shape(model, plan.depth, rank)
        everywhere = model_state(share(held.cut, plan.tp) + held.whole, plan)
        experts = model_state(held.routed // plan.ep, plan, plan.expert_sharing)
        parameters, gradients, optimizer = map(sum, zip(everywhere, experts, strict=True))
        micro_batches = in_flight(plan, rank, n_micro_batches) / plan.virtual_stages
        activations = micro_batches * layers * of_layer
        if plan.recompute == "full":  # the layer that is being computed again
            activations += kept
        if is_first and model.dropout:
            activations += micro_batches * tokens * model.hidden * whole
        logits = _logits(model, plan, tokens, whole) if is_last else 0.0
        margin = FRAGMENTS * (parameters + gradients + optimizer + activations + logits + buffers)
        yield Memory(parameters, gradients, optimizer, activations, logits, buffers, margin + libraries, rank)


def model_state(parameters: int, plan: Plan, sharing: int | None = None) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state on a device that has so many parameters before ZeRO.

    sharing: over how many replicas ZeRO shards them; None: over the plan's, which are not those of experts.
    """
    size, shared = recipe(plan), share(parameters, sharing or plan.sharing)
    return (
        size.parameter * (shared if plan.zero >= 3 else parameters),
        size.gradient * (shared if plan.zero >= 2 else parameters),
        size.optimizer * (shared if plan.zero >= 1 else parameters),
    )


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
def candidates(model: ModelSpec, depth: Depth) -> list[int]:
    """The ranks that can be the fullest: earlier ones hold more activations, so the first of each number of layers."""
    first_with: dict[int, int] = {}
    for rank in range(depth.pp):
        first_with.setdefault(rank_shape(model, depth, rank)[1], rank)
    return sorted({0, depth.pp - 1, *first_with.values()})


@lru_cache(maxsize=4096)
def layer_activations(model: ModelSpec, cut: Slice, recompute: str) -> float:
    """Bytes that one layer keeps for backward of one micro-batch.

    Without recomputation, for GPT in 16 bits with dropout: s b h (10 + 24 / t + 5 a s / h t), the paper's equation 2
    (34 s b h + 5 a s^2 b on one device); with sequence parallelism all of it is divided by t, its equation 4.
    Selective recomputation drops what takes much memory and little computing: the scores, or, where attention keeps
    none, what norms and the activation function make. No published figure stands behind the latter: it is assumed for
    Llama 3 405B, which frees tensors early that its paper does not name, and does not fit without (82 to 89 of 80 GiB).
    """
    tokens, size, h = cut.micro_batch * model.sequence / cut.cp, SIZE[cut.precision], model.hidden
    mask = 1 if model.dropout else 0
    again = recompute == "selective" and model.flash_attention  # what norms and the activation function make
    norms = (2 if again else 4) * size
    whole = tokens * h * (norms + 2 * mask) / (cut.tp if cut.sequence_parallel else 1)  # into and out of norms; masks
    if recompute == "full":
        return tokens * h * size / (cut.tp if cut.sequence_parallel else 1)
    # Queries, keys, values, and what goes into `out`.
    heads = tokens * size * (2 * model.attention_width + 2 * model.key_value_width)
    mlp = tokens * size * (model.up_width + (0 if again else model.mlp_width))
    scores = 0.0
    if not model.flash_attention and recompute == "none":  # after softmax, the mask, and after dropout
        scores = tokens * model.sequence * model.heads * (size + mask * (1 + size))
    experts = model.hidden + (model.gates + (0 if again else 1)) * model.expert_ffn  # inputs, too: they are copies
    return whole + (heads + mlp + scores) / cut.tp + routed_tokens(model, cut) * size * experts


def _logits(model: ModelSpec, plan: Plan, tokens: float, whole: float) -> float:
    """Bytes of one micro-batch: inputs of the norm and of the product, the logits, and their softmax in 32 bits."""
    size = SIZE[plan.precision]
    return tokens * (2 * size * model.hidden * whole + (size + 4) * model.vocab / plan.tp)


def _buffers(model: ModelSpec, plan: Plan, tokens: float, whole: float) -> float:
    """Bytes of temporary buffers.

    Gradients of the widest thing in a layer, while its backward is computed; messages between stages; a gathered
    input under sequence parallelism; a bucket of gradients, or under ZeRO-2 in a pipeline those of a stage; the layers
    that ZeRO-3 gathers.
    """
    size, layer = recipe(plan), model.layer_parameters
    held = layer.cut / plan.tp + layer.whole + layer.routed / plan.ep
    message = tokens * model.hidden * SIZE[plan.precision]
    scores = 0.0 if model.flash_attention else tokens * model.sequence * model.heads
    copies = routed_tokens(model, plan.slice) * max(model.hidden, model.gates * model.expert_ffn)
    total = 2 * SIZE[plan.precision] * (max(scores, tokens * model.up_width) / plan.tp + copies)
    total += 2 * message * whole if plan.pp > 1 else 0.0
    total += message if plan.sequence_parallel else 0.0
    if plan.dp * plan.cp > 1:
        total += BUCKET
    if plan.zero >= 2 and plan.pp > 1:  # summed over consecutive micro-batches
        total += held * size.gradient * -(-model.layers // plan.depth.n_stages)
    if plan.zero == 3:  # parameters of this layer and the next, gradients of this one
        total += held * (2 * size.parameter + size.gradient)
    return total
