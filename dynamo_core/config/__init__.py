"""Recipes: schema, presets, loading and overrides. Imports nothing heavy, so that a bad recipe fails at once."""
