"""Measures how low precision differs from fp32."""
