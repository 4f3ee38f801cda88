"""Decides who computes what in the next step, and records what came of it.

Owns the queues, every `Request` and, through `BlockTables`, the KV blocks. Sees token ids, never text or
tensors; its only messages to the worker are a `ScheduledBatch` down and a `StepOutput` up.
"""
