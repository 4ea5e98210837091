"""From a checkpoint to filled slabs: the plan, the pipeline and the child process around them."""
