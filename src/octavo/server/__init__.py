"""The HTTP server: JSON and text stop here; below it there are token ids only.

`app` assembles the routes over an `EngineClient`, `run` serves them and shuts them down, `openai/` holds one
file per endpoint family. A non-streaming answer is the fold of the same deltas that a stream would write.
May import everything below; nothing but the command line imports it.
"""
