"""How several proxies decide as one."""
