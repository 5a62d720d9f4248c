"""Instruments that count on a rank: the bytes it holds while it trains, its peak memory, the tensors it sends."""
