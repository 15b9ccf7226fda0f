"""Tests whether a killed and resumed run of a recipe equals one that was not killed; names the first difference.

`verify` starts the runs; `probe` is inside them and writes down what they do; `compare` reads that; `causes` explains.
"""
