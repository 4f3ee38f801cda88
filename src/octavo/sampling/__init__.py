"""From logits to token ids: per-request state, its columns for a step, the sampler, log-probabilities.

With NumPy, or with a backend's kernels, which give the same bits. Rows are independent: what a row samples
depends on its logits and its own state alone.
May import backends, kv_cache, quantization, loader and layer 0.
"""
