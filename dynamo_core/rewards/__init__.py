"""Rewards: what a completion is worth. Imports no torch, so that a worker process starts in milliseconds."""
