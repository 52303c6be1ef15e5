"""Rollouts: the engine that samples answers and the collector that owns a step's groups."""
