# kvproxy: two commands do everything: `make demo` and `make test`. Needs Python 3.11+, make and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
