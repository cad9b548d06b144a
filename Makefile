# Works with GNU make 3.81. `make help` lists the targets.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/installed
# One thread for each of the processes that run side by side: on few cores threads hinder each other.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: help venv test test-slow book demo bench lint clean

help:
	@echo "Targets (times on 2 cores)"
	@echo "  make test       all tests that need neither GPU nor hours    5 min"
	@echo "  make book       train the demonstration, build the book      8 min first, under 1 min after; 2.3 GB with .venv"
	@echo "  make demo       only the four demonstration runs             4 min, 0.1 GB under runs/"
	@echo "  make test-slow  the exhaustive tests                         1 h or more"
	@echo "  make bench      speed against peers, into notebooks/data     10 min"
	@echo "  make lint       ruff over all Python                         1 s"
	@echo "  make venv       only the set-up, into .venv                  2 min, 2.2 GB"
	@echo "  make clean      remove the built book (runs and .venv stay)"

venv: $(STAMP)

$(STAMP): requirements.txt requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "fa-study needs Python 3.11, and $(PYTHON) is not; name it: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $(STAMP)

test: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2

test-slow: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "slow and not gpu"

demo: $(STAMP)
	$(ONE_THREAD) $(BIN)/python train/run.py -m experiment=demo attn=baseline,flash precision=fp32,bf16

book: demo
	$(ONE_THREAD) $(BIN)/jupyter-book build -W -n --keep-going book/
	@echo "The book: $(CURDIR)/book/_build/html/index.html"

bench: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/benchmarks/run.py

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf book/_build
