"""Rules of other schedulers that admit sessions, to compare with: `kvproxy replay --policy` takes them as
`benchmarks.session_rules.vllm_router:VllmRouter`."""
