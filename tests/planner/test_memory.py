"""Memory against the formulas of the papers and Megatron-LM, written out here once more by hand."""

from __future__ import annotations

import pytest

from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from course_lib.planner.memory import Memory, memory_of, memory_of_worst_device, model_state
from course_lib.planner.spec import layers_of_stages

GPT3 = ModelSpec(96, 12288, 96, 2048, 51200)
N = 7_500_000_000


def memory_of_rank(model: ModelSpec, plan: Plan, n_micro_batches: int, rank: int) -> Memory:
    return next(memory_of([rank], model, plan, n_micro_batches))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_parameter_costs_sixteen_bytes(precision: str) -> None:
    assert sum(model_state(N, Plan(precision=precision))) == 16 * N


def test_gradients_in_32_bits_make_it_eighteen() -> None:
    assert sum(model_state(N, Plan(fp32_gradients=True))) == 18 * N


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_the_distributed_optimizer_takes_six_bytes_and_a_share_of_twelve(dp: int) -> None:
    plan = Plan(dp=dp, zero=1, fp32_gradients=True)
    assert sum(model_state(N, plan)) == N * (6 + 12 / dp)


def test_a_share_is_rounded_up() -> None:
    assert model_state(10, Plan(dp=4, zero=3)) == (3 * 2, 3 * 2, 3 * 12)


def test_context_ranks_share_too() -> None:
    assert model_state(N, Plan(dp=2, cp=2, zero=3)) == model_state(N, Plan(dp=4, zero=3))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_are_equations_two_and_four_of_korthikanti(tp: int, sequence_parallel: bool) -> None:
    if tp == 1 and sequence_parallel:
        return
    s, b, h, a, p = GPT3.sequence, 4, GPT3.hidden, GPT3.heads, 8
    whole = 10 / tp if sequence_parallel else 10
    per_layer = s * b * h * (whole + 24 / tp + 5 * a * s / (h * tp))
    plan = Plan(tp=tp, pp=p, micro_batch=b, sequence_parallel=sequence_parallel)
    second = memory_of_rank(GPT3, plan, 64, 1)
    assert second.activations == pytest.approx(per_layer * (96 / p) * (p - 1))


def test_inputs_of_products_in_8_bits_are_kept_in_8_bits() -> None:
    """Two of the width of the hidden states, after the norms, and one of the MLP's; the rest stays in 16 bits."""
    model = ModelSpec(4, 1024, 8, 2048, 32000, ffn_hidden=3072, gated_mlp=True, flash_attention=True)
    wide, narrow = (memory_of_rank(model, Plan(precision=one), 1, 0).activations for one in ("bf16", "fp8"))
    assert wide - narrow == 4 * 2048 * (2 * 1024 + 3072)


def test_of_latent_attention_selective_recomputation_keeps_the_latents_and_what_goes_into_out() -> None:
    latent = (384, 128, 64)
    model = ModelSpec(4, 1024, 8, 2048, 32000, ffn_hidden=3072, gated_mlp=True, flash_attention=True, head_width=128,
                      latent=latent)  # fmt: skip
    kept = memory_of_rank(model, Plan(recompute="selective"), 1, 0).activations
    attention = 8 * (128 + 32)  # with the mean of its two widths
    assert kept == 4 * 2048 * 2 * (2 * 1024 + attention + sum(latent) + 2 * 3072)


def test_selective_recomputation_drops_the_scores_and_full_keeps_only_inputs() -> None:
    s, b, h, layers = 2048, 1, 12288, 12
    selective = memory_of_rank(GPT3, Plan(pp=8, recompute="selective"), 64, 7)
    assert selective.activations == pytest.approx(34 * s * b * h * layers)
    full = memory_of_rank(GPT3, Plan(pp=8, recompute="full"), 64, 7)
    assert full.activations == pytest.approx(2 * s * b * h * layers)


def test_a_third_of_the_layers_computed_again_leaves_two_thirds_of_their_activations() -> None:
    s, h, layers = 2048, 12288, 12
    whole = s * h * (34 + 5 * 96 * s / h)
    some = memory_of_rank(GPT3, Plan(pp=8, recompute="full", recomputed=1 / 3), 64, 7)
    assert some.activations == pytest.approx(4 * 2 * s * h + 8 * whole)
    some = memory_of_rank(GPT3, Plan(pp=8, recompute="selective", recomputed=1 / 3), 64, 7)
    assert some.activations == pytest.approx(4 * 34 * s * h + (layers - 4) * whole)


