"""Attaching to cached weights: connect, map, tensors over the mapped memory."""
