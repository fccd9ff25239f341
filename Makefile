# `make help` lists the targets.
.PHONY: help train test lint format lock audit setup clean
.DEFAULT_GOAL := help
LOCK ?= requirements.txt
# Test processes: those that wait for engines leave the cores to the others. 3 keep two cores busy in 24 GiB.
WORKERS ?= 3
BIN := .venv/bin

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: setup ## set up what is missing, then train; ARGS="experiment=quickstart trainer.max_steps=10" are mrl's own arguments
	$(BIN)/mrl train $(ARGS)

test: lint ## set up what is missing, then lint and run the tests; ARGS="-k packing" are pytest's own arguments
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup ## style, formatting, directions of imports, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyrefly check --output-format min-text

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: ## make or update .venv from LOCK (requirements.txt; on a cluster LOCK=requirements-gpu.txt)
	@scripts/setup.sh $(LOCK)

# The CPU lock is the GPU lock without what only a GPU can use: both have the same versions.
lock: setup ## resolve both locks again from setup.py; UPGRADE=--upgrade takes newer versions
	$(COMPILE) setup.py --extra dev --extra optuna --extra gpu $(UPGRADE) -o requirements-gpu.txt
	$(COMPILE) setup.py --extra dev --extra optuna --override requirements/overrides-cpu.txt -c requirements-gpu.txt -o requirements.txt
	$(COMPILE) requirements/uv.in $(UPGRADE) -o requirements/uv.txt

COMPILE = PATH=".uv/bin:$$PATH" UV_SYSTEM_CERTS=1 UV_CUSTOM_COMPILE_COMMAND="make lock" \
	uv pip compile --quiet --no-annotate --generate-hashes --python-version 3.12

audit: setup ## known vulnerabilities of what LOCK names, from PyPI's database; needs the network, and is not part of CI
	PATH=".uv/bin:$$PATH" UV_SYSTEM_CERTS=1 uv tool run pip-audit==2.10.1 --disable-pip --require-hashes -r $(LOCK)

clean: ## remove .venv, caches and build leftovers; outputs/ stays
	rm -rf .venv .uv build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
