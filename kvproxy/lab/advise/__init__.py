"""Which settings would help the traffic that was recorded."""
