"""From logits to token ids: per-request state, its columns for a step, the sampler, log-probabilities.

NumPy only. Rows are independent: what a row samples depends on its logits and its own state alone.
May import backends, kv_cache, quantization, loader and layer 0.
"""
