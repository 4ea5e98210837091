"""What is on disk: safetensors files, read strictly, and the digest of their content."""
