# make run    create .venv, install, run the main job   (make run ARGS="model=vit precision=bf16-mixed")
# make test   the test suite      make check   lint and types      make docs   regenerate docs/ tables
# make bench  the runner beside raw PyTorch, Lightning and Accelerate, into bench/results/peers.md
PYTHON ?= python3
ARGS ?= precision=16-mixed model=resnet
BIN := .venv/bin

# Without compiled files each command and test process compiles the runner's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check docs bench clean

run: .venv/installed
	$(BIN)/python -m runner $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: .venv/installed
	$(BIN)/python docs/generate.py

bench: .venv/installed
	$(BIN)/python -m bench.peers

# rxnmapper is 3 MB with a pretrained ALBERT for the tests; its own requirements pin an old
# transformers, hence --no-deps.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "rxnmapper>=0.4.3,<0.5"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
