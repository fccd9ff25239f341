# `make help` lists the targets.
.PHONY: help train test test-all test-gpu browser lint docs format lock audit setup clean
.DEFAULT_GOAL := help
LOCK ?= requirements.txt
# Number of pytest processes. Many tests wait for engines, so 3 processes keep two cores busy. They need 24 GiB of memory.
WORKERS ?= 3
# Without bytecode files, every process that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: setup ## run `make setup`, then mrl train with the arguments in ARGS, e.g. ARGS="experiment=quickstart trainer.max_steps=10"
	$(BIN)/mrl train $(ARGS)

test: lint ## lint, then the core tests: about ten minutes on two cores; ARGS has arguments of pytest, e.g. ARGS="-k packing"
	$(PYTEST) $(ARGS)

test-all: lint browser ## lint, all tests except those that need GPUs, Slurm or hours, then the mutation score: two to three hours on two cores
	@scripts/fetch_te_python.sh
	@scripts/fetch_perfetto.sh
	@scripts/fetch_peers.sh
	MRL_NEEDS_BROWSER=1 $(PYTEST) -m "$(ALL)" --hypothesis-profile=random $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/mutation_score.py
	@scripts/missing_downloads.sh

test-gpu: setup ## the programs of tests/gpu, side by side on all GPUs; on a CPU, ARGS="-m extended --devices 4" runs them on 4 slots
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

browser: setup ## install the packages with which tests drive a browser; the browser itself is Debian's package chromium
	@PATH=".uv/bin:$$PATH" UV_SYSTEM_CERTS=1 VIRTUAL_ENV=.venv uv pip install --quiet --require-hashes -r requirements/browser.txt

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ALL = not gpu and not learning and not soak and not slurm

bench: setup ## run all benchmarks at small sizes in at most 20 minutes, and compare them with their last results; ARGS="--only balance step"
	$(BIN)/python benchmarks/run.py $(ARGS)

lint: setup ## check style, formatting, import directions, types and the links of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyrefly check --output-format min-text
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs: setup ## build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: setup ## fix style and formatting with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: ## create or update .venv from LOCK (default: requirements.txt; on a cluster, use LOCK=requirements-gpu.txt)
	@scripts/setup.sh $(LOCK)

# The CPU lock is the GPU lock without the packages that only a GPU can use. Both locks have the same versions.
lock: setup ## resolve both locks from setup.py; with UPGRADE=--upgrade, take the newest versions that setup.py allows
	$(COMPILE) setup.py --extra train --extra dev --extra optuna --extra trackers --extra gpu $(UPGRADE) -o requirements-gpu.txt
	$(COMPILE) setup.py --extra train --extra dev --extra optuna --extra trackers --override requirements/overrides-cpu.txt -c requirements-gpu.txt -o requirements.txt
	$(COMPILE) requirements/uv.in $(UPGRADE) -o requirements/uv.txt
	PATH=".uv/bin:$$PATH" UV_SYSTEM_CERTS=1 scripts/check_wheels.sh uv $(BIN)/python requirements-gpu.txt

COMPILE = PATH=".uv/bin:$$PATH" UV_SYSTEM_CERTS=1 UV_CUSTOM_COMPILE_COMMAND="make lock" \
	uv pip compile --quiet --no-annotate --generate-hashes --python-version 3.12

audit: setup ## list known vulnerabilities of the packages in LOCK, from PyPI's database; needs the network, so CI does not run it
	PATH=".uv/bin:$$PATH" UV_SYSTEM_CERTS=1 uv tool run pip-audit==2.10.1 --disable-pip --require-hashes -r $(LOCK)

clean: ## remove .venv, caches and build output; keep outputs/
	rm -rf .venv .uv build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
