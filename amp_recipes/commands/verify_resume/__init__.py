"""Proves, for one recipe, that a run which was killed goes on as if it had not, or names what differs first and why.

`verify` starts the runs; `probe` is inside them and writes down what they do; `compare` reads that; `causes` explains.
"""
