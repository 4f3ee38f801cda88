"""The reference backend: every operator in plain PyTorch, the definition that others are tested against."""
