"""Runs scheduled batches: request rows, index arrays, the forward pass, sampling.

Owns everything that holds tensors: model, KV arena, rows. Knows nothing of queues, policies or text.
"""
