"""
Exercise 9: a matmul whose rows do not know the batch. The page beside this file says more.
"""

from onecurve.cpu.loops import fma, loop  # fma(x, y, z): x * y + z, rounded once


@loop
def multiply(a, b, c):
    """Adds a (M, K) @ b (K, N) to c (M, N), arrays of float32: a.shape[0] is M."""
    raise NotImplementedError
