"""Evaluation: estimators of quality and what they cost to obtain."""
