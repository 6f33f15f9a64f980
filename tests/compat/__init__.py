"""Other people's tests, run straight against a real engine and through kvproxy: `make test-compat`."""
