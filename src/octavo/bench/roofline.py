"""What a step must read and compute at least where weights are stored in one plain format, and multiplied in float32.

Of the native backend, `backends.native.plan_report` knows it to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.backends.step_cost import StepCost, StepRequest, attention_cost
from octavo.models.decoder import parameters
from octavo.models.spec import DecoderSpec

_VECTOR_VALUE_BYTES = 4  # norms and biases are kept in float32


def step_cost(
    spec: DecoderSpec, requests: Sequence[StepRequest], *, weight_value_bytes: float, kv_value_bytes: float
) -> StepCost:
    """The cost of one step in which every request wants the logits of its last token."""
    num_tokens = sum(request.num_tokens for request in requests)
    shapes = [parameter.shape for parameter in parameters(spec) if parameter != spec.embedding]
    matrix_values = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    vector_values = sum(math.prod(shape) for shape in shapes if len(shape) == 1)
    head_values = math.prod(spec.head.shape)
    embedded_values = num_tokens * spec.hidden_size  # rows of the table, not the table
    attention = StepCost()
    for layer in spec.layers:
        shape = layer.attention
        attention += attention_cost(
            requests,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            kv_value_bytes=kv_value_bytes,
        )
    matrices = StepCost(
        weight_bytes=(matrix_values + head_values + embedded_values) * weight_value_bytes
        + vector_values * _VECTOR_VALUE_BYTES,
        f32_flops=2 * matrix_values * num_tokens + 2 * head_values * len(requests),
    )
    return matrices + attention
