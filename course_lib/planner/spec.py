"""The model and how it is cut: `ModelSpec` and `Plan`.

A plan cuts one training step in up to five ways at once. Devices that communicate most have neighboring numbers:

    tensor  (tp)   inside a layer: every device has a slice of each matrix        several collectives in every layer
    context (cp)   inside a sequence: every device has some of the positions      once in every layer
    data    (dp)   across the batch: every device has some of the samples         once in a step
    pipeline (pp)  across the depth: every device has some of the layers          messages to its neighbors only
    expert (ep)    across the experts: every device has some of each layer's      four all-to-alls in every layer

    device = ((pipeline x dp + data) x cp + context) x tp + tensor

Expert ranks are no further devices: ep neighbors among the dp x cp x tp devices of a stage share its experts, whole
ones each, and dp x cp x tp / ep of these groups have the same experts.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC21);
Lepikhin et al. 2020, "GShard" (experts among data ranks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from course_lib import schedules
from course_lib.schedules import Schedule

RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4")
DISPATCH = ("fused", "capacity", "all-to-all")
OVERLAPS = ("data", "tensor", "pipeline", "experts")
V_SHAPED = ("zbv", "dualpipev")  # two stages on each rank; the second half of the model comes back up the ranks
PLANNED = tuple(schedules.SCHEDULES)
CHOICES = {"schedule": PLANNED, "recompute": RECOMPUTE, "precision": PRECISIONS, "zero": range(4), "dispatch": DISPATCH}


class Parameters(NamedTuple):
    """Numbers of parameters: those that tensor parallelism cuts, those that every tensor rank holds whole, and those
    of routed experts, which are divided among expert ranks."""

    cut: int
    whole: int
    routed: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Matrix(NamedTuple):
    """A weight matrix, and how tensor parallelism cuts it: by its "columns" (outputs), its "rows" (inputs), or not."""

    inputs: int
    outputs: int
    cut: str = ""

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only transformer; the same fields as a GPTConfig, and what they imply.

    kv_heads: heads of keys and values; None: as many as heads.  ffn_hidden: width inside the MLP; None: 4 x hidden.
    gated_mlp: three matrices in the MLP in place of two, and with them the habits of the models that have it
        (no biases, no learned positions, no dropout), unless said otherwise.
    tied_embeddings: the matrix of the logits is the token embedding.
    flash_attention: attention in one kernel that never stores its sequence x sequence scores (Dao 2023); without it
        they are computed, masked, normalized and dropped out one after the other, as everywhere before 2023.
    head_width: numbers in a head; None: hidden / heads.
    experts: MLPs of a layer among which a router chooses active_experts for each token; 0: one MLP, for all tokens.
    expert_ffn: width inside an expert.  shared_experts: further experts, for all tokens.
    dense_layers: the first layers, which have one MLP of ffn_hidden. Time and activations count them like the others.
    imbalance: tokens of the busiest expert rank, over the mean; 1: the router spreads them evenly.
    latent: multi-head latent attention (DeepSeek-V2): the widths of the vectors from which queries, and keys and values
        are made, and the part of a head that carries positions. Attention counts with the mean of its two widths.

    Raises ValueError for a shape that cannot be built.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    gated_mlp: bool = False
    tied_embeddings: bool = True
    biases: bool | None = None
    learned_positions: bool | None = None
    dropout: bool | None = None
    flash_attention: bool = False
    head_width: int | None = None
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    imbalance: float = 1.0
    latent: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocab", "kv_heads", "ffn_hidden", "head_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} has to be at least 1")
        if not bool(self.experts) <= self.active_experts <= self.experts or bool(self.experts) > self.expert_ffn:
            raise ValueError(f"{self.experts} experts need active_experts, 1 to all of them, and a width, expert_ffn")
        if self.head_width is None and self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}; choose one that does")
        if self.heads % self.key_value_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; choose one that does")
        for name in ("biases", "learned_positions", "dropout"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, not self.gated_mlp)

    def __hash__(self) -> int:
        """A hash of the fields that are never None; a search computes it a hundred thousand times."""
        return hash((self.layers, self.hidden, self.heads, self.sequence, self.vocab))

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def attention_width(self) -> int:
        """The width of all heads in attention; in latent attention the mean of its two products."""
        width = self.head_width or self.hidden // self.heads
        return self.heads * (width + (self.latent[2] // 2 if self.latent else 0))

    @property
    def key_value_width(self) -> int:
        return self.key_value_heads * self.attention_width // self.heads

    @property
    def ffn_width(self) -> int:
        return self.ffn_hidden or 4 * self.hidden

    @property
    def mlp_width(self) -> int:
        """The width of the MLP for all tokens: in a layer with experts that of the shared ones, or 0."""
        return self.shared_experts * self.expert_ffn if self.experts else self.ffn_width

    @property
    def up_width(self) -> int:
        return self.mlp_width * (1 + self.gated_mlp)

    def mlp(self, width: int) -> tuple[Matrix, ...]:
        return Matrix(self.hidden, (1 + self.gated_mlp) * width, "columns"), Matrix(width, self.hidden, "rows")

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Query, key, value | out; in latent attention down | up to queries | up to keys and values | out."""
        queries, keys_values, positions = self.latent or (0, 0, 0)
        values = self.attention_width - self.heads * positions // 2
        out = Matrix(values, self.hidden, "rows")
        if self.latent is None:
            return Matrix(self.hidden, values + 2 * self.key_value_width, "columns"), out
        up = Matrix(queries, values + self.heads * positions, "columns"), Matrix(keys_values, 2 * values, "columns")
        return Matrix(self.hidden, queries + keys_values + positions), *up, out

    @cached_property
    def dense(self) -> ModelSpec:
        """The model without experts, which its first layers look like."""
        return replace(self, experts=0, active_experts=0) if self.experts else self

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of one layer that all tokens go through."""
        router = (Matrix(self.hidden, self.experts),) if self.experts else ()
        return *self.attention_matrices, *router, *(self.mlp(self.mlp_width) if self.mlp_width else ())

    @property
    def expert_parameters(self) -> int:
        return sum(matrix.size + matrix.outputs * bool(self.biases) for matrix in self.mlp(self.expert_ffn))

    @cached_property
    def layer_parameters(self) -> Parameters:
        """One layer: query, key, value | out, up | down, and two norms (12 hidden^2 + 13 hidden in GPT)."""
        cut, whole = 0, (4 if self.biases else 2) * self.hidden
        for matrix in self.matrices:
            biases = matrix.outputs * bool(self.biases)
            cut += (matrix.size if matrix.cut else 0) + (biases if matrix.cut == "columns" else 0)
            whole += (0 if matrix.cut else matrix.size) + (0 if matrix.cut == "columns" else biases)
        return Parameters(cut, whole, self.experts * self.expert_parameters)

    @cached_property
    def parameters(self) -> int:
        """All parameters of the model; tied ones count once."""
        return self.parameters_of([0], 1).total

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses, both embeddings included."""
        idle = (self.experts - self.active_experts) * self.expert_parameters
        return self.parameters - (self.layers - self.dense_layers) * idle

    def parameters_of(self, stages: Sequence[int], n_stages: int) -> Parameters:
        """The parameters of a device with these stages. A tied matrix counts once if both its uses are there."""
        counts = layers_of_stages(self.layers, n_stages)
        dense = [min(counts[stage], max(self.dense_layers - sum(counts[:stage]), 0)) for stage in stages]
        layers = sum(counts[stage] for stage in stages) - sum(dense)
        each = zip(self.layer_parameters, self.dense.layer_parameters, strict=True)
        cut, whole, routed = (layers * numbers + sum(dense) * first for numbers, first in each)
        if 0 in stages:  # token vectors, which are cut by vocabulary, and learned positions
            cut += self.vocab * self.hidden
            whole += self.sequence * self.hidden if self.learned_positions else 0
        if n_stages - 1 in stages:  # the last norm, before the logits
            whole += self.hidden * (2 if self.biases else 1)
            cut += self.vocab * self.hidden if not self.tied_embeddings or 0 not in stages else 0
        return Parameters(cut, whole, routed)

    def layer_flops(self, tokens: int) -> float:
        """Forward FLOPs of a layer, on average; of attention as if nothing were masked, as in all published figures."""
        first, others = (sum(matrix.size for matrix in one.matrices) for one in (self.dense, self))
        others += self.active_experts * self.expert_parameters
        matrices = others + (first - others) * self.dense_layers / self.layers
        return 2.0 * tokens * matrices + 4.0 * tokens * self.sequence * self.attention_width

    def step_flops(self, global_batch: int) -> float:
        """FLOPs that one step needs, forward and backward (3 x forward), without recomputation.

        For GPT it is 72 B s l h^2 (1 + s / 6h + V / 12lh), the paper's equation 3 without its recomputation.
        """
        tokens = global_batch * self.sequence
        return 3 * (self.layers * self.layer_flops(tokens) + 2.0 * tokens * self.hidden * self.vocab)

    def recomputed_flops(self, global_batch: int, recompute: str) -> float:
        """FLOPs of a step that are computed a second time."""
        tokens = global_batch * self.sequence
        if recompute == "full":
            return self.layers * self.layer_flops(tokens)
        if recompute == "selective" and not self.flash_attention:
            return self.layers * 4.0 * tokens * self.sequence * self.attention_width
        return 0.0


