"""How long one device computes: matrix products by their shape, everything else by the bytes it moves.

A layer is a handful of matrix products with small kernels between them. Products are limited by arithmetic, the
kernels between them by memory: a norm does a few operations on every number it reads.

    matrix product   seconds = FLOPs / (peak x fraction(shape))
    the rest         seconds = bytes read and written / (memory bandwidth x fraction)
    any kernel       a few microseconds to begin and end

    fraction(shape) = ceiling x waves / (waves + 1/2) x k / (k + K0)      waves = tiles of the result / cores

A product is dealt out to the cores in tiles of the result, and the last wave of tiles leaves cores idle, half of them
on average; each tile needs a prologue and an epilogue, worth K0 steps of its inner loop.
NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantization).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from course_lib.planner.hardware import Device
from course_lib.planner.spec import ModelSpec, Plan

TILE = 128 * 256  # numbers of the result that one core computes at a time: the large tile of vendors' libraries
INNER_LOSS = 128  # K0: what beginning and ending a tile costs, in steps of its inner loop
KERNEL = 4e-6  # seconds that a kernel needs to begin and end


class Product(NamedTuple):
    """`count` matrix products [m, k] x [k, n]."""

    m: float
    n: float
    k: float
    count: float = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


def product_seconds(product: Product, device: Device, precision: str) -> float:
    tiles = max(1.0, product.m * product.n * product.count / TILE)
    waves = tiles / device.cores
    fraction = device.matmul * waves / (waves + 0.5) * product.k / (product.k + INNER_LOSS)
    return product.flops / (device.peak[precision] * fraction) + KERNEL


class LayerTimes(NamedTuple):
    """Seconds of one micro-batch in one layer, without any traffic."""

    forward: float
    backward: float
    weight_grad: float
    attention: float
