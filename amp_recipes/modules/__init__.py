"""Answers questions about nn.Modules: names, blocks, sharded tensors."""
