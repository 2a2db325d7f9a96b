"""Measuring code behind ``cpumoe bench``: shapes, correctness gate, cells, results.

Nothing here is timed against a wall of its own: every figure stands beside the read bandwidth and
the multiply-add rate of the same machine, taken between the runs that it explains.
"""
