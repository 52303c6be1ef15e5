"""Data: reading, validating, generating, templating and batching rows."""
