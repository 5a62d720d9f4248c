"""What counts on a rank: the bytes it holds while it trains, the memory it takes, the tensors it sends."""
