"""The core: recipes, algorithms, data, rollouts, training, evaluation and stages, usable alone."""
