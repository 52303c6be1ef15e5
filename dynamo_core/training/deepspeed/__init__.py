"""The one package that imports DeepSpeed."""
