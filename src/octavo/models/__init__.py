"""Models as data: a family file maps config.json to a `DecoderSpec`, and one decoder runs every spec.

`registry.build_spec` is the entrance, `decoder.Decoder` what the worker runs. Knows no request and no tensor
library; imports loader and backends.ops.
"""
