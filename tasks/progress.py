"""temporary"""
class Progress:
    def __init__(self, spec): pass
    def __enter__(self): return self
    def __exit__(self,*a): pass
    def update(self, lines): pass
