# Two commands do everything: `make demo` and `make test`. They need Python 3.11+, make and a package index.
# PYTHON=python3.13 (or a path) does the same with another Python, in an environment of its own.
PYTHON ?= python3
VENV   ?= .venv$(if $(filter command environment,$(firstword $(origin PYTHON))),-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())'))
BIN    := $(VENV)/bin
# What is used is compiled on first use: most of what the development tools bring is not.
PIP    := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
RUN    := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
PACK   := $(VENV)/.installed-packaging
ARGS   ?=
# Marks of the tests that need nothing from elsewhere; those of the others are not even imported.
LOCAL  := $(shell sed -n "s/^addopts.* -m 'not slow and \(.*\)'.*/\1/p" pyproject.toml)
# Tests start kvproxy hundreds of times: without bytecode each process compiles all of it anew, and so does each collection.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo docs reference test test-slow test-loaded test-real test-compat test-services test-hosts test-ray check format lock bench coverage test-browser test-removal dist binary test-packaging clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

demo: $(RUN) ## simulated engines, controller and proxy; real traffic through them (ARGS=--stay leaves them running)
	@$(BIN)/kvproxy demo $(ARGS)

test: $(DEV) ## the fast test suite (PYTHON=python3.13 for another Python, ARGS=--uvloop for the other loop, SLOW=1: all of it)
	$(BIN)/python -m pytest -n 4 --dist worksteal $(if $(SLOW),-m "$(LOCAL)") $(ARGS)

test-slow: $(DEV) ## what takes long: starts of programs, workers and demos, replays of whole traces
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and $(LOCAL)" $(ARGS)

test-loaded: $(DEV) ## both three times running, beside busy processes, its workers paused now and then
	$(BIN)/python -m tests.loaded -m "$(LOCAL)" $(ARGS)

coverage: $(DEV) ## both with branch coverage and four times the examples of property tests; fails under 95 %
	FULL_EXAMPLES=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "$(LOCAL)" --cov --cov-report=term --cov-fail-under=95 $(ARGS)

test-real: $(DEV) ## installs the real vLLM (CPU build), LMCache and SGLang, runs the acceptance tests against them
	$(BIN)/python -m tests.real.engines.install
	$(BIN)/python -m pytest -m real -p no:xdist -o timeout=600 -o timeout_func_only=true -vv -s $(or $(filter tests/%,$(ARGS)),tests/real) $(filter-out tests/%,$(ARGS))

test-compat: $(DEV) ## API tests of vLLM, SGLang and LangChain, and SDKs for Node, straight to a real engine and through kvproxy (ARGS=node)
	$(BIN)/python -m tests.real.engines.install
	$(BIN)/python -m tests.compat $(ARGS)

test-services: $(DEV) ## against real servers (redis, nats, etcd, Envoy), which it installs where it can; else skips with a word
	@$(BIN)/python -m tests.services.install
	$(BIN)/python -m pytest -m services -p no:xdist -rs $(or $(filter tests/%,$(ARGS)),tests/services) $(filter-out tests/%,$(ARGS))

test-hosts: $(DEV) ## the embedded forms in other frameworks and servers, in LiteLLM and in Ray Serve, which it installs
	@$(PIP) --group hosts
	@$(BIN)/python -m tests.hosts.install
	$(BIN)/python -m pytest -m hosts -p no:xdist -rs $(or $(filter tests/%,$(ARGS)),tests/hosts) $(filter-out tests/%,$(ARGS))

test-ray: $(DEV) ## the router of Ray Serve alone and with a real Ray on two cores (a minute), which it installs
	@$(PIP) --group hosts
	$(BIN)/python -m pytest -m hosts -p no:xdist -rs tests/hosts/test_ray_router.py tests/hosts/test_ray.py tests/hosts/test_samples.py $(ARGS)

test-browser: $(DEV) ## the live page in a real browser (needs chromium and chromedriver, e.g. apt install chromium-driver)
	@$(PIP) --group browser
	$(BIN)/python -m pytest -m browser -p no:xdist -rs $(or $(filter tests/%,$(ARGS)),tests/browser) $(filter-out tests/%,$(ARGS))

test-removal: $(DEV) ## deletes each feature in turn, and all at once: the rest imports, checks, serves and pins (ARGS=NAME)
	$(BIN)/python -m tests.removal $(ARGS)

check: $(DEV) ## ruff, formatting, mypy --strict, the architecture test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

format: $(DEV) ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## writes constraints.txt anew: the newest versions that pyproject.toml allows, of all that anything here installs
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet --upgrade pip setuptools hatchling editables
	build/lock/bin/python -m pip install --quiet '.[otel,tokenizer,redis,nats,picker,simulator,litellm,ray]' --group dev --group browser --group packaging --group docs --group hosts
	{ sed -n '/^#/p' constraints.txt; build/lock/bin/python -m pip freeze --all --exclude kvproxy; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

bench: $(DEV) ## the measurements, each beside a peer or a limit (see benchmarks/README.md)
	$(BIN)/python -m benchmarks $(ARGS)

reference: $(DEV) ## write what is generated: reference pages, golden files, the list of rooms
	$(BIN)/python -m tests.golden
	$(BIN)/python -m kvproxy.operate.config.reference > docs/configuration.md
	$(BIN)/python -m kvproxy.operate.metrics.reference > docs/metrics.md
	$(BIN)/python -m tests.test_architecture

docs: $(DEV) ## the documentation as a site with search in build/site; a broken link is an error
	@$(PIP) --group docs
	$(BIN)/python packaging/site.py build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

dist: $(PACK) ## wheel and source distribution in dist/
	$(BIN)/python -m build --outdir dist .

binary: $(PACK) ## dist/kvproxy: one file that runs where no Python is installed
	$(BIN)/python -m PyInstaller --noconfirm --log-level WARN --workpath build/binary --distpath dist packaging/kvproxy.spec

test-packaging: $(DEV) $(PACK) ## builds the binary, the wheel and the sdist, and runs each in an empty environment
	$(BIN)/python -m pytest -m packaging -p no:xdist -o timeout=900 $(or $(filter tests/%,$(ARGS)),tests/packaging) $(filter-out tests/%,$(ARGS))

clean: ## removes what was built and installed here
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*

$(VENV)/.pip: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvproxy needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) pip
	@touch $@

$(RUN): $(VENV)/.pip pyproject.toml
	@echo "installing kvproxy and what it needs into $(VENV) (once; half a minute) ..."
	@$(PIP) --build-constraint constraints.txt --editable '.[simulator]'
	@touch $@

$(DEV): $(RUN)
	@echo "installing the development tools into $(VENV) (once) ..."
	@$(PIP) --group dev
	@touch $@

$(PACK): $(RUN)
	@$(PIP) --build-constraint constraints.txt --editable '.[otel,tokenizer]' --group packaging
	@touch $@
