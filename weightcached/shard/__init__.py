"""What is cached: a sealed manifest and the slabs that it describes."""
