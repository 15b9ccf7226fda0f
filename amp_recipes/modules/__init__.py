"""Finds parts of nn.Modules: names, blocks, sharded tensors."""
