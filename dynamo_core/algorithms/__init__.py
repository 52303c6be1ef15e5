"""The method's mathematics: allocation and statistics in numpy, the rest in torch, all pure."""
