"""Finds the modules that need fp32, and proves that pinning them is enough."""
