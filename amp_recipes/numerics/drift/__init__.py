"""Measures where low precision departs from fp32."""
