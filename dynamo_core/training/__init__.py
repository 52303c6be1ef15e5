"""Training: models, scoring of tokens, ranks, and the DeepSpeed engines."""
