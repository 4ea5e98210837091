"""vLLM: `vllm serve MODEL --load-format weightcached`. vLLM is imported inside functions only, when it runs us."""