def test_flash_attention_keeps_no_scores() -> None:
    flash = ModelSpec(96, 12288, 96, 2048, 51200, flash_attention=True)
    with_flash = memory_of_rank(flash, Plan(pp=8), 64, 7).activations
    assert with_flash == memory_of_rank(GPT3, Plan(pp=8, recompute="selective"), 64, 7).activations


def test_early_stages_of_1f1b_hold_most() -> None:
    held = [memory_of_rank(GPT3, Plan(pp=8), 64, rank).activations for rank in range(1, 8)]
    assert held == sorted(held, reverse=True)


def test_gpipe_holds_all_micro_batches() -> None:
    short, long = (memory_of_rank(GPT3, Plan(pp=8, schedule="gpipe"), m, 3).activations for m in (8, 32))
    assert long == pytest.approx(4 * short)


def test_the_worst_device_is_the_worst_of_all() -> None:
    bloom = ModelSpec(70, 14336, 112, 2048, 250880, learned_positions=False)
    for plan in (Plan(pp=12, tp=4, schedule=name) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2")):
        everyone = [memory_of_rank(bloom, plan, 48, rank).total for rank in range(12)]
        assert memory_of_worst_device(bloom, plan, 48).total == max(everyone)


def test_stages_have_equal_layers_or_count_embedding_and_logits_as_one() -> None:
    assert layers_of_stages(96, 8) == [12] * 8
    assert layers_of_stages(70, 12) == [5, *[6] * 10, 5]  # BLOOM
    assert layers_of_stages(126, 128) == [0, *[1] * 126, 0]  # Llama 3
    for layers, n_stages in ((7, 4), (10, 3), (5, 5), (33, 8)):
        assert sum(layers_of_stages(layers, n_stages)) == layers
        assert min(layers_of_stages(layers, n_stages)) >= 0


def test_published_models_have_their_published_sizes() -> None:
    llama3 = ModelSpec(
        126, 16384, 128, 8192, 128256, kv_heads=8, ffn_hidden=53248, gated_mlp=True, tied_embeddings=False
    )
    bloom = ModelSpec(70, 14336, 112, 2048, 250880, learned_positions=False)
    assert llama3.parameters == pytest.approx(405.85e9, rel=1e-4)
    assert bloom.parameters == pytest.approx(176.247e9, rel=1e-5)  # without its embedding norm
    gpt2 = ModelSpec(12, 768, 12, 1024, 50257)
    assert gpt2.parameters == 124_439_808  # GPT-2 small


def test_the_breakdown_adds_up_and_is_held_against_the_device() -> None:
    found = estimate(GPT3, Cluster(nodes=8), Plan(tp=8, pp=8, sequence_parallel=True, recompute="selective"), 64)
    assert found.memory.total == pytest.approx(sum(found.memory.parts.values()))
    assert found.fits
    assert found.capacity == found.cluster.spec.memory
    assert not estimate(GPT3, Cluster(nodes=8), Plan(tp=8, pp=8), 64).fits


def test_the_margin_is_a_part_of_its_own_and_grows_with_tensors_and_groups() -> None:
    alone = memory_of_rank(GPT3, Plan(), 1, 0)
    assert alone.total == alone.tensors + alone.margin == pytest.approx(sum(alone.parts.values()))
    assert alone.margin == pytest.approx(2**30 + 0.03 * alone.tensors)
    grouped = memory_of_rank(GPT3, Plan(dp=2, tp=2, pp=2), 1, 0)
    assert grouped.margin == pytest.approx(2**30 + 3 * 2**29 + 0.03 * grouped.tensors)


def test_a_plan_that_leaves_no_room_for_plain_software_may_fit() -> None:
    plan = Plan(tp=8, pp=6, micro_batch=2, sequence_parallel=True, recompute="selective")
    tight = estimate(GPT3, Cluster(nodes=6), plan, 48)
    assert tight.memory.low < tight.memory.total < tight.capacity < tight.memory.high
    assert tight.fit == "may fit" and not tight.fits


def test_the_logits_are_gone_when_the_layers_are_computed_back() -> None:
    """Only the larger of the two counts: the logits, or the layer that is computed again with its gradients."""
    s, h, v = 2048, 12288, 51200
    again = s * h * (34 + 5 * 96 * s / h) + 2 * 2 * s * s * 96  # with gradients of its scores
    last, other = (memory_of_rank(GPT3, Plan(pp=8, recompute="full"), 64, rank) for rank in (7, 6))
    assert other.buffers - last.buffers == pytest.approx(last.logits)
    wide = ModelSpec(96, h, 96, s, 100 * v)
    last, other = (memory_of_rank(wide, Plan(pp=8, recompute="full"), 64, rank) for rank in (7, 6))
    assert last.logits > again
    assert other.buffers - last.buffers == pytest.approx(again)


def test_gradients_in_16_bits_beside_sums_in_32_are_those_of_one_layer_and_of_the_logits() -> None:
    """Of all layers in plain software, unless ZeRO-2 shares gradients out."""
    llama = ModelSpec(8, 4096, 32, 4096, 128256, gated_mlp=True, tied_embeddings=False, flash_attention=True)
    in_16, in_32 = (memory_of_rank(llama, Plan(fp32_gradients=is_32), 1, 0) for is_32 in (False, True))
    assert in_32.buffers - in_16.buffers == 2 * (llama.layer_parameters.total + 4096 * 128256)
    assert in_32.plain - in_16.plain == 2 * llama.parameters
    shared = (memory_of_rank(llama, Plan(dp=2, zero=2, fp32_gradients=is_32), 1, 0).plain for is_32 in (False, True))
    assert len(set(shared)) == 1


def test_plain_software_keeps_14_bytes_of_a_logit_and_the_activation_function_of_a_gate() -> None:
    llama = ModelSpec(8, 4096, 32, 4096, 128256, gated_mlp=True, tied_embeddings=False, flash_attention=True)
    kept = memory_of_rank(llama, Plan(), 1, 0)
    assert kept.logits == 4096 * (2 * 2 * 4096 + 6 * 128256)
    assert kept.plain == 4096 * (8 * 128256 + 8 * 2 * 4 * 4096)
    again = memory_of_rank(llama, Plan(recompute="full"), 1, 0)
    assert again.plain == 4096 * 8 * 128256


def test_zero_3_gathers_the_matrices_at_both_ends_too() -> None:
    llama = ModelSpec(8, 4096, 32, 4096, 128256, gated_mlp=True, tied_embeddings=False, flash_attention=True)
    small = ModelSpec(8, 4096, 32, 4096, 256, gated_mlp=True, tied_embeddings=False, flash_attention=True)
    large, little = (memory_of_rank(model, Plan(dp=8, zero=3), 1, 0).buffers for model in (llama, small))
    assert large - little == pytest.approx(2 * 2 * 4096 * 128000, rel=0.3)  # less a layer's, which are in the logits


def test_selective_recomputation_drops_what_norms_and_activation_functions_make_where_there_are_no_scores() -> None:
    llama = ModelSpec(80, 8192, 64, 4096, 128256, kv_heads=8, ffn_hidden=28672, gated_mlp=True, flash_attention=True)
    plain, selective = (
        memory_of_rank(llama, Plan(pp=4, recompute=how), 8, 3).activations for how in ("none", "selective")
    )
    tokens, layers = 4096, 20
    assert plain - selective == pytest.approx(tokens * 2 * (2 * 8192 + 28672) * layers)
    times = [
        estimate(llama, Cluster(nodes=4), Plan(tp=8, pp=4, recompute=how), 16).step_time
        for how in ("none", "selective", "full")
    ]
    assert times[0].recompute == 0 < times[1].recompute < times[2].recompute / 5


def test_zero_2_in_an_interleaved_pipeline_holds_the_gradients_of_one_stage() -> None:
    def memory(zero: int) -> float:
        plan = Plan(dp=64, tp=8, pp=8, schedule="interleaved_1f1b", virtual_stages=4, zero=zero, fp32_gradients=True)
        return memory_of_rank(GPT3, plan, 16, 1).tensors

    held = 4 * GPT3.layer_parameters.total / 8 * 12
    assert memory(1) - memory(2) == pytest.approx(held * (1 - 1 / 4 - 1 / 64), rel=0.01)
