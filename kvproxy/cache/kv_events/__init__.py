"""KV events of vLLM: what blocks each engine holds, followed over ZMQ."""
