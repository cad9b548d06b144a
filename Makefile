# Works with GNU make 3.81. `make help` lists the targets.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/installed
# One thread for each of the processes that run side by side: on few cores threads hinder each other.
# No GPU either: tests, demonstration, study and tables are of the CPU, and CUDA's flash kernel takes no FP32.
ONE_THREAD := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

COMMON := model.size=tiny batch_size=4 snapshots.every=50 probe.deviation_every=200 logger.mode=disabled
ifdef SMALL
STUDY := seeds=0,1 sweeps=paper,twins steps=300 runs_dir=runs/small $(COMMON)
else
LONG := steps=1000 runs_dir=runs/study tables=notebooks/data $(COMMON)
STUDY := seeds=0,1,2,3,4,5,6,7 $(LONG)
endif

.PHONY: help venv test test-slow test-book book pdf demo tables study kernels bench picture lint clean

help:
	@echo "Targets (times on 2 cores)"
	@echo "  make test       all tests that need neither GPU nor hours    3 min, and set-up"
	@echo "  make book       train the demonstration, build the book      6 min first, 15 s after; 0.1 GB"
	@echo "  make demo       only the four demonstration runs             4 min, 0.1 GB under runs/"
	@echo "  make test-slow  the exhaustive tests                         1 h or more"
	@echo "  make tables     the stored tables of the notebooks, again    60 min at most; resumes"
	@echo "  make study      the training runs behind Figures 7 and 8     hours (it says), 3 GB under runs/; resumes"
	@echo "                  SMALL=1: two seeds, 300 steps, under runs/small   20 min"
	@echo "  make kernels    every kernel that runs here, into a table    10 min, 1.1 GB in .venv-kernels"
	@echo "  make bench      speed against peers, into notebooks/data     10 min"
	@echo "  make picture    the picture of the README, from the tables   10 s"
	@echo "  make lint       ruff, spelling, types                        10 s"
	@echo "  make test-book  the built book in Chrome or Chromium         5 min after make book"
	@echo "  make pdf        the book as one PDF, printed by the browser  1 min after make demo"
	@echo "  make venv       only the set-up, into .venv                  2 min, 2.4 GB"
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
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "slow and not gpu"

demo: $(STAMP)
	$(ONE_THREAD) $(BIN)/python train/run.py -m experiment=demo attn=baseline,flash precision=fp32,bf16

book: demo
	$(ONE_THREAD) $(BIN)/jupyter-book build -W -n --keep-going book/
	@echo "The book: $(CURDIR)/book/_build/html/index.html"

test-book: book
	$(BIN)/python tests/browser/find_browser.py
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 tests/browser/check_files.py tests/browser/check_pages.py

pdf: demo
	$(ONE_THREAD) $(BIN)/jupyter-book build -W -n --keep-going --builder singlehtml book/
	$(BIN)/python tests/browser/print_book.py

tables: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m fa_study.experiments

study: $(STAMP)
	$(ONE_THREAD) $(BIN)/python train/study.py $(STUDY)
ifndef SMALL
	$(ONE_THREAD) $(BIN)/python train/study.py seeds=8,9,10,11,12,13,14,15 sweeps=fresh $(LONG)
endif

# Kernels of other machines run here by interpreters, in an environment of its own that sees the packages of .venv.
kernels: .venv-kernels/installed
	$(ONE_THREAD) TRITON_INTERPRET=1 FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE \
		.venv-kernels/bin/python -W ignore -m fa_study kernels --all --out notebooks/data/kernels.csv

.venv-kernels/installed: requirements-kernels.txt requirements-gpu.txt $(STAMP)
	$(BIN)/python -m venv .venv-kernels
	echo "import site; site.addsitedir('$(CURDIR)/.venv/lib/python3.11/site-packages')" \
		> .venv-kernels/lib/python3.11/site-packages/project.pth
	.venv-kernels/bin/python -m pip install --quiet -r requirements-kernels.txt
	FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE \
		.venv-kernels/bin/python -m pip install --quiet --no-deps --no-build-isolation -r requirements-gpu.txt
	@touch $@

bench: $(STAMP)
	$(ONE_THREAD) $(BIN)/python tests/benchmarks/run.py

picture: $(STAMP)
	$(BIN)/python -m fa_study.figures

# dout is the gradient of the output; sise a misspelt setting that a test gives.
lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	git ls-files -z '*.py' '*.md' '*.yml' '*.yaml' '*.toml' Makefile | xargs -0 $(BIN)/codespell --ignore-words-list dout,nd,sise
	$(BIN)/ty check fa_study hydra_plugins train

clean:
	rm -rf book/_build
