"""Real programs beside kvproxy: what it speaks to, not stand-ins (`make test-services`)."""
