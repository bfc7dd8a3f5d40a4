# Everything runs in a virtual environment of the checkout's own, made on first use and reused after.
# `make compare` and `make test` are the two commands a newcomer types.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python -m
ARGS   ?=
OUT    ?= runs/compare
JOBS   ?= 3
# The torch that is installed where there is none yet: the newest that CI runs.
TORCH  ?= torch<2.14
# Compiled tests are kept beside them: rewriting their asserts takes each process ten seconds.
unexport PYTHONDONTWRITEBYTECODE
# What test-quick leaves out are whole programs (the command line, trainings, studies, several processes) and long runs.
QUICK  := tests/formats tests/storage tests/kernels tests/optim tests/linear tests/nn tests/scaling tests/gauges \
          tests/test_import_table.py tests/test_recipes.py tests/test_pairwise.py tests/test_isolation.py \
          --ignore=tests/optim/test_collage.py --ignore=tests/optim/test_handing_over.py

.PHONY: compare test test-quick check bench docs format clean

compare: $(VENV)/.train  ## run the main job: train one small GPT under several precision recipes
	$(BIN)/narrowgauge compare --out $(OUT) $(ARGS)

test: check $(VENV)/.hub  ## lint, types and the whole CPU test suite
	$(RUN) pytest -n $(JOBS) --dist worksteal $(ARGS)

test-quick: $(VENV)/.test  ## one case of each test of the library itself, for the inner loop
	$(RUN) pytest -q -n $(JOBS) --dist worksteal --quick $(QUICK) $(ARGS)

check: $(VENV)/.test  ## lint and types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(VENV)/.test
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench: $(VENV)/.bench  ## every benchmark, one after the other
	@test -d benchmarks || { echo 'make bench: there is no folder benchmarks yet' >&2; exit 1; }
	@set -e; for file in benchmarks/bench_*.py; do echo "$$file"; $(BIN)/python "$$file" $(ARGS); done

study-%: $(VENV)/.bench  ## run a study, as in make study-collage_training ARGS='--check --out runs/check.json'
	$(RUN) studies.$*.run $(ARGS)

docs: $(VENV)/.docs  ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

clean:
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache

# Debian without python3-venv has no ensurepip: there the environment is made bare and the outer pip fills it.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "narrowgauge needs Python 3.11 to 3.13, $(PYTHON) is %d.%d (make PYTHON=python3.12 ...)" % v)'
	$(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --clear --without-pip $(VENV)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(BIN)/python install --quiet pip

# One stamp an extra; a changed pyproject.toml installs again.
$(VENV)/.train $(VENV)/.test $(VENV)/.docs $(VENV)/.bench: $(VENV)/.%: pyproject.toml | $(BIN)/python
	@echo 'installing torch and the rest into $(VENV): once, and minutes where torch has to be downloaded'
	@$(RUN) pip install --quiet --disable-pip-version-check --editable '.[train,$*]' \
		$$($(BIN)/python -c 'import torch' 2>/dev/null || echo '$(TORCH)')
	touch $@

# timm and open_clip need torchvision, which does not load beside a torch without CUDA, and then keeps transformers from
# loading. So they are beside the environment, where the tests that want them add them (tests/libraries.py).
$(VENV)/.hub: pyproject.toml | $(VENV)/.test
	@$(RUN) pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(VENV)/hub timm open_clip_torch \
		"torchvision==0.$$($(BIN)/python -c 'import torch; print(int(torch.__version__.split(".")[1]) + 15)').*" \
		ftfy wcwidth pandas 'webdataset<=0.2.86' braceexpand
	touch $@