def divides_evenly(layers: int, n_stages: int) -> bool:
    """Whether all stages get the same, with embedding and logits counted as one layer each if need be."""
    return layers % n_stages == 0 or (layers + 2) % n_stages == 0


def layers_of_stages(layers: int, n_stages: int) -> list[int]:
    """Layers on each stage: equal if they divide evenly.

    Otherwise embedding and logits count as one layer each, so that the first and the last stage have one layer less
    (BLOOM: 70 layers on 12 stages are 5, ten times 6, 5), and what remains goes to the stages in the middle.
    """
    if layers % n_stages == 0:
        return [layers // n_stages] * n_stages
    each, extra = divmod(layers + 2, n_stages)
    first = (n_stages - extra) // 2
    counts = [each + (first <= stage < first + extra) for stage in range(n_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


class Slice(NamedTuple):
    """The part of a plan that decides the cost of one micro-batch in one layer. Thousands of plans share a slice."""

    tp: int
    cp: int
    micro_batch: int
    sequence_parallel: bool
    recompute: str
    precision: str
    hides_tensor: bool
    fused: bool
    recomputed: float
    ep: int = 1
    hides_experts: bool = False
    dispatch: str = "fused"
    offloaded: float = 0.0

    @property
    def forwards(self) -> float:
        """How often a layer's forward is computed, on average."""
        return 1 + self.recomputed * (self.recompute == "full")


class Depth(NamedTuple):
    """The part of a plan that decides which layers are where."""

    pp: int
    virtual_stages: int
    schedule: str

    @property
    def n_stages(self) -> int:
        return self.pp * self.virtual_stages

    def stages_of(self, rank: int) -> list[int]:
        """The stages on one pipeline rank."""
        if self.schedule in V_SHAPED:
            return [rank, self.n_stages - 1 - rank]
        return list(range(rank, self.n_stages, self.pp))

    def schedule_of(self, n_micro_batches: int) -> Schedule:
        """The schedule of a pipeline with so many micro-batches."""
        build = schedules.SCHEDULES[self.schedule]
        more = (self.virtual_stages,) if self.schedule == "interleaved_1f1b" else ()
        return build(self.n_stages, n_micro_batches, *more)


@dataclass(frozen=True)
class Plan:
    """A plan: how a step is divided among dp x tp x pp x cp devices, and what it trades for what.

    micro_batch: sequences that go through the pipeline together.  schedule: one of SCHEDULES.
    virtual_stages: stages on each pipeline rank; schedules that are V-shaped have two.
    zero: 0, or what data ranks shard: 1 optimizer state, 2 gradients too, 3 parameters too.
    recompute: what the backward pass computes again: "none", every layer ("full"), or what takes much memory and little
        time ("selective"): attention scores; under flash attention what norms and the activation function make.
    fp32_gradients: gradients are kept and summed in 32 bits: 18 bytes a parameter in place of 16.
    overlap: traffic that runs while the device computes, any of "data" (gradients behind the last micro-batch's
        backward), "tensor" (behind the weight gradients; with sequence parallelism behind all products, piece by
        piece), "pipeline" (behind other micro-batches), "experts" (the all-to-alls of one micro-batch behind another's
        computation).
    fused: small kernels are merged (bias with GELU, scale with mask and softmax); False: each by itself.
    shards: over how many replicas ZeRO shards; None: all. Fewer, such as those of a node, is hybrid sharding:
        parameters are gathered among these, and gradients summed over the others (Zhao et al. 2023, section 3.2.2).

    recomputed: the share of every rank's layers that recompute is for; 0.5 for every other one.
    ep: devices that divide the experts of a layer among them; tensor parallelism does not cut an expert.
    dispatch: how tokens reach their experts: by kernels made for it ("fused": DeepEP, HybridEP), which send it once to
        each device; or by a library's all-to-alls, which send every copy, and for which the host has to learn first how
        many go where ("all-to-all"), unless every expert takes the same number and drops the rest ("capacity").
    offloaded: the share of every rank's layers whose activations wait for backward in the memory of the host.

    Raises ValueError for values that no model could be trained with.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    precision: str = "bf16"
    cp: int = 1
    fp32_gradients: bool = False
    overlap: tuple[str, ...] = ("data",)
    fused: bool = True
    shards: int | None = None
    recomputed: float = 1.0
    ep: int = 1
    dispatch: str = "fused"
    offloaded: float = 0.0

    def __post_init__(self) -> None:
        if self.shards is not None and (self.zero == 0 or self.shards < 1 or self.dp * self.cp % self.shards):
            what = f"zero={self.zero} among {self.dp * self.cp} replicas"
            raise ValueError(
                f"shards={self.shards} cannot share out {what}; choose a divisor of them and zero=1, 2 or 3"
            )
        for name in ("recomputed", "offloaded"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is no share of the layers; give one from 0 to 1")
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "virtual_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} has to be at least 1")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(str, choices))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {listed}")
        if unknown := set(self.overlap) - set(OVERLAPS):
            raise ValueError(f"overlap={self.overlap!r} has {unknown.pop()!r}; choose from {', '.join(OVERLAPS)}")
        if self.schedule == "interleaved_1f1b" and self.virtual_stages == 1 and self.pp > 1:
            raise ValueError("virtual_stages=1 interleaves nothing; choose 2 or more, or schedule='1f1b'")
        if self.schedule in V_SHAPED and self.virtual_stages != 2:
            raise ValueError(f"virtual_stages={self.virtual_stages} with schedule={self.schedule!r}; a V has 2")
        if self.schedule not in ("interleaved_1f1b", *V_SHAPED) and self.virtual_stages > 1:
            only = "only interleaved_1f1b and the V-shaped schedules have several stages on a rank"
            raise ValueError(f"virtual_stages={self.virtual_stages} with schedule={self.schedule!r}; {only}")

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sharing(self) -> int:
        """The number of replicas over which ZeRO shards."""
        return self.shards or self.dp * self.cp

    @property
    def expert_sharing(self) -> int:
        """The number of an expert's dp x cp x tp / ep replicas over which ZeRO shards."""
        return max(1, self.sharing * self.tp // self.ep)

    @cached_property
    def slice(self) -> Slice:
        how = self.sequence_parallel, self.recompute, self.precision, "tensor" in self.overlap, self.fused
        experts = self.ep, "experts" in self.overlap, self.dispatch
        return Slice(self.tp, self.cp, self.micro_batch, *how, self.recomputed, *experts, self.offloaded)

    @cached_property
    def depth(self) -> Depth:
        return Depth(self.pp, self.virtual_stages, self.schedule)

    def micro_batches(self, global_batch: int) -> int:
        """The number of micro-batches that one pipeline processes in a step."""
        return global_batch // (self.dp * self.micro_batch)

    def check(self, model: ModelSpec, n_devices: int, global_batch: int) -> None:
        """Raises ValueError if the plan cannot exist for this model, number of devices and batch."""
        for complaint in _complaints(self, model, n_devices, global_batch):
            raise ValueError(complaint)


def _complaints(plan: Plan, model: ModelSpec, n_devices: int, global_batch: int) -> Iterator[str]:
    """Every reason why the plan cannot exist, each with what to change."""
    yield from _complaints_about_slices(plan, model)
    if plan.devices != n_devices:
        factors = f"dp={plan.dp} x tp={plan.tp} x pp={plan.pp}" + (f" x cp={plan.cp}" if plan.cp > 1 else "")
        rest = n_devices // (plan.tp * plan.pp * plan.cp)
        advice = f"; with dp={rest} it would" if rest * plan.tp * plan.pp * plan.cp == n_devices else ""
        yield f"{factors} makes {plan.devices}, but the cluster has {n_devices} devices{advice}"
    if global_batch < 1 or global_batch % (plan.dp * plan.micro_batch):
        ranks = f"dp={plan.dp} ranks in micro-batches of {plan.micro_batch}"
        yield f"global_batch={global_batch} does not divide among {ranks}; dp x micro_batch has to divide it"
    yield from _complaints_about_stages(plan, model, plan.micro_batches(global_batch))


def _complaints_about_slices(plan: Plan, model: ModelSpec) -> Iterator[str]:
    possible = "tp=" + _or([tp for tp in divisors(model.heads) if shares_heads(model, tp)])
    if model.heads % plan.tp:
        yield f"tp={plan.tp} does not divide heads={model.heads}; every device needs whole heads, so use {possible}"
    if not shares_heads(model, plan.tp):
        yield f"tp={plan.tp} and kv_heads={model.kv_heads} do not divide each other; use {possible}"
    if model.mlp_width % plan.tp:
        yield f"tp={plan.tp} does not divide the MLP's width {model.mlp_width}; choose one that does"
    if plan.ep not in (possible_ep := expert_ranks(model, plan.dp * plan.cp * plan.tp)):
        yield f"ep={plan.ep} does not divide experts={model.experts} and dp x cp x tp; use ep={_or(possible_ep)}"
    if model.experts and plan.tp > 1 and not plan.sequence_parallel:
        yield "sequence_parallel=False sends every token to its experts from each tensor rank; use True with experts"
    if plan.sequence_parallel and plan.tp == 1:
        yield "sequence_parallel=True shares work among tensor ranks, and tp=1; raise tp or leave it off"
    if model.sequence % (plan.cp * (plan.tp if plan.sequence_parallel else 1)):
        yield f"sequence={model.sequence} does not divide among cp={plan.cp} x tp={plan.tp}; choose smaller ones"


def _complaints_about_stages(plan: Plan, model: ModelSpec, m: int) -> Iterator[str]:
    n_stages, made = plan.depth.n_stages, f"pp={plan.pp} x virtual_stages={plan.virtual_stages}"
    if n_stages > model.layers + 2:
        yield f"{made} makes {n_stages} stages of {model.layers} layers; each needs one: lower pp or virtual_stages"
    if plan.schedule == "dualpipev" and m < n_stages:
        yield f"{m} micro-batches are too few for dualpipev on {n_stages} stages; use at least as many, or zbv"
    if plan.schedule != "interleaved_1f1b" or plan.pp == 1:
        return
    if not divides_evenly(model.layers, n_stages):
        even = [v for v in range(2, model.layers // plan.pp + 1) if divides_evenly(model.layers, plan.pp * v)]
        advice = f"virtual_stages={_or(even)}" if even else "use schedule='1f1b'"
        yield f"{model.layers} layers do not divide among {made}; interleaving needs equal stages: {advice}"
    if m % plan.pp:
        yield f"{m} micro-batches do not go through pp={plan.pp} in rounds, which interleaving needs; use a multiple"


def shares_heads(model: ModelSpec, tp: int) -> bool:
    """Whether tensor ranks can have whole query heads, and whole key heads or a copy of one."""
    return model.heads % tp == 0 and (model.key_value_heads % tp == 0 or tp % model.key_value_heads == 0)


def expert_ranks(model: ModelSpec, n_devices: int) -> list[int]:
    """Every ep that gives each of the devices of a stage the same number of whole experts."""
    return [ep for ep in divisors(n_devices) if model.experts % ep == 0] if model.experts else [1]


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _or(values: list[int]) -> str:
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])]) if len(values) > 1 else str(values[0])
