"""Against the packages that hosts bring (`make test-hosts` installs them): frameworks, LiteLLM, Ray Serve."""
