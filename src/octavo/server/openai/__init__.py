"""The OpenAI API, one file per endpoint family: bodies are parsed once, into a typed `Job`."""
