"""One engine: the step loop, its process, and the clients that turn token ids into text.

`core` and `loop` run beside the model and see token ids only; `async_engine`, `llm`, `output` and the
tokenizer run beside the server and never see a tensor.
"""
