# make train   train a language model as 2 replicas x 2 shards on this machine
# make test    lint, type check and the tests of every change, in one process more than there are cores: every law for every scheme, minutes
#              PART=laws runs one folder of tests alone, PART="laws world" two; see tests/README.md
# make test-all  the whole products of schemes and settings as well, and the long searches: half an hour, each night
# make mutants   puts faults into the core, one at a time, and prints how many the laws find: an hour the first time
# make lint    lint and type check
# make docs    the site of the documentation, in site/
# make chaos   kills, hangs, signals, crashes in saves, damage, full disks, bad messages: nothing may be lost
# make gpu     checks and measures the package on a GPU, with the torch, triton and pytest that PYTHON has: no install
#              GPU="fast twin" runs parts, GPU="law" the one that runs only where it is named,
#              GPU="--device cpu --tiny" tries the script; docs/gpu.md
# make release-check   wheel and sdist in empty environments of pip and, where it is there, uv, with torch 2.10
#              and 2.13: help, torchrun, type checkers; both are downloaded. RELEASE="--torch 2.13.0 --keep dist"
#              takes one torch, and keeps what passed in dist/
# make receivers   updates go through vLLM's own loader of sparse patches, read from its wheel: pip downloads 340 MB
# make hooks   installs the git hooks of .pre-commit-config.yaml, if pre-commit is there
# All but gpu and release-check make .venv first. A torch that PYTHON has is kept, unless PYTHON is of a virtual
# environment, which another one cannot see; otherwise 2.13.0 is installed.
# TORCH=torch==2.10.0 makes and uses an environment of its own with that torch, .venv-torch-2.10.0:
#   make test PART="laws world" TORCH=torch==2.10.0

PYTHON ?= python3
ifeq ($(TORCH),)
WANTED := torch==2.13.0
VENV := .venv
else
WANTED := $(TORCH)
VENV := .venv-$(subst *,x,$(subst ==,-,$(TORCH)))
endif
# Byte code is written for what is imported, when it is: for all that is installed it would take longer than installing.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# The tests of a file stay in one process, which starts them in the order of their names. Many wait for others now and then.
TESTERS ?= $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 2) + 1, 8))')
PYTEST := $(VENV)/bin/python -m pytest --numprocesses $(TESTERS) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-all pytest mutants chaos gpu lint docs hooks clean release-check receivers

train: $(VENV)/.train
	$(VENV)/bin/detonation train quick-lm

# Types are checked beside the tests, which leave a core idle now and then.
test test-all: $(VENV)/.test
	$(VENV)/bin/detonation fetch fashion-mnist bible-en-es sotu
	$(MAKE) --no-print-directory --jobs=2 $(if $(PART),,lint) pytest \
		SELECT='$(if $(filter test-all,$@),-m "" --hypothesis-profile=long)'

pytest: $(VENV)/.test
	$(PYTEST) $(SELECT) $(addprefix tests/,$(PART))

mutants: $(VENV)/.test
	$(VENV)/bin/python tests/mutants.py $(MUTANTS)

chaos: $(VENV)/.test
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR PYTHONPATH=tests:. $(VENV)/bin/python tests/chaos/gate.py $(CHAOS)

gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu $(GPU)

VLLM ?= vllm==0.33.0
receivers: $(VENV)/.test
	$(PYTHON) -m pip download --quiet --no-deps --dest runs/receivers $(VLLM)
	VLLM_WHEEL="$$(ls runs/receivers/$(subst ==,-,$(VLLM))-*.whl)" \
		$(VENV)/bin/python -m pytest -s tests/integrations/test_vllm.py

release-check:
	$(PYTHON) tests/package/release.py $(RELEASE)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

docs: $(VENV)/.docs
	$(VENV)/bin/python docs/recipe_reference.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	$(VENV)/bin/python docs/check_links.py site

hooks: $(VENV)/.test
	@command -v pre-commit >/dev/null || { echo "pre-commit is not here: pip install pre-commit"; exit 1; }
	pre-commit install

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "DeToNATION needs Python >= 3.11: make PYTHON=python3.12"; exit 1; }
	@if [ -z "$(TORCH)" ] && $(PYTHON) -c 'import sys, torch; sys.exit(sys.prefix != sys.base_prefix)' 2>/dev/null; then \
		echo "keeping the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		echo "installing $(WANTED) into $(VENV)"; $(PYTHON) -m venv $(VENV) && $(PIP) '$(WANTED)'; \
	fi
	@touch $@

$(VENV)/.train: $(VENV)/.torch pyproject.toml
	@echo "installing detonation and what training needs into $(VENV)"
	@$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	@echo "installing detonation and what training and tests need into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.train $@

$(VENV)/.docs: $(VENV)/.train
	@echo "installing what the site needs into $(VENV)"
	@$(PIP) -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv .venv-* runs site
