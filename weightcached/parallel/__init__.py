"""Which bytes of a checkpoint belong to which rank: ranks, rules per model family, and the slice plan."""
