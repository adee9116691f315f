# make run    create .venv, install what runs need, run the main job   (make run ARGS="model=vit precision=bf16-mixed")
# make test   every promise once, about 15 minutes on two idle cores       make check   lint and types
# make test-all   further examples, too: products, second platforms, generated cases; 45 minutes
# make test-budget   whether a file took more than its share of the last `make test`
# make docs   regenerate docs/ tables         make site   pages and API to search and read: build/site/index.html
# make bench  the runner beside raw PyTorch, Lightning and Accelerate, into bench/results/peers.md
PYTHON ?= python3
ARGS ?= precision=16-mixed model=resnet
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Without compiled files each command and test process compiles the runner's modules anew.
unexport PYTHONDONTWRITEBYTECODE

# Of generated cases; make prints it.
SEED ?= $(shell date +%s)
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: run test test-all test-extended test-budget check docs site bench clean

run: .venv/installed
	$(BIN)/python -m runner $(ARGS)

test: .venv/dev
	$(PYTEST)

test-all: site
	$(PYTEST) -m "not soak" --hypothesis-seed=$(SEED)

# What test-all adds to test; TEST_ARGS="--stop-after 600" skips what has not begun after 600 s.
test-extended: site
	$(PYTEST) -m "extended and not soak" --hypothesis-seed=$(SEED) $(TEST_ARGS)

test-budget:
	$(BIN)/python tests/helpers/times_record.py .pytest_cache/v/runner/times

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: .venv/dev
	$(BIN)/python docs/generate.py

# A broken link or docstring fails it.
site: .venv/dev
	$(BIN)/python -m sphinx -q -W -c docs . build/site
	echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' > build/site/index.html

bench: .venv/dev
	$(BIN)/python -m bench.peers

# Not compiled by pip: a run compiles the modules that it imports, which are few of all. torchao's
# are compiled here, for compiling them prints a warning of its source, and fails a test.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing PyTorch and what runs need into .venv: about 6.5 GB on the disk (3.3 GB to download), 2 to 5 minutes (docs/install.md: less without CUDA)."
	$(PIP) --progress-bar on --no-compile -e .
	-$(BIN)/python -W ignore -m compileall -q .venv/lib/python3*/site-packages/torchao
	touch $@

# What tests, checks and benchmarks need, too. rxnmapper is 3 MB with a pretrained ALBERT for the
# tests; its own requirements pin an old transformers, hence --no-deps.
.venv/dev: .venv/installed
	$(PIP) --quiet -e ".[dev]"
	$(PIP) --quiet --no-deps "rxnmapper>=0.4.3,<0.5"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
